"""Attention as its definition says: the oracle, and the path for layers others refuse.

Owns correctness, nothing else: every row gathers its whole context in every layer, scores and
softmax are fp32, and positions outside a row's context, or before all its windows, are never read.

Shapes: T tokens, N query heads, K key/value heads, G = N / K, H head size, Q a row's queries,
C what they see of its context, E a bias's extent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool, pack
from engine.models.spec import ModelSpec


def context_slots(batch: ForwardBatch, row: int, page_size: int, length: int | None = None) -> torch.Tensor:
    """Write slots of the first `length` positions of a row (all of its context by default)."""
    return _slots(batch.page_tables_BP, row, page_size, batch.seq_lens[row] if length is None else length)


def _slots(page_tables_BP: torch.Tensor, row: int, page_size: int, length: int) -> torch.Tensor:
    positions = torch.arange(length, device=page_tables_BP.device)
    pages = page_tables_BP[row, torch.div(positions, page_size, rounding_mode="floor")].long()
    return pages * page_size + positions % page_size


class Row(NamedTuple):
    """A row's queries [start, end) among a step's tokens, and the slots of its context, oldest first."""

    start: int
    end: int
    slots_C: torch.Tensor


def rows_of(batch: ForwardBatch, page_size: int, page_tables_BP: torch.Tensor | None = None) -> list[Row]:
    """By the batch's page tables, or others of the same rows."""
    tables_BP, rows, start = batch.page_tables_BP if page_tables_BP is None else page_tables_BP, [], 0
    for row, (count, length) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        rows.append(Row(start, start + count, _slots(tables_BP, row, page_size, length)))
        start += count
    return rows


class TorchReference:
    name = "torch_ref"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._batch: ForwardBatch | None = None
        self._kv_pool: KVPool | None = None
        self._rows: list[Row] = []
        self._window_rows: list[Row] = []

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        self._batch, self._kv_pool = batch, kv_pool
        self._rows = self._window_rows = rows_of(batch, kv_pool.page_size)
        if batch.window is not None:
            self._window_rows = rows_of(batch, kv_pool.page_size, batch.window.page_tables_BP)

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, kv_pool = self._batch, self._kv_pool
        assert batch is not None and kv_pool is not None, "plan comes before run"
        write_slots_T, rows, window = batch.write_slots_T, self._rows, self._spec.layers[layer].window
        if batch.window is not None and kv_pool.windowed(layer):
            write_slots_T, rows = batch.window.write_slots_T, self._window_rows
        kv_pool.write(layer, write_slots_T, pack(k_TKH, v_TKH))
        out_TNH = torch.empty_like(q_TNH)
        for start, end, slots_C in rows:
            seen = 0 if window is None else max(0, len(slots_C) - (end - start) - window + 1)
            kv_C2KH = kv_pool.tokens(layer).index_select(0, slots_C[seen:])
            bias_QNE = None if bias_TNE is None else bias_TNE[start:end]
            out_TNH[start:end] = self._row(q_TNH[start:end], kv_C2KH, layer, sink_N, bias_QNE)
        return out_TNH

    def _row(
        self,
        q_QNH: torch.Tensor,
        kv_C2KH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None,
        bias_QNE: torch.Tensor | None,
    ) -> torch.Tensor:
        spec = self._spec.layers[layer]
        kv_heads = kv_C2KH.shape[1] // 2
        group = q_QNH.shape[1] // kv_heads
        k_NHC = kv_C2KH[:, :kv_heads].float().repeat_interleave(group, dim=1).permute(1, 2, 0)
        v_NCH = kv_C2KH[:, kv_heads:].float().repeat_interleave(group, dim=1).permute(1, 0, 2)
        scores_NQC = q_QNH.float().transpose(0, 1) @ k_NHC * q_QNH.shape[-1] ** -0.5
        if spec.softcap is not None:
            scores_NQC = spec.softcap * torch.tanh(scores_NQC / spec.softcap)
        queries, context = scores_NQC.shape[1:]
        position_C = torch.arange(context, device=q_QNH.device)
        distance_QC = position_C[context - queries :, None] - position_C[None, :]
        if spec.bias is not None:
            assert bias_QNE is not None, f"layer {layer} needs its bias"
            near_QC = distance_QC.clamp(0, spec.bias - 1)
            index_NQC = near_QC.expand(scores_NQC.shape[0], -1, -1)
            by_distance_NQC = bias_QNE.float().transpose(0, 1).gather(-1, index_NQC)
            scores_NQC = scores_NQC + torch.where(distance_QC < spec.bias, by_distance_NQC, 0.0)
        visible_QC = distance_QC >= 0
        if spec.window is not None:
            visible_QC = visible_QC & (distance_QC < spec.window)
        scores_NQC = torch.where(visible_QC, scores_NQC, float("-inf"))
        if spec.sink:
            assert sink_N is not None, f"layer {layer} needs its sinks"
            sinks_NQ1 = sink_N.float()[:, None, None].expand(-1, queries, 1)
            weights_NQC = torch.softmax(torch.cat((scores_NQC, sinks_NQ1), dim=-1), dim=-1)[..., :-1]
        else:
            weights_NQC = torch.softmax(scores_NQC, dim=-1)
        return (weights_NQC @ v_NCH).transpose(0, 1).to(q_QNH.dtype)
