"""Fair turns: nobody gets far ahead of the slowest.

Owns who may begin a step. Ignores what a step is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence


class Turns:
    """`max_lead` 0 keeps everybody in step. One that has failed holds nobody up: `leave` says so."""

    def __init__(self, names: Sequence[str], max_lead: int) -> None:
        self.done = dict.fromkeys(names, 0)
        self.widest = 0
        """The widest lead there was."""
        self._max_lead = max_lead
        self._changed = threading.Condition()

    def begin(self, name: str) -> None:
        """Wait until the next step of `name` would not be too far ahead."""
        with self._changed:
            self._changed.wait_for(lambda: self.done[name] - min(self.done.values()) <= self._max_lead)
            self.widest = max(self.widest, self.done[name] - min(self.done.values()))

    def end(self, name: str) -> None:
        with self._changed:
            self.done[name] += 1
            self._changed.notify_all()

    def leave(self, name: str) -> None:
        with self._changed:
            self.done.pop(name, None)
            self._changed.notify_all()
