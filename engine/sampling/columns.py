"""Columns that only some callers want.

Owns the three definitions of a log-probability for a row, its alternatives and entropy. Ignores
how its token was drawn.

Shapes: R rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.sampling.draw import Drawn
from engine.sampling.logprobs import entropy, scaled, top_logprobs
from engine.sampling.params import RowSampling

if TYPE_CHECKING:
    from engine.sampling.sampler import SampleResult


def row_logprobs(definition: str, row: RowSampling, r: int, logits_V: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    """float32 [V]: the row's whole distribution under one definition, -inf at ids cut off."""
    if row.greedy or definition == "raw":
        return torch.log_softmax(logits_V, -1)
    if definition == "temperature":
        return torch.log_softmax(scaled(logits_V, row.temperature), -1)
    values_V = scaled(drawn.edited.get(r, logits_V), row.temperature)
    kept_N = drawn.kept.get(r)
    if kept_N is not None:
        full_V = torch.full_like(values_V, float("-inf"))
        full_V[kept_N] = values_V[kept_N]
        values_V = full_V
    return torch.log_softmax(values_V, -1)


def _nan_column(like_R: torch.Tensor, *width: int) -> torch.Tensor:
    return torch.full((*like_R.shape, *width), float("nan"), dtype=torch.float32, device=like_R.device)


def _allocate(result: SampleResult, rows: Sequence[RowSampling]) -> None:
    wants = [row.want for row in rows]
    for definition in sorted({d for want in wants for d in want.extra_logprobs}):
        result.extra_logprobs[definition] = _nan_column(result.ids)
    if any(want.entropy for want in wants):
        result.entropy = _nan_column(result.ids)
    most = max(want.top_logprobs for want in wants)
    if most:
        result.top_ids = result.ids.new_zeros(len(rows), most)
        result.top_logprobs = _nan_column(result.ids, most)


def fill_columns(result: SampleResult, drawn: Drawn, logits_RV: torch.Tensor, rows: Sequence[RowSampling]) -> None:
    """Add to `result` what the rows that are not `bare` want."""
    _allocate(result, rows)
    bad = drawn.bad_R.tolist()
    for r, row in enumerate(rows):
        if row.bare or bad[r]:
            continue
        chosen = result.ids[r]
        whole_V = row_logprobs(row.want.logprobs, row, r, logits_RV[r], drawn)
        result.logprobs[r] = whole_V[chosen]
        for definition in row.want.extra_logprobs:
            same = row.greedy or definition == row.want.logprobs
            of_V = whole_V if same else row_logprobs(definition, row, r, logits_RV[r], drawn)
            result.extra_logprobs[definition][r] = of_V[chosen]
        if row.want.entropy and result.entropy is not None:
            result.entropy[r] = entropy(whole_V)
        k = row.want.top_logprobs
        if k and result.top_ids is not None and result.top_logprobs is not None:
            ids_1K, values_1K = top_logprobs(whole_V[None], k)
            result.top_ids[r, :k], result.top_logprobs[r, :k] = ids_1K[0], values_1K[0]
