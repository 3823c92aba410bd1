"""What rows of several queries each read together of their common prefixes.

Owns the step from rows to their queries: how many queries a row has is decided on the device, round by round, so the
pieces that a host lays out over rows become pieces over queries there. A range of rows has its queries back to back,
which fill as many tiles as there are queries. Ignores which rows share what (`engine.attention.verify_prefixes`)
and what is computed over a piece (`prefix_attention`, which reads the list).

A range is 8 int32: first row, number of rows, first token, end token, the row whose page table names the pages, the
index of the state it makes, and two unused. Ranges without rows are padding.

Shapes: B rows, E ranges, X pieces.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import ceil_div, power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next


def list_pieces_reference(starts_B1: torch.Tensor, ranges_E8: torch.Tensor, queries: int) -> list[list[int]]:
    """The pieces, in the order of ranges; the arguments of `list_pieces`, on the host."""
    starts, pieces = starts_B1.tolist(), []
    for row, rows, lo, hi, table_row, state, _, _ in ranges_E8.tolist():
        first, end = starts[row], starts[row + rows]
        for at in range(first, end, queries):
            pieces.append([at, min(queries, end - at), lo, hi, table_row, state, 0, 0])
    return pieces


def most_pieces(tokens: int, ranges: int, states: int, queries: int) -> int:
    """Room for the pieces of any ranges: those that make the same state have no row in common."""
    return states * ceil_div(tokens, queries) + ranges


@triton.jit(
    do_not_specialize=["ranges", "capacity"],
    do_not_specialize_on_alignment=["starts_ptr", "ranges_ptr", "pieces_ptr", "count_ptr"],
)
def _list_pieces_kernel(
    starts_ptr,
    ranges_ptr,
    pieces_ptr,
    count_ptr,
    ranges,
    capacity,
    QUERIES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_X: tl.constexpr,
    EARLY: tl.constexpr,
):
    await_inputs(EARLY)
    release_next(EARLY)
    e_E = tl.arange(0, BLOCK_E)
    there_E = e_E < ranges
    row_E = tl.load(ranges_ptr + e_E * 8, mask=there_E, other=0)
    rows_E = tl.load(ranges_ptr + e_E * 8 + 1, mask=there_E, other=0)
    first_E = tl.load(starts_ptr + row_E, mask=rows_E > 0, other=0)
    end_E = tl.load(starts_ptr + row_E + rows_E, mask=rows_E > 0, other=0)
    tiles_E = (end_E - first_E + QUERIES - 1) // QUERIES
    mine = tl.program_id(0)
    if mine == 0:
        tl.store(count_ptr, tl.minimum(tl.sum(tiles_E, 0), capacity))
    tiles = tl.sum(tl.where(e_E == mine, tiles_E, 0), 0)
    if tiles > 0:
        first = tl.sum(tl.where(e_E == mine, first_E, 0), 0)
        end = tl.sum(tl.where(e_E == mine, end_E, 0), 0)
        at = tl.sum(tl.where(e_E < mine, tiles_E, 0), 0)
        lo = tl.load(ranges_ptr + mine * 8 + 2)
        hi = tl.load(ranges_ptr + mine * 8 + 3)
        table_row = tl.load(ranges_ptr + mine * 8 + 4)
        state = tl.load(ranges_ptr + mine * 8 + 5)
        for done in range(0, tiles, BLOCK_X):
            tile_X = done + tl.arange(0, BLOCK_X)
            here_X = (tile_X < tiles) & (at + tile_X < capacity)
            piece_ptr_X = pieces_ptr + (at + tile_X) * 8
            first_X = first + tile_X * QUERIES
            tl.store(piece_ptr_X, first_X, mask=here_X)
            tl.store(piece_ptr_X + 1, tl.minimum(end - first_X, QUERIES), mask=here_X)
            tl.store(piece_ptr_X + 2, tile_X * 0 + lo, mask=here_X)
            tl.store(piece_ptr_X + 3, tile_X * 0 + hi, mask=here_X)
            tl.store(piece_ptr_X + 4, tile_X * 0 + table_row, mask=here_X)
            tl.store(piece_ptr_X + 5, tile_X * 0 + state, mask=here_X)


def list_pieces(
    starts_B1: torch.Tensor, ranges_E8: torch.Tensor, pieces_X8: torch.Tensor, count_1: torch.Tensor, queries: int
) -> None:
    """Fill `pieces_X8` with tiles of at most `queries` queries, whose number goes to `count_1`; one launch.

    Row b's queries are starts_B1[b] to starts_B1[b + 1] of all. The room is `most_pieces` at least.
    """
    early = is_early(starts_B1)
    _list_pieces_kernel[(ranges_E8.shape[0],)](
        starts_B1,
        ranges_E8,
        pieces_X8,
        count_1,
        ranges_E8.shape[0],
        pieces_X8.shape[0],
        QUERIES=queries,
        BLOCK_E=max(16, power_of_two(ranges_E8.shape[0])),
        BLOCK_X=32,
        EARLY=early,
        num_warps=1,
        **options(early),
    )
