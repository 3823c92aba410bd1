"""How far steps like those that were measured are off a fit.

Owns the last times of every kind of step, and what they say of steps between them: their median error beside the fit,
each weighed by how near it is. Ignores the fit itself (`engine.dspark.cost_model`), which is asked for its newest word
on what was measured, so that neither counts an error twice.

A fit of few terms is wrong in places whatever it is told: kernels change with their sizes, and tiny batches read their
contexts one after another where large ones read them side by side. What is measured again and again is known better
than any fit knows it; a hiccup is one of several and counts for nothing.

Shapes: K kinds of steps, N of the last of each, D coefficients of the fit, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

_LAST = 5
_BINS = 2
"""Kinds to an octave."""
_REACH = 0.75
"""Octaves over which errors are alike."""
_DOUBT = 0.1
"""Weight of the fit alone, in steps measured."""
_SURE = 32
"""Steps of a kind beyond which it outweighs its neighbours no more."""
_MOST_KINDS = 512
_APART = 100.0
"""Octaves between steps without drafts, with windows of their own and with even ones, which know nothing of each
other."""


class MeasuredKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one kind of steps: where it lies, how many there were, and what the last ones read of the fit and took."""

    point: list[float]
    count: int
    features: list[list[float]]
    seconds: list[float]


class NearbySteps:
    """Steps lie among others at the base-2 logarithms of their rows, of their verify rows and of the drafts they make
    (`point`). `size` is D."""

    def __init__(self, size: int) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._count_K = np.zeros(_MOST_KINDS, dtype=np.int64)
        """Steps of each kind so far."""
        self._point_K4 = np.zeros((_MOST_KINDS, 4))
        self._inner_6K = np.ones((6, _MOST_KINDS))
        """With p a kind's point, n its weight and x another, n · exp(-|x - p|² / r²) is the exponential of a product:
        x, 1 and -|x|² / r² (`lifted`), times 2p / r², log n - |p|² / r² and 1."""
        self._seconds_KN = np.full((_MOST_KINDS, _LAST), np.inf)
        """Without end where there were fewer."""
        self._features_KND = np.zeros((0, _LAST, size))
        self._error_K2: np.ndarray | None = None
        """The median logarithm of measured over fitted, and 1, by kind, once somebody has asked."""

    def add(self, point_4: np.ndarray, features_D: np.ndarray, seconds: float) -> int:
        """A measured step; how many of its kind there are with it."""
        kind = tuple([round(octaves * _BINS) for octaves in point_4.tolist()])
        place = self._places.get(kind)
        if place is None:
            if len(self._places) == _MOST_KINDS:
                return 1
            place = self._places[kind] = len(self._places)
            if place == len(self._features_KND):
                more = np.zeros((max(16, place), *self._features_KND.shape[1:]))
                self._features_KND = np.concatenate((self._features_KND, more))
        at = int(self._count_K[place]) % _LAST
        self._point_K4[place] = point_4
        self._inner_6K[:4, place] = 2.0 / _REACH**2 * point_4
        self._features_KND[place, at], self._seconds_KN[place, at] = features_D, seconds
        return self._counted(place, int(self._count_K[place]) + 1)

    def corrections(self, lifted_C6: np.ndarray, coefficients_D: np.ndarray, floor: float) -> np.ndarray:
        """What the fit's seconds are to be multiplied by where `lifted` points lie, float64 [C]. `coefficients_D` are
        in seconds, and no step takes less than `floor`; they change where a step is added, and only there."""
        if not self._places:
            return np.ones(len(lifted_C6))
        if self._error_K2 is None:
            self._error_K2 = self._errors(coefficients_D, floor)
        sums_C2 = np.exp(lifted_C6 @ self._inner_6K[:, : len(self._places)]) @ self._error_K2
        return np.exp(sums_C2[:, 0] / (sums_C2[:, 1] + _DOUBT))

    def kept(self) -> list[MeasuredKind]:
        kinds = []
        for place in self._places.values():
            there = min(int(self._count_K[place]), _LAST)
            features, seconds = self._features_KND[place, :there], self._seconds_KN[place, :there]
            point, count = self._point_K4[place].tolist(), int(self._count_K[place])
            kinds.append(MeasuredKind(point, count, features.tolist(), seconds.tolist()))
        return kinds

    def restore(self, kinds: Sequence[MeasuredKind]) -> None:
        """Take over what `kept` gave; features are of this `size`."""
        for kind in kinds:
            for features, seconds in zip(kind.features, kind.seconds, strict=True):
                self.add(np.array(kind.point), np.array(features), seconds)
            self._counted(len(self._places) - 1, kind.count)

    def _counted(self, place: int, count: int) -> int:
        """So many steps of a kind there were."""
        self._count_K[place], self._error_K2, point_4 = count, None, self._point_K4[place]
        self._inner_6K[4, place] = math.log(min(count, _SURE)) - float((point_4 * point_4).sum()) / _REACH**2
        return count

    def _errors(self, coefficients_D: np.ndarray, floor: float) -> np.ndarray:
        """float64 [K, 2]."""
        known = len(self._places)
        rows_K = np.arange(known)
        there_K = np.minimum(self._count_K[:known], _LAST)
        fitted_KN = np.maximum(self._features_KND[:known] @ coefficients_D, floor)
        error_KN = np.log(self._seconds_KN[:known] / fitted_KN)
        error_KN.sort(axis=1)
        error_K2 = np.ones((known, 2))
        error_K2[:, 0] = 0.5 * (error_KN[rows_K, (there_K - 1) // 2] + error_KN[rows_K, there_K // 2])
        return error_K2


def point(rows: float, tier: float, drafts: float, drafting: int) -> np.ndarray:
    """Where a step lies, float64 [4]: without drafts (0), with windows of their own (1) or even ones (2)."""
    octaves = [math.log2(max(1.0, size)) for size in (rows, tier, drafts)]
    return np.array([*octaves, _APART * drafting])


def points(
    rows_C: np.ndarray, tiers_C: np.ndarray, drafts_C: np.ndarray, even_C: np.ndarray | bool = False
) -> np.ndarray:
    """The same of steps with drafts, float64 [C, 4]."""
    octaves_C3 = np.log2(np.maximum(1.0, np.stack((rows_C, tiers_C, drafts_C), axis=1)))
    apart_C = np.full(len(rows_C), _APART) + _APART * np.asarray(even_C)
    return np.concatenate((octaves_C3, apart_C[:, None]), axis=1)


def lifted(points_C4: np.ndarray) -> np.ndarray:
    """Points as `corrections` takes them, float64 [C, 6]."""
    squares_C1 = (points_C4 * points_C4).sum(1, keepdims=True)
    return np.concatenate((points_C4, np.ones_like(squares_C1), squares_C1 / -(_REACH**2)), axis=1)
