"""The distribution a row samples from, for many rows at once.

Owns edits, temperature and truncation in batched form; definitions are those of `engine.sampling`.
Target rows and draft rows go through the same function, so that p and q are cut alike and the q of an
acceptance test is the one its draft was drawn from. Ignores what is drawn.

Shapes: M rows, V vocabulary, N kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.sampling.params import RowSampling

_LOWEST = float("-inf")


@dataclass(slots=True)
class Distribution:
    """`scaled_MV` float32: edited logits over temperature, -inf at ids cut off; greedy rows are edited
    only. `lse_M` is their log-sum-exp, so that log p = scaled - lse. `bad_M` marks rows whose logits
    have NaN or +inf or nothing finite. `edited` [V] and `kept` [N] are given for rows that want more
    than one column (`RowSampling.bare` false)."""

    scaled_MV: torch.Tensor
    lse_M: torch.Tensor
    bad_M: torch.Tensor
    edited: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def logprob(self, ids_M: torch.Tensor) -> torch.Tensor:
        return self.scaled_MV.gather(1, ids_M[:, None])[:, 0] - self.lse_M


def distribution(
    logits_MV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int] | None = None
) -> Distribution:
    """What each row samples from; `positions` None says that logits are edited already. Reads only."""
    values_MV = logits_MV.to(torch.float32, copy=True)
    bad_M = ~torch.isfinite(values_MV.amax(-1))
    edited: dict[int, torch.Tensor] = {}
    if positions is not None:
        for m in [m for m, row in enumerate(rows) if row.edits_at(positions[m])]:
            rows[m].edit(values_MV[m], positions[m])
            if not rows[m].bare:
                edited[m] = values_MV[m].clone()
        bad_M = bad_M | ~torch.isfinite(values_MV.amax(-1))
    device = logits_MV.device
    cut = [m for m, row in enumerate(rows) if row.truncates]
    wide_MV = values_MV[cut].double() if cut else None
    temperature_M1 = torch.tensor([[row.temperature] for row in rows], dtype=torch.float64, device=device)
    if any(row.temperature != 1.0 for row in rows):
        values_MV /= temperature_M1.float()
    kept: dict[int, torch.Tensor] = {}
    if wide_MV is not None:
        mask_MV = kept_mask(wide_MV / temperature_M1[cut], [rows[m] for m in cut])
        values_MV[cut] = values_MV[cut].masked_fill(~mask_MV, _LOWEST)
        kept = {m: mask_MV[n].nonzero()[:, 0] for n, m in enumerate(cut) if not rows[m].bare}
    return Distribution(values_MV, torch.logsumexp(values_MV, -1), bad_M, edited, kept)


def kept_mask(scaled_MV: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """bool [M, V]: ids that top-k, top-p and min-p leave, in turn; ties go to the lower id.

    `scaled_MV` float64 are edited logits over temperature.
    """
    count, vocab_size = scaled_MV.shape
    device = scaled_MV.device

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    values_MV, ids_MV = torch.sort(scaled_MV, descending=True, stable=True)
    mass_MV = (values_MV - values_MV[:, :1]).exp()
    top_k = [row.params.top_k or vocab_size for row in rows]
    mass_MV = mass_MV.masked_fill(torch.arange(vocab_size, device=device) >= column(top_k), 0.0)
    top_p_M1 = column([row.params.top_p for row in rows])
    before_MV = mass_MV.cumsum(-1) - mass_MV
    reached_MV = (top_p_M1 < 1.0) & (before_MV >= top_p_M1 * mass_MV.sum(-1, keepdim=True))
    least_M1 = column([max(row.params.min_p, float(np.finfo(np.float64).tiny)) for row in rows])
    kept_MV = ~reached_MV & (mass_MV >= least_M1)
    return torch.zeros(count, vocab_size, dtype=torch.bool, device=device).scatter_(1, ids_MV, kept_MV)
