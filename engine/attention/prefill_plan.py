"""What the device must know to compute rows of several queries: prompt chunks and rows that verify drafts.

Owns the plans' buffers, tiles and splits, filled from the host batch by batch or, in rounds of speculation, on the
device. Ignores the kernels that read them, and which prefixes such rows share (`engine.attention.verify_prefixes`).

Shapes: T tokens, B rows, P page-table columns, K key/value heads, X tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.decode_metadata import processors
from engine.attention.verify_prefixes import VerifyPrefixes
from engine.batch import ForwardBatch
from engine.kernels.attention_config import prefill_config
from engine.kernels.attention_tile import ceil_div
from engine.kernels.decode_attention import TileConfig
from engine.kernels.prefill_attention import cut_tiles
from engine.memory.kv_pool import KVPool
from engine.memory.transfer import send, staged

MIN_PREFILL_SPLIT = 512
"""Tokens of context a split of a prefill row should have at least."""

ANY = 1 << 20
"""Queries of a row, or rows of a step, where plans are for any number of them."""


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
    shared: VerifyPrefixes | None = None
    """What rows read together; None where each reads all of its context."""


@dataclass(frozen=True, slots=True)
class PrefillPlanner:
    """`group` query heads share a key/value head of `block_d` padded values."""

    num_kv_heads: int
    group: int
    block_d: int
    deterministic: bool

    def tiles(self, kv_pool: KVPool, longest: int) -> TileConfig:
        longest = ANY if self.deterministic else longest
        return prefill_config(self.block_d, kv_pool.dtype.itemsize, self.group, longest)

    def splits(self, tiles: int, longest_context: int, kv_pool: KVPool) -> int:
        """Parts that each tile's context is cut into, so that few tiles still fill the device."""
        if self.deterministic:
            return 1
        free = 2 * processors(kv_pool.device) // max(1, tiles * self.num_kv_heads)
        return max(1, min(16, free, longest_context // MIN_PREFILL_SPLIT))

    def of_batch(self, batch: ForwardBatch, kv_pool: KVPool) -> PrefillPlan:
        """For a batch's rows after its decode rows."""
        first = batch.num_decode
        queries, lengths = batch.query_lens[first:], batch.seq_lens[first:]
        tiles = self.tiles(kv_pool, max(queries))
        parts = _parts(queries, lengths, tiles.block_m // self.group)
        packed = send(np.array([value for part in parts for value in part], dtype=np.int32), kv_pool.device)
        splits = self.splits(len(parts[2]), max(lengths), kv_pool)
        views = packed.split([len(part) for part in parts])
        plan = self._plan(first, views, batch.page_tables_BP[first:], tiles, splits, kv_pool.page_size, packed)
        if batch.window is not None:
            plan.window_tables_BP = batch.window.page_tables_BP[first:]
        return plan

    def one_piece(self, batch: ForwardBatch, kv_pool: KVPool) -> bool:
        """Whether a batch without decode rows runs the same with buffers of fixed size."""
        per_tile = self.tiles(kv_pool, ANY).block_m // self.group
        tiles = sum(ceil_div(count, per_tile) for count in batch.query_lens)
        return self.splits(tiles, max(batch.seq_lens), kv_pool) == 1

    def buffers(self, max_tokens: int, max_rows: int, max_pages: int, kv_pool: KVPool) -> PrefillPlan:
        """For up to `max_tokens` tokens of up to `max_rows` rows, all of them padding."""
        tiles = self.tiles(kv_pool, ANY)
        most = max_tokens // (tiles.block_m // self.group) + max_rows
        sizes = [max_rows, max_rows + 1, most, most]
        packed = torch.full((sum(sizes),), -1, dtype=torch.int32, device=kv_pool.device)
        packed[: sum(sizes[:2])] = 0
        tables = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=kv_pool.device)
        plan = self._plan(0, packed.split(sizes), tables, tiles, 1, kv_pool.page_size, packed)
        if kv_pool.window_pages is not None:
            plan.window_tables_BP = torch.zeros_like(tables)
        return plan

    def fill(self, plan: PrefillPlan, batch: ForwardBatch) -> None:
        """Take a batch without decode rows into fixed buffers. Waits for nothing."""
        parts = _parts(batch.query_lens, batch.seq_lens, plan.tiles.block_m // self.group)
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

    def rounds(
        self,
        page_tables_BP: torch.Tensor,
        seq_lens_B: torch.Tensor,
        query_starts_B1: torch.Tensor,
        most_queries: int,
        kv_pool: KVPool,
    ) -> PrefillPlan:
        """For rows of up to `most_queries` tokens whose lengths and starts the device fills."""
        device, rows = kv_pool.device, seq_lens_B.shape[0]
        tiles = self.tiles(kv_pool, most_queries)
        per_tile = tiles.block_m // self.group
        each = ceil_div(most_queries, per_tile)
        row_X = torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(each)
        query_X = (torch.arange(each, dtype=torch.int32, device=device) * per_tile).repeat(rows)
        longest = page_tables_BP.shape[1] * kv_pool.page_size
        splits = self.splits(rows * each, longest, kv_pool)
        views = (seq_lens_B, query_starts_B1, row_X, query_X)
        return self._plan(0, views, page_tables_BP, tiles, splits, kv_pool.page_size, row_X)

    def _plan(
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
            arrived_XK = torch.zeros(len(rows_X), self.num_kv_heads, dtype=torch.int32, device=rows_X.device)
        return PrefillPlan(
            start, lengths, starts, page_tables_BP, rows_X, queries_X, tiles, splits, page_size, packed, arrived_XK
        )


def _parts(queries: list[int], lengths: list[int], per_tile: int) -> tuple[list[int], ...]:
    """Lengths, starts of rows among the tokens, rows of tiles and their first queries."""
    starts = [0]
    for count in queries:
        starts.append(starts[-1] + count)
    return (lengths, starts, *cut_tiles(queries, lengths, per_tile))
