"""Top-k, top-p and min-p.

Owns which ids of a row remain in the distribution. Ignores edits and temperature, which come
before, and the draw, which comes after.

The filters apply in turn, each to the renormalised outcome of the one before: top-k keeps the k
highest; top-p the fewest highest whose mass reaches p, at least one; min-p those with at least
min_p times the highest probability. Ties go to the lower id. Ids of probability zero never remain.

Shapes: V vocabulary, N kept ids.
"""

from __future__ import annotations

import numpy as np

from engine.types import SamplingParams

_NARROWING = (2.0**-6, 2.0**-10, 2.0**-14, 2.0**-20)


def kept_ids(
    weights_V: np.ndarray, logits_V: np.ndarray, inverse_temperature: float, params: SamplingParams
) -> tuple[np.ndarray, float]:
    """The ids that remain, ascending int64 [N], and the log of their total weight, where the highest
    weighs 1.

    `weights_V` float32 is exp((logits - max) / T), so the highest is 1; `logits_V` float32 are the
    edited logits. Weights only narrow the search: order and mass come from the logits in float64.
    """
    highest = float(logits_V.max())
    ids_N = _candidates(weights_V, logits_V, params)
    order = np.argsort(-logits_V[ids_N], kind="stable")
    ids_N = ids_N[order]
    if params.top_k:
        ids_N = ids_N[: params.top_k]
    mass_N = np.exp((logits_V[ids_N].astype(np.float64) - highest) * inverse_temperature)
    if params.top_p < 1.0:
        total = mass_N.sum() if params.top_k else weights_V.sum(dtype=np.float64)
        reached = np.searchsorted(np.cumsum(mass_N), params.top_p * total)
        mass_N = mass_N[: reached + 1]
    mass_N = mass_N[mass_N >= max(params.min_p, np.finfo(np.float64).tiny)]
    return np.sort(ids_N[: len(mass_N)]), float(np.log(mass_N.sum()))


def _candidates(weights_V: np.ndarray, logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Ascending ids that surely include all that remain, as few as is cheap to find."""
    if 0 < params.top_k < len(weights_V):
        place = len(weights_V) - params.top_k
        return np.flatnonzero(logits_V >= np.partition(logits_V, place)[place])
    floor = params.min_p * (1.0 - 1e-5)
    if params.top_p < 1.0:
        needed = weights_V.sum(dtype=np.float64) * min(1.0, params.top_p + 1e-5)
        floor = max(floor, _floor_holding(weights_V, needed))
    return np.flatnonzero(weights_V >= floor) if floor > 0.0 else np.flatnonzero(weights_V > 0.0)


def _floor_holding(weights_V: np.ndarray, needed: float) -> float:
    """A weight such that the ids at or above it hold the needed mass."""
    for floor in _NARROWING:
        if weights_V[weights_V >= floor].sum(dtype=np.float64) >= needed:
            return floor
    return 0.0
