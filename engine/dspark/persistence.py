"""How much of what a request was sure of still holds some steps later.

Owns a regression of fresh survivals of first drafts on those of earlier steps, both beside what outcomes alone would
have said, by kind of request. Text that repeats itself is as sure now as it was; of other text an old confidence says
little, and whoever ranks requests by it picks those that it was too high of. Ignores where either comes from
(`engine.dspark.survival`).

Shapes: B requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from engine.dspark.kinds import Kinds
from engine.dspark.survival import LaggedSurvivals

_FADE = 0.995
_START, _DOUBT = 1.0, 0.2
"""The share before anything is known, and the variance (of some ten requests) that outweighs it."""
_MOST_KINDS = 1024
_MOST_PLANNED = 8
"""Steps that were planned and may still be told of."""


class Persistence:
    def __init__(self) -> None:
        self._moments: dict[Hashable, np.ndarray] = {}
        """Of each kind: how many, sums of old, of fresh, of old squared and of both multiplied; all fade."""

    def shares(self, kinds: Kinds) -> np.ndarray:
        """float64 [B], within [0, 1]: of an old difference from what outcomes say, what is left now."""
        return kinds.each(np.array([self._share(kind) for kind in kinds.names]))

    def observe(self, kinds: Kinds, old_B: np.ndarray, fresh_B: np.ndarray) -> None:
        """What was known of these requests when they were planned, and what their drafter then said: differences of
        first drafts' survivals from what outcomes alone said."""
        parts_B5 = np.stack((np.ones(len(old_B)), old_B, fresh_B, old_B**2, old_B * fresh_B), axis=1)
        for kind, count, (added,) in kinds.sums(parts_B5[None]):
            before = self._moments.pop(kind, None)
            self._moments[kind] = added if before is None else before * _FADE**count + added
        while len(self._moments) > _MOST_KINDS:
            # The one that was met longest ago comes first.
            del self._moments[next(iter(self._moments))]

    def _share(self, kind: Hashable) -> float:
        moments = self._moments.get(kind)
        if moments is None:
            return _START
        count, old, fresh, squares, products = moments.tolist()
        spread, together = squares - old * old / count, products - old * fresh / count
        return min(1.0, max(0.0, (together + _START * _DOUBT) / (max(0.0, spread) + _DOUBT)))


class Foresight:
    """What requests' drafters will be sure of, as far as it is known before they draft: what they were sure of last,
    drawn towards what outcomes say."""

    def __init__(self) -> None:
        self._lagged = LaggedSurvivals()
        self._persistence = Persistence()
        self._said: OrderedDict[int, tuple[Kinds, dict[Hashable, int], np.ndarray, np.ndarray]] = OrderedDict()
        """Step -> kinds and places of its requests, the old differences (NaN where none are known) and what outcomes
        said, of first drafts."""

    def survivals(self, step: int, keys: Sequence[Hashable], kinds: Kinds, prior_BG: np.ndarray) -> np.ndarray:
        """float64 [B, G], for planning `step`."""
        survival_BG = np.full_like(prior_BG, np.nan)
        missing = self._lagged.known(step, keys, survival_BG)
        if len(missing) == len(keys):
            return prior_BG
        self._said[step] = kinds, dict(zip(keys, range(len(keys)), strict=True)), *_firsts(survival_BG, prior_BG)
        while len(self._said) > _MOST_PLANNED:
            self._said.popitem(last=False)
        mixed_BG = prior_BG + self._persistence.shares(kinds)[:, None] * (survival_BG - prior_BG)
        mixed_BG[missing] = prior_BG[missing]
        return mixed_BG

    def note(self, step: int, keys: Sequence[Hashable], survival_BG: np.ndarray) -> None:
        """What drafters were sure of in `step`."""
        self._lagged.note(step, keys, survival_BG)
        if step not in self._said:
            return
        kinds, places, old_B, prior_B = self._said.pop(step)
        place_B, fresh_B = np.array([places.get(key, -1) for key in keys], dtype=np.int64), survival_BG[:, 0]
        told_B = (place_B >= 0) & ~np.isnan(old_B[place_B] + fresh_B)
        if told_B.any():
            at, fresh = place_B[told_B], fresh_B[told_B]
            self._persistence.observe(kinds.take(at), old_B[at], fresh - prior_B[at])

    def renew(self) -> None:
        """Confidences of a new drafter say nothing beside those of the old one."""
        self._lagged = LaggedSurvivals()
        self._said.clear()


def _firsts(survival_BG: np.ndarray, prior_BG: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return survival_BG[:, 0] - prior_BG[:, 0], prior_BG[:, 0].copy()
