"""The count of policy versions.

Owns the rule that versions only rise, across failures and restarts of a publisher. Ignores what a
version holds.
"""

from __future__ import annotations

from engine.errors import Conflict


class VersionCount:
    """The newest version known to be in use, and how often a lower one was refused."""

    def __init__(self, current: int) -> None:
        self.current = current
        self.refused = 0

    def check(self, new_version: int) -> None:
        """Raises `Conflict` unless `new_version` is above everything seen so far."""
        if new_version <= self.current:
            self.refused += 1
            raise Conflict(field="new_version", expected=f"more than {self.current}", actual=new_version)

    def observe(self, version: int) -> None:
        self.current = max(self.current, version)
