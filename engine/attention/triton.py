"""Attention on the GPU by the project's Triton kernels.

Owns the eager path (any mixed batch) and the launches that a captured decode graph consists of.
Ignores how the kernels compute and who captures graphs.

Shapes: T tokens, B decode rows, R queries of rows that verify drafts, P page-table columns, N query heads,
K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import replace

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
from engine.attention.prefill_plan import ANY, PrefillPlan, PrefillPlanner
from engine.attention.verify_prefixes import VerifyPrefixes
from engine.attention.window_metadata import window_buffers
from engine.batch import ForwardBatch, SharedPrefix, WindowRows
from engine.errors import Unsupported
from engine.kernels.attention_config import decode_config, prefix_config, verify_prefix_config
from engine.kernels.attention_tile import ceil_div
from engine.kernels.decode_attention import LayerShape, States, decode_attention
from engine.kernels.prefill_attention import prefill_attention
from engine.kernels.prefix_attention import prefix_attention
from engine.memory.kv_pool import KVPool, pack
from engine.memory.transfer import staged
from engine.models.spec import ModelSpec
from engine.parallel import SINGLE, TensorParallel

PREFIX_PROGRAMS = 2
"""Programs a multiprocessor that go through a list of pieces: as many as their tiles leave room for."""


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
        self._prefills = PrefillPlanner(self._num_kv_heads, self._group, self._block_d, deterministic)

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
        if batch.num_rows > batch.num_decode:
            prefixes, part = self._verify_prefixes_of(batch, kv_pool), self._prefill_part
            if prefixes or part is None or not part.plan(batch, kv_pool):
                self._prefill = self._plan_prefill(batch, kv_pool, prefixes)

    def _plan_decode(self, batch: ForwardBatch, kv_pool: KVPool) -> DecodeMetadata:
        rows = batch.num_decode
        size = self.size(kv_pool)
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

    def _plan_prefill(self, batch: ForwardBatch, kv_pool: KVPool, prefixes: list[SharedPrefix]) -> PrefillPlan:
        plan, first = self._prefills.of_batch(batch, kv_pool), batch.num_decode
        if prefixes:
            queries = sum(batch.query_lens[first : batch.provisional])
            ends_R = batch.positions_T[first : first + queries] + 1
            plan.shared = self._verify_prefixes(plan.query_starts_B1, ends_R, kv_pool)
            moved = [replace(each, start=each.start - first, end=each.end - first) for each in prefixes]
            plan.shared.set(moved, queries / (batch.provisional - first))
            plan.shared.list()
        return plan

    def _verify_prefixes_of(self, batch: ForwardBatch, kv_pool: KVPool) -> list[SharedPrefix]:
        """Those that are worth reading once for rows that verify drafts."""
        first, end = batch.num_decode, batch.provisional
        found = [prefix for prefix in batch.shared_prefixes if first <= prefix.start and prefix.end <= end]
        if not found or self._deterministic:
            return []
        return worthwhile(found, self.size(kv_pool), sum(batch.query_lens[first:end]) / (end - first))

    # The graph form of prefill, and of rounds of speculation.

    def prefills_in_one_piece(self, batch: ForwardBatch, kv_pool: KVPool) -> bool:
        """Whether a batch without decode rows runs as `run_prefill` with fixed buffers does. It does where rows
        share prefixes: reading them again costs less than launches one by one."""
        return self._prefill_part is None and self._prefills.one_piece(batch, kv_pool)

    def plan_prefill_buffers(self, max_tokens: int, max_rows: int, max_pages: int, kv_pool: KVPool) -> PrefillPlan:
        """Fixed buffers for up to `max_tokens` tokens of up to `max_rows` rows, all of them padding."""
        return self._prefills.buffers(max_tokens, max_rows, max_pages, kv_pool)

    def fill_prefill(self, plan: PrefillPlan, batch: ForwardBatch) -> None:
        """Take a batch without decode rows into fixed buffers. Waits for nothing."""
        self._prefills.fill(plan, batch)

    def plan_round_buffers(
        self,
        page_tables_BP: torch.Tensor,
        seq_lens_B: torch.Tensor,
        query_starts_B1: torch.Tensor,
        most_queries: int,
        kv_pool: KVPool,
        at_end: bool = False,
        ends_R: torch.Tensor | None = None,
    ) -> PrefillPlan:
        """Rows of up to `most_queries` tokens whose lengths and starts the device fills: a row without
        tokens is a no-op. `at_end` as in `prefill_attention`. With `ends_R`, where all queries stand, counted
        from 1, rows may share prefixes: `shared.set` says which, and `shared.list` follows in every round."""
        given = (page_tables_BP, seq_lens_B, query_starts_B1, most_queries, kv_pool)
        plan = self._prefills.rounds(*given)
        plan.at_end = at_end
        if ends_R is not None:
            plan.shared = self._verify_prefixes(query_starts_B1, ends_R, kv_pool)
        return plan

    def _verify_prefixes(self, starts_B1: torch.Tensor, ends_R: torch.Tensor, kv_pool: KVPool) -> VerifyPrefixes:
        if self._workspace is None:
            self._workspace = Workspace(kv_pool.device)
        tiles = verify_prefix_config(self._block_d, kv_pool.dtype.itemsize, self._group)
        return VerifyPrefixes.empty(self.size(kv_pool), tiles, self._workspace, starts_B1, ends_R)

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
        tables_BP, shared, shape = plan.page_tables_BP, plan.shared, self._shape(layer, plan.page_size)
        if plan.window_tables_BP is not None and self._spec.layers[layer].window is not None:
            # Rows that have come further than others no longer have the pages.
            tables_BP, shared = plan.window_tables_BP, None
        if shared is not None:
            self._run_prefix(q_TNH, layer_kv, tables_BP, shared, shape)
        prefill_attention(
            q_TNH,
            layer_kv,
            tables_BP,
            plan.seq_lens_B,
            plan.query_starts_B1,
            plan.tile_row_X,
            plan.tile_query_X,
            out_TNH,
            shape,
            plan.tiles,
            sink_N,
            plan.splits,
            partial,
            plan.arrived_XK,
            plan.at_end,
            None if shared is None else shared.before,
        )

    def _run_prefix(
        self,
        q_TNH: torch.Tensor,
        layer_kv: torch.Tensor,
        tables_BP: torch.Tensor,
        shared: VerifyPrefixes,
        shape: LayerShape,
    ) -> None:
        programs = ceil_div(PREFIX_PROGRAMS * shared.size.processors, shape.num_kv_heads)
        given = (q_TNH, layer_kv, tables_BP, shared.ends_R, shared.pieces_X8, shared.before.states, shape)
        prefix_attention(*given, shared.tiles, shared.count_1, programs)

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
        # A row's tiles may not depend on how many others there are, nor on what it shares with them.
        rows = ANY if self._deterministic else max_rows
        tiles = (
            decode_config(self._block_d, itemsize, shared and not self._deterministic, rows),
            prefix_config(self._block_d, itemsize, self._group),
        )
        metadata = decode_buffers(
            self.size(kv_pool), self._workspace, tiles, max_rows, kv_pool.device, tables, shared, self._deterministic
        )
        if kv_pool.window_pages is not None:
            alone = decode_config(self._block_d, itemsize, rows=rows)
            given = metadata, self._workspace, alone, window_tables_BP
            metadata.window = window_buffers(*given, self._reach, self._deterministic)
        return metadata

    def size(self, kv_pool: KVPool) -> AttentionSize:
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
