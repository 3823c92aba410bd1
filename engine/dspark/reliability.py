"""How good predictions of acceptance are.

Owns the sums behind expected calibration error, Brier score and area under the ROC curve, by draft
position; they add up over steps and engines and are divided once, when shown. Ignores where
predictions come from.

Shapes: N observations, S of them with their positions, G drafts, K bins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

CALIBRATION_BINS = 15
_CURVE_BINS = 1000


def expected_calibration_error(
    predicted_N: np.ndarray, labels_N: np.ndarray, weights_N: np.ndarray | None = None, bins: int = CALIBRATION_BINS
) -> float:
    """Mean over equal-width bins of |mean prediction - mean label|, weighted by their share; labels in [0, 1]."""
    weights_N = np.ones(len(predicted_N)) if weights_N is None else weights_N
    place_N = np.minimum((predicted_N * bins).astype(int), bins - 1)
    gap_K = np.bincount(place_N, weights_N * (predicted_N - labels_N), minlength=bins)
    total = weights_N.sum()
    return float(np.abs(gap_K).sum() / total) if total > 0 else 0.0


@dataclass(slots=True)
class Reliability:
    """Sums by position [G] and bin: predictions, labels and their counts; squared errors; and the labels
    and their complements over a thousand bins of the prediction, for the curve. Labels lie in [0, 1];
    a soft label counts as that much of an acceptance."""

    drafts: int
    count_GK: np.ndarray = field(init=False)
    predicted_GK: np.ndarray = field(init=False)
    labels_GK: np.ndarray = field(init=False)
    squared_G: np.ndarray = field(init=False)
    accepted_GC: np.ndarray = field(init=False)
    refused_GC: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.count_GK, self.predicted_GK, self.labels_GK = np.zeros((3, self.drafts, CALIBRATION_BINS))
        self.squared_G = np.zeros(self.drafts)
        self.accepted_GC, self.refused_GC = np.zeros((2, self.drafts, _CURVE_BINS))

    def observe(self, predicted_NG: np.ndarray, labels_NG: np.ndarray) -> None:
        """Predictions and labels of equal shape; a label of NaN was not observed."""
        seen_S = np.flatnonzero(~np.isnan(labels_NG))
        p_S, y_S, position_S = predicted_NG.ravel()[seen_S], labels_NG.ravel()[seen_S], seen_S % labels_NG.shape[1]
        place_S = _places(position_S, p_S, CALIBRATION_BINS)
        for sums, weights_S in ((self.count_GK, None), (self.predicted_GK, p_S), (self.labels_GK, y_S)):
            sums += np.bincount(place_S, weights_S, sums.size).reshape(sums.shape)
        self.squared_G += np.bincount(position_S, (p_S - y_S) ** 2, self.drafts)
        fine_S = _places(position_S, p_S, _CURVE_BINS)
        for sums, weights_S in ((self.accepted_GC, y_S), (self.refused_GC, 1.0 - y_S)):
            sums += np.bincount(fine_S, weights_S, sums.size).reshape(sums.shape)

    def add(self, other: Reliability) -> None:
        for name in ("count_GK", "predicted_GK", "labels_GK", "squared_G", "accepted_GC", "refused_GC"):
            getattr(self, name).__iadd__(getattr(other, name))

    def calibration_error(self) -> np.ndarray:
        """float64 [G], NaN where nothing was observed."""
        return divided(np.abs(self.predicted_GK - self.labels_GK).sum(1), self.count_GK.sum(1))

    def brier(self) -> np.ndarray:
        return divided(self.squared_G, self.count_GK.sum(1))

    def auc(self) -> np.ndarray:
        """Chance that an accepted draft was predicted higher than a refused one, ties halved; [G]."""
        return divided(*self.pairs())

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [G]: pairs of an accepted and a refused draft in which the former was predicted higher, ties
        halved, and all pairs. Added over engines they compare drafts of the same engine only."""
        below_GC = np.cumsum(self.refused_GC, axis=1) - self.refused_GC
        won_G = (self.accepted_GC * (below_GC + 0.5 * self.refused_GC)).sum(1)
        return won_G, self.accepted_GC.sum(1) * self.refused_GC.sum(1)


def _places(position_S: np.ndarray, p_S: np.ndarray, bins: int) -> np.ndarray:
    """Numbers of bins, position after position."""
    return position_S * bins + np.minimum((p_S * bins).astype(np.int64), bins - 1)


def divided(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """NaN where nothing was observed."""
    return np.divide(numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0)
