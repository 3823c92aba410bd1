"""Drawing on a device.

Owns the draw in batched torch operations, which give the same tokens as `engine.sampling.draw_host`
from the same logits. Ignores the columns beyond the processed log-probability. It is the reference
for kernels; it materialises the noise.

Shapes: R rows, V vocabulary, N kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.draw import Drawn
from engine.sampling.noise import WORD_SCALE, device_words
from engine.sampling.params import RowSampling
from engine.types import SamplingParams

_LOWEST = float("-inf")


def draw_on_device(logits_RV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Drawn:
    """Draw one id per row; see `Drawn` for the columns."""
    device, edited = logits_RV.device, {}
    bad_R = _unusable(logits_RV)
    touched = [r for r, row in enumerate(rows) if row.edits_at(positions[r])]
    if touched:
        logits_RV = logits_RV.clone()
        for r in touched:
            rows[r].edit(logits_RV[r], positions[r])
            edited[r] = logits_RV[r]
        bad_R = bad_R | _unusable(logits_RV)
    temperature_R1 = _column([row.temperature for row in rows], torch.float64, device)[:, None]
    scaled_RV = logits_RV.double() / temperature_R1
    kept = {}
    for r in [r for r, row in enumerate(rows) if row.truncates]:
        kept[r] = kept_on_device(scaled_RV[r], rows[r].params)
        remaining_N = scaled_RV[r][kept[r]]
        scaled_RV[r] = _LOWEST
        scaled_RV[r, kept[r]] = remaining_N
    scores_RV = scaled_RV + _gumbel(rows, positions, logits_RV)
    ids_R = scores_RV.argmax(-1).masked_fill(bad_R, 0)
    chosen_R = scaled_RV.gather(-1, ids_R[:, None])[:, 0]
    logprobs_R = (chosen_R - torch.logsumexp(scaled_RV, -1)).float().masked_fill(bad_R, float("nan"))
    return Drawn(ids_R, logprobs_R, bad_R, edited, kept)


def kept_on_device(scaled_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The ids that top-k, top-p and min-p leave, as `engine.sampling.truncate` defines them."""
    values_V, ids_V = torch.sort(scaled_V, descending=True, stable=True)
    mass_N = (values_V - values_V[0]).exp()
    if params.top_k:
        mass_N = mass_N[: params.top_k]
    if params.top_p < 1.0:
        before_N = mass_N.cumsum(-1) - mass_N
        mass_N = mass_N[: int((before_N < params.top_p * mass_N.sum()).sum())]
    remaining = int((mass_N >= max(params.min_p, np.finfo(np.float64).tiny)).sum())
    return ids_V[:remaining].sort().values


def _unusable(logits_RV: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(logits_RV.amax(-1))


def _column(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _gumbel(rows: Sequence[RowSampling], positions: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
    """float64 [R, V]; zero in greedy rows."""
    device = logits_RV.device
    seeds = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)
    words_RV = device_words(
        torch.from_numpy(seeds).to(device), _column(positions, torch.int64, device), logits_RV.shape[1]
    )
    gumbel_RV = -torch.log(-torch.log1p((words_RV.double() + 0.5) * -WORD_SCALE))
    greedy_R = _column([row.greedy for row in rows], torch.bool, device)
    return gumbel_RV.masked_fill(greedy_R[:, None], 0.0)
