"""What confidences are worth by kind of request.

Owns the ratio of drafts kept to drafts promised at every position. Temperatures (`engine.dspark.scaling`) are fitted to
all requests together, so that whoever samples hotter, or writes about something else, is promised too much: budgets are
made for those that are there. Ignores how drafts of one request rank among others, which a ratio leaves as it is.

Shapes: N rows, B requests, G drafts.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from engine.dspark.kinds import Kinds

_FADE = 0.999
"""Of what is known, for each row that is learnt."""
_LEANING = 4.0
"""Promised drafts that the ratio before, or no ratio, weighs."""
_MOST_KINDS = 1024


class Promises:
    def __init__(self, drafts: int) -> None:
        self._drafts = drafts
        self._sums: dict[Hashable, np.ndarray] = {}
        """float64 [2, G] of each kind, kept and promised; the one met longest ago first."""

    def observe(self, kinds: Kinds, survival_NG: np.ndarray, labels_NG: np.ndarray) -> None:
        """Survivals that were promised of rows, and what became of them, NaN where that is not known."""
        seen_NG = ~np.isnan(labels_NG)
        parts_2NG = np.stack((np.where(seen_NG, labels_NG, 0.0), np.where(seen_NG, survival_NG, 0.0)))
        for kind, count, own_2G in kinds.sums(parts_2NG):
            known = self._sums.pop(kind, None)
            self._sums[kind] = own_2G if known is None else known * _FADE**count + own_2G
        while len(self._sums) > _MOST_KINDS:
            del self._sums[next(iter(self._sums))]

    def kept(self, kinds: Kinds) -> np.ndarray:
        """float64 [B, G]: what survivals are to be multiplied by."""
        ratios_UG = np.array([self._ratios(kind) for kind in kinds.names]).reshape(-1, self._drafts)
        return kinds.each(ratios_UG)

    def renew(self, left: float) -> None:
        """Drafter or target are others: what is known weighs `left` of what it did."""
        for sums_2G in self._sums.values():
            sums_2G *= left

    def _ratios(self, kind: Hashable) -> list[float]:
        sums_2G = self._sums.get(kind)
        if sums_2G is None:
            return [1.0] * self._drafts
        ratio, ratios = 1.0, []
        for kept, promised in sums_2G.T.tolist():
            # What little is known of late drafts leans on the one before.
            ratio = (kept + _LEANING * ratio) / (promised + _LEANING)
            ratios.append(ratio)
        return ratios
