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
import torch

from engine.types import SamplingParams

_NARROWING = (2.0**-4, 2.0**-8, 2.0**-12)
_FEW = 512
"""Candidates that are sorted sooner than narrowed."""
_CAUTION = 1.0 - 1e-5
"""Covers the rounding of float32 weights where they only narrow the search."""


def kept_ids(
    weights_V: np.ndarray, logits_V: np.ndarray, inverse_temperature: float, params: SamplingParams
) -> tuple[np.ndarray, float]:
    """The ids that remain, ascending int64 [N], and their total weight, where the highest weighs 1.

    `weights_V` float32 is exp((logits - max) / T), so the highest is 1; `logits_V` float32 are the
    edited logits. Weights only narrow the search: order and mass come from the logits in float64.
    """
    highest = float(logits_V.max())
    ids_N = _candidates(weights_V, logits_V, params)
    values_N = logits_V[ids_N]
    ordered_N = np.sort(values_N)[::-1]
    if params.top_k:
        ordered_N = ordered_N[: params.top_k]
    mass_N = np.exp((ordered_N.astype(np.float64) - highest) * inverse_temperature)
    if params.top_p < 1.0:
        total = mass_N.sum() if params.top_k else weights_V.sum(dtype=np.float64)
        mass_N = mass_N[: np.searchsorted(np.cumsum(mass_N), params.top_p * total) + 1]
    mass_N = mass_N[mass_N >= max(params.min_p, np.finfo(np.float64).tiny)]
    lowest = ordered_N[len(mass_N) - 1]
    tied_N = np.flatnonzero(values_N == lowest)
    surplus = np.count_nonzero(values_N >= lowest) - len(mass_N)
    if surplus:
        values_N[tied_N[len(tied_N) - surplus :]] = -np.inf
    return ids_N[values_N >= lowest], float(mass_N.sum())


def _candidates(weights_V: np.ndarray, logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Ascending ids that surely include all that remain, as few as is cheap to find."""
    if 0 < params.top_k < len(weights_V):
        place = len(weights_V) - params.top_k
        return np.flatnonzero(logits_V >= np.partition(logits_V, place)[place])
    floor = params.min_p * _CAUTION
    if params.top_k or params.top_p == 1.0:
        return np.flatnonzero(weights_V >= floor) if floor > 0.0 else np.flatnonzero(weights_V > 0.0)
    total = float(weights_V.sum(dtype=np.float64))
    # Ids below this floor, even if they were all the others, hold less than 1 - top_p.
    floor = max(floor, (1.0 - params.top_p) * _CAUTION * total / len(weights_V))
    ids_N = np.flatnonzero(weights_V >= floor)
    weights_N = weights_V[ids_N]
    if len(ids_N) <= _FEW:
        return ids_N
    for floor in _NARROWING:
        high_N = weights_N >= floor
        if weights_N[high_N].sum(dtype=np.float64) >= total * (params.top_p + 1e-5):
            return ids_N[high_N]
    return ids_N


def kept_in_order(scaled_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The ids that remain of float64 logits / T, ascending int64 [N], from a sort of the whole row."""
    values_V, ids_V = torch.sort(scaled_V, descending=True, stable=True)
    mass_N = (values_V - values_V[0]).exp()
    if params.top_k:
        mass_N = mass_N[: params.top_k]
    if params.top_p < 1.0:
        before_N = mass_N.cumsum(-1) - mass_N
        mass_N = mass_N[: int((before_N < params.top_p * mass_N.sum()).sum())]
    remaining = int((mass_N >= max(params.min_p, np.finfo(np.float64).tiny)).sum())
    return ids_V[:remaining].sort().values
