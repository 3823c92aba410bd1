"""The distribution a row samples from, for many rows at once.

Owns edits, temperature and truncation in batched form; definitions are those of `engine.sampling`.
Target rows and draft rows go through the same function, so that p and q are cut alike and the q of an
acceptance test is the one its draft was drawn from. Ignores what is drawn.

Shapes: M rows, V vocabulary, N kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.sampling.params import RowSampling
from engine.sampling.truncate import kept_ids

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
    scaled_MV = logits_MV.to(torch.float32, copy=True)
    edited: dict[int, torch.Tensor] = {}
    unusable: list[int] = []
    if positions is not None:
        for m in [m for m, row in enumerate(rows) if row.edits_at(positions[m])]:
            if not torch.isfinite(scaled_MV[m].amax()):
                unusable.append(m)
            rows[m].edit(scaled_MV[m], positions[m])
            if not rows[m].bare:
                edited[m] = scaled_MV[m].clone()
    cut = {m: scaled_MV[m].clone() for m, row in enumerate(rows) if row.truncates}
    if any(row.temperature != 1.0 for row in rows):
        scaled_MV /= torch.tensor([[row.temperature] for row in rows], device=scaled_MV.device)
    lse_M = torch.logsumexp(scaled_MV, -1)
    bad_M = ~torch.isfinite(lse_M)
    # A mask may hide what is no number.
    bad_M[unusable] = True
    kept: dict[int, torch.Tensor] = {}
    for m, edited_V in cut.items():
        if not bad_M[m]:
            ids_N = _kept(edited_V, rows[m])
            remaining_N = scaled_MV[m, ids_N]
            scaled_MV[m] = _LOWEST
            scaled_MV[m, ids_N] = remaining_N
            lse_M[m] = torch.logsumexp(remaining_N, -1)
            if not rows[m].bare:
                kept[m] = ids_N
    return Distribution(scaled_MV, lse_M, bad_M, edited, kept)


def _kept(edited_V: torch.Tensor, row: RowSampling) -> torch.Tensor:
    """Ids int64 [N] that truncation leaves, found on the host as plain sampling does it there."""
    logits_V = edited_V.cpu()
    weights_V = ((logits_V - logits_V.max()) * (1.0 / row.temperature)).exp()
    ids, _ = kept_ids(weights_V.numpy(), logits_V.numpy(), 1.0 / row.temperature, row.params)
    return torch.from_numpy(ids).to(edited_V.device)
