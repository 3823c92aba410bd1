"""Drawing on a GPU, for rows whose parameters the host holds: first tokens and the serial loop.

Owns the columns that the sampling kernels read for these rows. Ignores the columns beyond the processed
log-probability. Rows are drawn as `engine.sampling.draw_host` draws them from the same logits.

Shapes: R rows, V vocabulary, N kept ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.memory.transfer import send
from engine.sampling.draw import Drawn
from engine.sampling.params import RowSampling
from engine.sampling.truncate import kept_in_order


def draw_on_device(logits_RV: torch.Tensor, rows: Sequence[RowSampling], positions: Sequence[int]) -> Drawn:
    """Draw one id per row; see `Drawn` for the columns."""
    edited, unusable_R = {}, None
    touched = [r for r, row in enumerate(rows) if row.edits_at(positions[r])]
    if touched:
        # A mask may hide what is no number.
        unusable_R = ~torch.isfinite(logits_RV.amax(-1))
        logits_RV = logits_RV.clone()
        for r in touched:
            rows[r].edit(logits_RV[r], positions[r])
            edited[r] = logits_RV[r]
    out = SampleOut.empty(len(rows), logits_RV.device)
    workspace = SampleWorkspace.empty(len(rows), logits_RV.shape[1], logits_RV.device)
    truncated = any(row.truncates for row in rows)
    sample_rows(logits_RV, _columns(rows, positions, logits_RV.device), out, workspace, truncated)
    bad_R = out.bad_B != 0 if unusable_R is None else unusable_R | (out.bad_B != 0)
    kept = {}
    for r, row in enumerate(rows):
        if row.truncates and not row.bare:
            kept[r] = kept_in_order(logits_RV[r].double() / row.temperature, row.params)
    ids_R, logprobs_R = out.ids_B.masked_fill(bad_R, 0), out.processed_B.masked_fill(bad_R, float("nan"))
    return Drawn(ids_R, logprobs_R, bad_R, edited, kept)


def _columns(rows: Sequence[RowSampling], positions: Sequence[int], device: torch.device) -> SampleColumns:
    params = [row.params for row in rows]
    wide = np.array(
        [[0.0 if row.greedy else p.temperature, p.top_p, p.min_p] for row, p in zip(rows, params, strict=True)]
    )
    whole = np.array([[row.seed for row in rows], positions], dtype=np.uint64).view(np.int64)
    temperature_S, top_p_S, min_p_S = send(wide.T, device)
    seed_S, position_S = send(whole, device)
    return SampleColumns(
        temperature_S=temperature_S,
        top_k_S=send(np.array([p.top_k for p in params], dtype=np.int32), device),
        top_p_S=top_p_S,
        min_p_S=min_p_S,
        seed_S=seed_S,
        position_S=position_S,
        active_S=torch.ones(len(rows), dtype=torch.uint8, device=device),
    )
