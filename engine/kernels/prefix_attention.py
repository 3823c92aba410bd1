"""Attention of many rows over the tokens they share, read once for all of them.

Owns the kernel that turns a piece of a shared prefix and the rows above it into stored states.
Ignores the rows' own tokens and the merge (`decode_attention`), and how segments become pieces
(`engine.attention.decode_metadata`).

A piece is 8 int32: first row, number of rows, first token, end token, the row whose page table names
the pages, the index of the state it makes for its rows, and two unused. Pieces with no rows are
padding. The rows of a piece times the heads of a group are the M dimension. A row of a piece may also be one of
several queries of a request: then `seq_lens` say where each query stands, counted from 1, and rows of page tables are
requests. Where the length of the list is known on the device only, a fixed number of programs goes through it.

Shapes: B rows, N query heads, H head size, X pieces, S states a row, M query rows of a tile, D = H
padded to a power of two.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import attend_reference, attend_tokens, empty_state, store_state, tile_rows
from engine.kernels.decode_attention import LayerShape, States, TileConfig
from engine.kernels.early import await_inputs, is_early, options, release_next


def prefix_reference(
    q_BNH: torch.Tensor,
    layer_kv: torch.Tensor,
    page_tables_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    pieces_X8: torch.Tensor,
    num_states: int,
    shape: LayerShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean_SBNH, lse_SBN) in double precision, zeros and -inf where no piece writes."""
    mean_SBNH = torch.zeros((num_states, *q_BNH.shape), dtype=torch.float64)
    lse_SBN = torch.full((num_states, *q_BNH.shape[:2]), float("-inf"), dtype=torch.float64)
    for first, rows, lo, hi, table_row, state, _, _ in pieces_X8.tolist():
        position_C = torch.arange(lo, hi)
        pages_C = page_tables_BP[table_row, position_C // shape.page_size].long()
        kv_C2KH = layer_kv[pages_C * shape.page_size + position_C % shape.page_size]
        for row in range(first, first + rows):
            mean, lse = attend_reference(
                q_BNH[row : row + 1],
                kv_C2KH,
                seq_lens_B[row : row + 1] - 1,
                position_C,
                shape.window or None,
                shape.softcap or None,
            )
            mean_SBNH[state, row], lse_SBN[state, row] = mean[0], lse[0]
    return mean_SBNH, lse_SBN


@triton.jit
def _attend_piece(
    q_ptr, kv_ptr, tables_ptr, seq_lens_ptr, piece_ptr, mean_ptr, lse_ptr, q_stride, table_stride, state_rows,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    first_row = tl.load(piece_ptr)
    rows = tl.load(piece_ptr + 1)
    lo = tl.load(piece_ptr + 2)
    hi = tl.load(piece_ptr + 3)
    table_row = tl.load(piece_ptr + 4).to(tl.int64)
    state = tl.load(piece_ptr + 5).to(tl.int64)
    query_M, head_M, mask_M, mask_MD = tile_rows(kv_head, rows, HEADS, KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_D)
    row_M = first_row + query_M
    q_at_M = row_M.to(tl.int64) * q_stride + head_M * HEAD_DIM
    q_MD = tl.load(q_ptr + q_at_M[:, None] + tl.arange(0, BLOCK_D)[None, :], mask=mask_MD, other=0.0)
    position_M = tl.zeros([BLOCK_M], tl.int32)
    if WINDOW > 0:
        # A row of length 0 sees nothing and must not hold the tile back.
        length_M = tl.load(seq_lens_ptr + row_M, mask=mask_M, other=0)
        position_M = tl.where(length_M > 0, length_M - 1, 1 << 30).to(tl.int32)
        lo = tl.maximum(lo, (tl.min(position_M, 0) - WINDOW + 1) // BLOCK_N * BLOCK_N)
    acc_MD, sum_M, top_M = empty_state(BLOCK_M, BLOCK_D)
    acc_MD, sum_M, top_M = attend_tokens(
        q_MD,
        acc_MD,
        sum_M,
        top_M,
        kv_ptr + kv_head * HEAD_DIM,
        tables_ptr + table_row * table_stride,
        lo,
        hi,
        position_M,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_N,
        BLOCK_D,
        PAGE,
        SCALE,
        SOFTCAP,
        WINDOW,
        False,
        WHOLE,
    )
    state_M = (state * state_rows + row_M) * HEADS + head_M
    store_state(mean_ptr, lse_ptr, state_M, acc_MD, sum_M, top_M, mask_M, mask_MD, HEAD_DIM)


@triton.jit(
    do_not_specialize=["table_stride", "state_rows"],
    do_not_specialize_on_alignment=["tables_ptr", "seq_lens_ptr", "pieces_ptr", "count_ptr", "lse_ptr"],
)
def _prefix_kernel(
    q_ptr,
    kv_ptr,
    tables_ptr,
    seq_lens_ptr,
    pieces_ptr,
    count_ptr,
    mean_ptr,
    lse_ptr,
    q_stride,
    table_stride,
    state_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LISTED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # Whatever waits for this launch to release it may read queries, keys and values.
    await_inputs(EARLY)
    release_next(EARLY)
    if LISTED:
        # As many programs as run at once take turns: the room for the list is far larger than the list.
        for piece in range(tl.program_id(1), tl.load(count_ptr), tl.num_programs(1)):
            _attend_piece(
                q_ptr, kv_ptr, tables_ptr, seq_lens_ptr, pieces_ptr + piece * 8, mean_ptr, lse_ptr, q_stride,
                table_stride, state_rows, HEADS, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE, SCALE, WINDOW, SOFTCAP, True,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
    elif tl.load(pieces_ptr + tl.program_id(1) * 8 + 1) > 0:
        _attend_piece(
            q_ptr, kv_ptr, tables_ptr, seq_lens_ptr, pieces_ptr + tl.program_id(1) * 8, mean_ptr, lse_ptr, q_stride,
            table_stride, state_rows, HEADS, KV_HEADS, HEAD_DIM, BLOCK_D, PAGE, SCALE, WINDOW, SOFTCAP, False,
            BLOCK_M, BLOCK_N,
        )  # fmt: skip


def prefix_attention(
    q_BNH: torch.Tensor,
    layer_kv: torch.Tensor,
    page_tables_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    pieces_X8: torch.Tensor,
    states: States,
    shape: LayerShape,
    config: TileConfig,
    count_1: torch.Tensor | None = None,
    programs: int = 0,
) -> None:
    """Write the states of `pieces_X8` into `states` ([S, B] of them), nothing for padding.

    A piece has at most `config.block_m // group` rows. With `count_1`, that many pieces are there, each a
    multiple of `config.block_n` long, and `programs` for each key/value head share them out.
    """
    assert q_BNH.stride()[1:] == (shape.head_dim, 1), "heads of a row must be contiguous"
    assert layer_kv.is_contiguous() and page_tables_BP.stride(1) == 1
    early = is_early(q_BNH)
    _prefix_kernel[(shape.num_kv_heads, pieces_X8.shape[0] if count_1 is None else programs)](
        q_BNH,
        layer_kv,
        page_tables_BP,
        seq_lens_B,
        pieces_X8,
        count_1,
        states.mean_INH,
        states.lse_IN,
        q_BNH.stride(0),
        page_tables_BP.stride(0),
        states.lse_IN.shape[1],
        **shape.constants,
        LISTED=count_1 is not None,
        EARLY=early,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        **config.options,
        **options(early),
    )
