"""What plans promised, and what came of them.

Owns the share of promised drafts that was kept, by the window that plans gave to all rows. The best of many promises
is one of those that say too much, and planners take the best. What is off for a moment estimates see to, as they learn
from the same rounds: this remembers for long, and leans on nothing being wrong, so that few requests, of which chance
makes much, are taken at their word. Ignores where promises come from (`engine.dspark.planner`).

Shapes: C candidates.
"""

from __future__ import annotations

import numpy as np

_FADE = 0.999
"""Of what is known, for each step, with drafts or without."""
_LEANING = 1000.0
"""Drafts that are taken to have been kept as promised."""
_LEAST = 0.9
"""What is made of promises at least, and no more than they say: what held of some requests may hold of no others, and
this is for choices that are all but equal."""


class Reckoning:
    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}
        """float64 [2] by window: drafts kept and promised."""

    def observe(self, window: int, promised: float, kept: float) -> None:
        """Drafts of rounds with this window (0: each row had its own)."""
        known, came = self._sums.get(window), np.array([kept, promised])
        self._sums[window] = came if known is None else known + came

    def passed(self, steps: int) -> None:
        """What is known is so much older."""
        for known in self._sums.values():
            known *= _FADE**steps

    def shares(self, windows_C: np.ndarray) -> np.ndarray:
        """float64 [C]: what to multiply promises of these windows by."""
        shares_C = np.ones(len(windows_C))
        for window, (kept, promised) in self._sums.items():
            share = (kept + _LEANING) / (promised + _LEANING)
            shares_C[windows_C == window] = min(1.0, max(_LEAST, share))
        return shares_C

    def renew(self) -> None:
        """Another drafter: its promises are others."""
        self._sums.clear()
