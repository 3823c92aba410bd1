"""Attention on the GPU by the project's Triton kernels.

Owns the eager path (any mixed batch) and the launches that a captured decode graph consists of.
Ignores how the kernels compute and who captures graphs.

Shapes: T tokens, B decode rows, P page-table columns, N query heads, K key/value heads, H head size,
X prefill tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import PrefillPart
from engine.attention.decode_metadata import (
    AttentionSize,
    DecodeMetadata,
    Workspace,
    decode_buffers,
    padded_head_dim,
    processors,
    worthwhile,
)
from engine.attention.window_metadata import window_buffers
from engine.batch import ForwardBatch, WindowRows
from engine.errors import Unsupported
from engine.kernels.attention_config import decode_config, prefill_config, prefix_config
from engine.kernels.attention_tile import ceil_div
from engine.kernels.decode_attention import LayerShape, States, TileConfig, decode_attention
from engine.kernels.prefill_attention import cut_tiles, prefill_attention
from engine.kernels.prefix_attention import prefix_attention
from engine.memory.kv_pool import KVPool, pack
from engine.memory.transfer import send, staged
from engine.models.spec import ModelSpec
from engine.parallel import SINGLE, TensorParallel

PREFIX_PROGRAMS = 2
"""Programs a multiprocessor that go through a list of pieces: as many as their tiles leave room for."""

MIN_PREFILL_SPLIT = 512
"""Tokens of context a split of a prefill row should have at least."""


@dataclass(slots=True)
class PrefillPlan:
    """Rows after the decode rows; `start` is their first token."""

    start: int
    seq_lens_B: torch.Tensor
    query_starts_B1: torch.Tensor
    page_tables_BP: torch.Tensor
    tile_row_X: torch.Tensor
    tile_query_X: torch.Tensor
    tiles: TileConfig
    splits: int
    page_size: int
    packed: torch.Tensor
    """What lengths, starts and tiles are views of."""
    arrived_XK: torch.Tensor | None
    """Zeros that count splits, where rows are cut."""
    at_end: bool = False
    """Every query of a row sees all of it."""
    window_tables_BP: torch.Tensor | None = None
    """Of windowed layers, where their pages are others."""


class TritonAttention:
    """`deterministic` makes a row's result independent of the others: fixed tiles, and cuts at fixed
    positions, whoever reads what lies between them (`engine.kernels.decode_pieces`). `prefill`
    computes the rows after the decode rows where it wants them, and gives the whole its name."""

    def __init__(
        self,
        spec: ModelSpec,
        deterministic: bool = False,
        parallel: TensorParallel = SINGLE,
        prefill: PrefillPart | None = None,
    ) -> None:
        for index, layer in enumerate(spec.layers):
            if layer.bias is not None:
                raise Unsupported(
                    field=f"layers[{index}].bias", expected="none with the triton attention", actual=layer.bias
                )
        self.name = "triton" if prefill is None else prefill.name
        self._spec = spec
        self._deterministic = deterministic
        self.num_heads = parallel.share(spec.num_heads, "num_attention_heads")
        self._num_kv_heads = parallel.share(spec.num_kv_heads, "num_key_value_heads")
        self._block_d = padded_head_dim(spec.head_dim)
        self._group = self.num_heads // self._num_kv_heads
        self._workspace: Workspace | None = None
        self._shapes: dict[tuple[int, int], LayerShape] = {}
        self._pool: KVPool | None = None
        self._write_slots_T = torch.empty(0)
        self._window: WindowRows | None = None
        self._reach = max((layer.window or 0 for layer in spec.layers), default=0)
        self._num_decode = 0
        self._decode: DecodeMetadata | None = None
        self._prefill: PrefillPlan | None = None
        self._prefill_part = prefill

    # The graph form.

    def plan_decode_buffers(
        self, max_rows: int, max_pages: int, kv_pool: KVPool, shared: bool = False
    ) -> DecodeMetadata:
        """Fixed buffers for up to `max_rows` rows of up to `max_pages` pages, on the pool's device.

        The workspace is shared with buffers planned before; plan the largest first. With `shared` the
        launches of `run_decode` include the prefix kernel, set_prefixes or not; when deterministic
        they always do.
        """
        return self._buffers(kv_pool, max_rows, max_pages, shared)

    def run_decode(
        self,
        q_BNH: torch.Tensor,
        layer_kv: torch.Tensor,
        metadata: DecodeMetadata,
        out_BNH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
    ) -> None:
        """Write out_BNH from a layer's storage (`kv_pool.tokens(layer)`), this step's keys included.

        `metadata.cut()` comes once a step before the first layer. Allocates nothing; all grids are
        fixed by the buffers.
        """
        if metadata.window is not None and self._spec.layers[layer].window is not None:
            metadata = metadata.window
        shape = self._shape(layer, metadata.size.page_size)
        assert (sink_N is not None) == shape.sink, f"sinks of layer {layer}"
        prefix = metadata.prefix
        if prefix is not None:
            prefix_attention(
                q_BNH,
                layer_kv,
                metadata.page_tables_BP,
                metadata.seq_lens_B,
                metadata.pieces_X8,
                prefix,
                shape,
                metadata.prefix_tiles,
                None if metadata.fixed is None else metadata.fixed.counts_2[1:],
                ceil_div(PREFIX_PROGRAMS * metadata.size.processors, shape.num_kv_heads),
            )
        decode_attention(
            q_BNH,
            layer_kv,
            metadata.page_tables_BP,
            metadata.seq_lens_B,
            metadata.items_W8,
            out_BNH,
            metadata.partial,
            metadata.arrived_BK,
            shape,
            metadata.decode_tiles,
            sink_N,
            prefix,
        )

    # The eager form.

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        self._pool = kv_pool
        self._write_slots_T, self._window = batch.write_slots_T, batch.window
        self._num_decode = batch.num_decode
        self._decode = self._plan_decode(batch, kv_pool) if batch.num_decode else None
        self._prefill = None
        part = self._prefill_part
        if batch.num_rows > batch.num_decode and not (part is not None and part.plan(batch, kv_pool)):
            self._prefill = self._plan_prefill(batch, kv_pool)

    def _plan_decode(self, batch: ForwardBatch, kv_pool: KVPool) -> DecodeMetadata:
        rows = batch.num_decode
        size = self._size(kv_pool)
        prefixes = worthwhile([prefix for prefix in batch.shared_prefixes if prefix.end <= rows], size)
        lengths = batch.seq_lens[:rows]
        tables_BP = batch.page_tables_BP[:rows]
        window_BP = tables_BP if batch.window is None else batch.window.page_tables_BP[:rows]
        metadata = self._buffers(kv_pool, rows, tables_BP, bool(prefixes), window_BP)
        metadata.seq_lens_B.copy_(staged(np.array(lengths, dtype=np.int32), kv_pool.device), non_blocking=True)
        if prefixes:
            metadata.set_prefixes(prefixes)
        metadata.cut()
        return metadata

    def _plan_prefill(self, batch: ForwardBatch, kv_pool: KVPool) -> PrefillPlan:
        first = batch.num_decode
        queries, lengths = batch.query_lens[first:], batch.seq_lens[first:]
        tiles = self._prefill_tiles(kv_pool, max(queries))
        parts = _prefill_parts(queries, lengths, tiles.block_m // self._group)
        packed = send(np.array([value for part in parts for value in part], dtype=np.int32), kv_pool.device)
        splits = self._prefill_splits(len(parts[2]), max(lengths), kv_pool)
        views = packed.split([len(part) for part in parts])
        plan = self._plan_of(first, views, batch.page_tables_BP[first:], tiles, splits, kv_pool.page_size, packed)
        if batch.window is not None:
            plan.window_tables_BP = batch.window.page_tables_BP[first:]
        return plan

    def _prefill_tiles(self, kv_pool: KVPool, longest: int) -> TileConfig:
        longest = 1 << 20 if self._deterministic else longest
        return prefill_config(self._block_d, kv_pool.dtype.itemsize, self._group, longest)

    def _prefill_splits(self, tiles: int, longest_context: int, kv_pool: KVPool) -> int:
        """Parts that each tile's context is cut into, so that few tiles still fill the device."""
        if self._deterministic:
            return 1
        free = 2 * processors(kv_pool.device) // max(1, tiles * self._num_kv_heads)
        return max(1, min(16, free, longest_context // MIN_PREFILL_SPLIT))

    # The graph form of prefill.

    def prefills_in_one_piece(self, batch: ForwardBatch, kv_pool: KVPool) -> bool:
        """Whether a batch without decode rows runs as `run_prefill` with fixed buffers does."""
        if self._prefill_part is not None:
            return False
        per_tile = self._prefill_tiles(kv_pool, 1 << 20).block_m // self._group
        tiles = sum(-(-count // per_tile) for count in batch.query_lens)
        return self._prefill_splits(tiles, max(batch.seq_lens), kv_pool) == 1

    def plan_prefill_buffers(self, max_tokens: int, max_rows: int, max_pages: int, kv_pool: KVPool) -> PrefillPlan:
        """Fixed buffers for up to `max_tokens` tokens of up to `max_rows` rows, all of them padding."""
        tiles = self._prefill_tiles(kv_pool, 1 << 20)
        most = max_tokens // (tiles.block_m // self._group) + max_rows
        sizes = [max_rows, max_rows + 1, most, most]
        packed = torch.full((sum(sizes),), -1, dtype=torch.int32, device=kv_pool.device)
        packed[: sum(sizes[:2])] = 0
        tables = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=kv_pool.device)
        plan = self._plan_of(0, packed.split(sizes), tables, tiles, 1, kv_pool.page_size, packed)
        if kv_pool.window_pages is not None:
            plan.window_tables_BP = torch.zeros_like(tables)
        return plan

    def fill_prefill(self, plan: PrefillPlan, batch: ForwardBatch) -> None:
        """Take a batch without decode rows into fixed buffers. Waits for nothing."""
        per_tile = plan.tiles.block_m // self._group
        parts = _prefill_parts(batch.query_lens, batch.seq_lens, per_tile)
        packed, at = np.full(plan.packed.shape[0], -1, dtype=np.int32), 0
        buffers = (plan.seq_lens_B, plan.query_starts_B1, plan.tile_row_X, plan.tile_query_X)
        for buffer, part, padding in zip(buffers, parts, (0, parts[1][-1], -1, 0), strict=True):
            packed[at : at + len(part)] = part
            packed[at + len(part) : at + buffer.shape[0]] = padding
            at += buffer.shape[0]
        plan.packed.copy_(staged(packed, plan.packed.device), non_blocking=True)
        rows, columns = batch.page_tables_BP.shape
        plan.page_tables_BP[:rows, :columns].copy_(batch.page_tables_BP)
        if plan.window_tables_BP is not None:
            given = batch if batch.window is None else batch.window
            plan.window_tables_BP[:rows, :columns].copy_(given.page_tables_BP)

    def plan_round_buffers(
        self,
        page_tables_BP: torch.Tensor,
        seq_lens_B: torch.Tensor,
        query_starts_B1: torch.Tensor,
        most_queries: int,
        kv_pool: KVPool,
        at_end: bool = False,
    ) -> PrefillPlan:
        """Rows of up to `most_queries` tokens whose lengths and starts the device fills: a row without
        tokens is a no-op. `at_end` as in `prefill_attention`."""
        device, rows = kv_pool.device, seq_lens_B.shape[0]
        tiles = self._prefill_tiles(kv_pool, most_queries)
        per_tile = tiles.block_m // self._group
        each = ceil_div(most_queries, per_tile)
        row_X = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(each)
        query_X = (torch.arange(each, dtype=torch.int32, device=device) * per_tile).repeat(rows)
        longest = page_tables_BP.shape[1] * kv_pool.page_size
        splits = self._prefill_splits(rows * each, longest, kv_pool)
        views = (seq_lens_B, query_starts_B1, row_X, query_X)
        plan = self._plan_of(0, views, page_tables_BP, tiles, splits, kv_pool.page_size, row_X)
        plan.at_end = at_end
        return plan

    def _plan_of(
        self,
        start: int,
        views: tuple[torch.Tensor, ...],
        page_tables_BP: torch.Tensor,
        tiles: TileConfig,
        splits: int,
        page_size: int,
        packed: torch.Tensor,
    ) -> PrefillPlan:
        lengths, starts, rows_X, queries_X = views
        arrived_XK = None
        if splits > 1:
            arrived_XK = torch.zeros(len(rows_X), self._num_kv_heads, dtype=torch.int32, device=rows_X.device)
        return PrefillPlan(
            start, lengths, starts, page_tables_BP, rows_X, queries_X, tiles, splits, page_size, packed, arrived_XK
        )

    def run_prefill(
        self,
        q_TNH: torch.Tensor,
        layer_kv: torch.Tensor,
        plan: PrefillPlan,
        out_TNH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
    ) -> None:
        """Write out_TNH of the plan's tokens; this step's keys and values are in `layer_kv` already."""
        partial = None
        if plan.arrived_XK is not None:
            tokens, heads, head_dim = q_TNH.shape
            partial = States.empty((plan.splits, tokens), heads, head_dim, q_TNH.device)
        tables_BP = plan.page_tables_BP
        if plan.window_tables_BP is not None and self._spec.layers[layer].window is not None:
            tables_BP = plan.window_tables_BP
        prefill_attention(
            q_TNH,
            layer_kv,
            tables_BP,
            plan.seq_lens_B,
            plan.query_starts_B1,
            plan.tile_row_X,
            plan.tile_query_X,
            out_TNH,
            self._shape(layer, plan.page_size),
            plan.tiles,
            sink_N,
            plan.splits,
            partial,
            plan.arrived_XK,
            plan.at_end,
        )

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._pool is not None, "plan comes before run"
        write_slots_T = self._write_slots_T
        if self._window is not None and self._pool.windowed(layer):
            write_slots_T = self._window.write_slots_T
        self._pool.write(layer, write_slots_T, pack(k_TKH, v_TKH))
        return self.attend(q_TNH, layer, sink_N)

    def attend(self, q_TNH: torch.Tensor, layer: int, sink_N: torch.Tensor | None = None) -> torch.Tensor:
        """out_TNH where this step's keys and values are in the pool already."""
        pool, prefill, rows = self._pool, self._prefill, self._num_decode
        assert pool is not None, "plan comes before attend"
        if q_TNH.stride()[1:] != (q_TNH.shape[2], 1):
            q_TNH = q_TNH.contiguous()
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        layer_kv = pool.tokens(layer)
        if self._decode is not None:
            self.run_decode(q_TNH[:rows], layer_kv, self._decode, out_TNH[:rows], layer, sink_N)
        if prefill is not None:
            self.run_prefill(q_TNH[rows:], layer_kv, prefill, out_TNH[rows:], layer, sink_N)
        elif self._prefill_part is not None and rows < q_TNH.shape[0]:
            self._prefill_part.attend(q_TNH[rows:], pool, layer, out_TNH[rows:])
        return out_TNH

    def _buffers(
        self,
        kv_pool: KVPool,
        max_rows: int,
        tables: torch.Tensor | int,
        shared: bool,
        window_tables_BP: torch.Tensor | None = None,
    ) -> DecodeMetadata:
        if self._workspace is None:
            self._workspace = Workspace(kv_pool.device)
        itemsize = kv_pool.dtype.itemsize
        # A row's tiles may not depend on how many others there are.
        rows = 1 << 20 if self._deterministic else max_rows
        tiles = (
            decode_config(self._block_d, itemsize, shared or self._deterministic, rows),
            prefix_config(self._block_d, itemsize, self._group),
        )
        metadata = decode_buffers(
            self._size(kv_pool), self._workspace, tiles, max_rows, kv_pool.device, tables, shared, self._deterministic
        )
        if kv_pool.window_pages is not None:
            alone = decode_config(self._block_d, itemsize, self._deterministic, rows)
            given = metadata, self._workspace, alone, window_tables_BP
            metadata.window = window_buffers(*given, self._reach, self._deterministic)
        return metadata

    def _size(self, kv_pool: KVPool) -> AttentionSize:
        return AttentionSize(
            num_heads=self.num_heads,
            num_kv_heads=self._num_kv_heads,
            head_dim=self._spec.head_dim,
            page_size=kv_pool.page_size,
            itemsize=kv_pool.dtype.itemsize,
            processors=processors(kv_pool.device),
        )

    def _shape(self, layer: int, page_size: int) -> LayerShape:
        shape = self._shapes.get((layer, page_size))
        if shape is None:
            spec = self._spec.layers[layer]
            shape = self._shapes[layer, page_size] = LayerShape(
                num_heads=self.num_heads,
                num_kv_heads=self._num_kv_heads,
                head_dim=self._spec.head_dim,
                page_size=page_size,
                window=spec.window or 0,
                softcap=spec.softcap or 0.0,
                sink=spec.sink,
            )
        return shape


def _prefill_parts(queries: list[int], lengths: list[int], per_tile: int) -> tuple[list[int], ...]:
    """Lengths, starts of rows among the tokens, rows of tiles and their first queries."""
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    return (lengths, starts, *cut_tiles(queries, lengths, per_tile))
