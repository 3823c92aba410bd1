"""Attention in torch operations, fast on the CPU and portable to any device.

Owns the products of a step: decode rows read dense lanes that are appended to, prefixes shared by
several rows are read once with all their queries as one tile and merged by log-sum-exp, prefill
chunks gather their cached context. Ignores layers that are not plain causal attention: it refuses
them.

With `deterministic` a decode row is a product of its own over its own whole context, so that its bits
do not depend on its batch.

Shapes: T tokens, N query heads, K key/value heads, G = N / K, H head size, B decode rows, L lanes,
M rows of a shared prefix, Q queries of a row, C its context.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.base import refuse_special_layers
from engine.attention.decode_plan import DecodePlan, DecodePlanner, OwnTile, SharedTile
from engine.attention.tiles import attend, causal_mask, merge
from engine.attention.torch_ref import context_slots
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool, pack
from engine.models.spec import ModelSpec


@dataclass(slots=True)
class GatherTile:
    """Tokens [start, end) of the batch, the queries of one row, over pool slots gathered in every
    layer; `slots` is None where the queries are the whole context."""

    start: int
    end: int
    slots_C: torch.Tensor | None
    mask_QC: torch.Tensor | None


class TorchAttention:
    name = "torch"

    def __init__(
        self,
        spec: ModelSpec,
        deterministic: bool = False,
        lane_fraction: float = 0.5,
        min_saved_tokens: int = 256,
    ) -> None:
        """Lanes of rows, and those of prefixes, each take at most `lane_fraction` of the pool's
        bytes; rows past that gather. `min_saved_tokens` is what makes a shared prefix a tile."""
        refuse_special_layers(spec, self.name)
        self._deterministic = deterministic
        self._lane_fraction = lane_fraction
        self._min_saved_tokens = min_saved_tokens
        self._pool: KVPool | None = None
        self._planner: DecodePlanner | None = None
        self._generation = -1
        self._num_decode = 0
        self._decode = DecodePlan()
        self._gather: list[GatherTile] = []
        self._write_slots_T = torch.empty(0)

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        if self._pool is not kv_pool or self._generation != kv_pool.generation:
            self._pool, self._generation = kv_pool, kv_pool.generation
            budget = int(kv_pool.bytes * self._lane_fraction)
            self._planner = DecodePlanner(kv_pool, budget, self._min_saved_tokens)
        assert self._planner is not None
        self._write_slots_T = batch.write_slots_T
        self._num_decode = batch.num_decode
        self._decode = DecodePlan()
        if batch.num_decode:
            if self._deterministic:
                self._decode.gathered = list(range(batch.num_decode))
            else:
                self._decode = self._planner.plan(batch)
        self._gather = [self._gather_tile(batch, row, row) for row in self._decode.gathered]
        start = batch.num_decode
        for row in range(batch.num_decode, batch.num_rows):
            self._gather.append(self._gather_tile(batch, row, start))
            start += batch.query_lens[row]

    def _gather_tile(self, batch: ForwardBatch, row: int, start: int) -> GatherTile:
        queries, context = batch.query_lens[row], batch.seq_lens[row]
        end = start + queries
        if queries == context:
            return GatherTile(start, end, None, None)
        assert self._pool is not None
        slots = context_slots(batch, row, self._pool.page_size)
        if queries == 1:
            return GatherTile(start, end, slots, None)
        return GatherTile(start, end, slots, causal_mask(queries, context, self._pool.dtype, slots.device))

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sink_N is None and bias_TNE is None, "layers with sinks or biases were refused"
        pool, decode = self._pool, self._decode
        assert pool is not None, "plan comes before run"
        kv_T2KH = pack(k_TKH, v_TKH)
        pool.write(layer, self._write_slots_T, kv_T2KH)
        if self._gather or len(decode.own) != 1 or decode.own[0].rows_L is not None:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
            lse_TN = torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)
            for own in decode.own:
                out, lse = _run_own(own, q_TNH, kv_T2KH, layer)
                target = slice(0, self._num_decode) if own.rows_L is None else own.rows_L
                out_TNH[target], lse_TN[target] = out, lse
        else:
            out_TNH, lse_TN = _run_own(decode.own[0], q_TNH, kv_T2KH, layer)
        for shared in decode.shared:
            _merge_shared(shared, q_TNH, layer, out_TNH, lse_TN)
        for tile in self._gather:
            out_TNH[tile.start : tile.end] = _run_gather(tile, q_TNH, kv_T2KH, pool.tokens(layer))
        return out_TNH


def _run_own(
    tile: OwnTile, q_TNH: torch.Tensor, kv_T2KH: torch.Tensor, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out_LNH and lse_LN of the tile's rows; the new token joins its lane first."""
    q_LNH, kv_L2KH = q_TNH, kv_T2KH
    lanes = tile.cells_L.shape[0]
    if tile.rows_L is None:
        if lanes < q_TNH.shape[0]:
            q_LNH, kv_L2KH = q_TNH[:lanes], kv_T2KH[:lanes]
    else:
        q_LNH, kv_L2KH = q_TNH.index_select(0, tile.rows_L), kv_T2KH.index_select(0, tile.rows_L)
    tile.arena.cells(layer).index_copy_(0, tile.cells_L, kv_L2KH)
    views = tile.views
    k_LKSH = views.k_LKSH[layer]
    kv_heads = k_LKSH.shape[1]
    heads, size = q_LNH.shape[1:]
    q_LKGH = q_LNH.view(lanes, kv_heads, heads // kv_heads, size)
    out_LKGH, lse_LKG = attend(q_LKGH, k_LKSH, views.v_LKSH[layer], views.mask_L11S)
    return out_LKGH.reshape(lanes, heads, size), lse_LKG.reshape(lanes, heads)


def _merge_shared(
    tile: SharedTile, q_TNH: torch.Tensor, layer: int, out_TNH: torch.Tensor, lse_TN: torch.Tensor
) -> None:
    """Add the shared prefixes' keys to the results of rows over their own."""
    lanes, width = tile.rows_LM.shape
    heads, size = q_TNH.shape[1:]
    views = tile.views
    k_LKSH = views.k_LKSH[layer]
    kv_heads = k_LKSH.shape[1]
    group = heads // kv_heads
    q_XNH = q_TNH[: lanes * width] if tile.rows is None else q_TNH.index_select(0, tile.rows_LM.view(-1))
    q_LKXH = q_XNH.reshape(lanes, width, kv_heads, group, size).transpose(1, 2).reshape(lanes, kv_heads, -1, size)
    out_LKXH, lse_LKX = attend(q_LKXH, k_LKSH, views.v_LKSH[layer], views.mask_L11S)
    out_XNH = out_LKXH.reshape(lanes, kv_heads, width, group, size).transpose(1, 2).reshape(-1, heads, size)
    lse_XN = lse_LKX.reshape(lanes, kv_heads, width, group).transpose(1, 2).reshape(-1, heads)
    if tile.rows is None or tile.source is None:
        rows = slice(0, lanes * width)
        out_TNH[rows] = merge(out_TNH[rows], lse_TN[rows], out_XNH, lse_XN)
    else:
        rows = tile.rows
        merged = merge(out_TNH[rows], lse_TN[rows], out_XNH[tile.source], lse_XN[tile.source])
        out_TNH.index_copy_(0, rows, merged)


def _run_gather(tile: GatherTile, q_TNH: torch.Tensor, kv_T2KH: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """out_QNH of one row. The heads of a group share their keys through a stride of 0."""
    q_QNH = q_TNH[tile.start : tile.end]
    kv_C2KH = kv_T2KH[tile.start : tile.end] if tile.slots_C is None else tokens.index_select(0, tile.slots_C)
    queries, heads, size = q_QNH.shape
    kv_heads = kv_C2KH.shape[1] // 2
    group = heads // kv_heads
    q_KGQH = q_QNH.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    k_KCH, v_KCH = kv_C2KH[:, :kv_heads].transpose(0, 1), kv_C2KH[:, kv_heads:].transpose(0, 1)
    expanded = (kv_heads, group, kv_C2KH.shape[0], size)
    mask = None if tile.mask_QC is None else tile.mask_QC[None, None]
    out_KGQH, _ = attend(
        q_KGQH,
        k_KCH[:, None].expand(expanded),
        v_KCH[:, None].expand(expanded),
        mask,
        causal=tile.slots_C is None,
    )
    return out_KGQH.permute(2, 0, 1, 3).reshape(queries, heads, size)
