"""Index scores of every token that a query sees: sums over heads of weight * relu(query . key).

Owns the kernel and its launcher; keys are read through pages. Ignores what scores are for (`dsa_select`). The
reference is `engine.attention.mla.index_scores`.

Shapes: T tokens, I index heads padded to a power of two, E index head size, N tokens of a tile, B rows, P
page-table columns, S the longest context.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import ceil_div, power_of_two


@triton.jit(do_not_specialize=["table_stride", "piece"], do_not_specialize_on_alignment=["rows_of_ptr", "visible_ptr"])
def _index_scores_kernel(
    q_ptr, weights_ptr, keys_ptr, tables_ptr, rows_of_ptr, visible_ptr, scores_ptr,
    q_stride, scores_stride, table_stride, piece,
    HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    seen = tl.load(visible_ptr + token)
    lo = tl.program_id(0) * piece
    hi = tl.minimum(lo + piece, seen)
    if lo < hi:
        i_I = tl.arange(0, BLOCK_I)
        e_E = tl.arange(0, BLOCK_E)
        mask_IE = (i_I[:, None] < HEADS) & (e_E[None, :] < SIZE)
        q_IE = tl.load(q_ptr + token * q_stride + i_I[:, None] * SIZE + e_E[None, :], mask=mask_IE, other=0.0)
        weight_I = tl.load(weights_ptr + token * HEADS + i_I, mask=i_I < HEADS, other=0.0)
        table_ptr = tables_ptr + tl.load(rows_of_ptr + token).to(tl.int64) * table_stride
        for first in range(lo, hi, BLOCK_N):
            place_N = first + tl.arange(0, BLOCK_N)
            read_N = tl.minimum(place_N, hi - 1)
            slot_N = tl.load(table_ptr + read_N // PAGE).to(tl.int64) * PAGE + read_N % PAGE
            at_NE = slot_N[:, None] * SIZE + e_E[None, :]
            if BLOCK_E == SIZE:
                key_NE = tl.load(keys_ptr + at_NE)
            else:
                key_NE = tl.load(keys_ptr + at_NE, mask=e_E[None, :] < SIZE, other=0.0)
            product_IN = tl.dot(q_IE, tl.trans(key_NE), input_precision="ieee")
            score_N = tl.sum(tl.maximum(product_IN, 0.0) * weight_I[:, None], 0)
            tl.store(scores_ptr + token * scores_stride + place_N, score_N, mask=place_N < hi)


def dsa_index_scores(
    q_TIE: torch.Tensor,
    weights_TI: torch.Tensor,
    keys: torch.Tensor,
    page_tables_BP: torch.Tensor,
    row_of_T: torch.Tensor,
    visible_T: torch.Tensor,
    scores_TS: torch.Tensor,
    page_size: int,
    most: int,
    block_n: int = 64,
    piece: int = 512,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Write the first `visible_T` scores of each token, fp32; `most` bounds `visible_T`. What lies behind them is
    left as it is."""
    tokens, heads, size = q_TIE.shape
    assert q_TIE.stride()[1:] == (size, 1) and weights_TI.is_contiguous() and keys.is_contiguous()
    assert weights_TI.dtype == scores_TS.dtype == torch.float32 and scores_TS.stride(1) == 1
    assert scores_TS.shape[1] >= most and row_of_T.dtype == visible_T.dtype == torch.int32
    _index_scores_kernel[(ceil_div(most, piece), tokens)](
        q_TIE,
        weights_TI,
        keys,
        page_tables_BP,
        row_of_T,
        visible_T,
        scores_TS,
        q_TIE.stride(0),
        scores_TS.stride(0),
        page_tables_BP.stride(0),
        piece,
        HEADS=heads,
        SIZE=size,
        PAGE=page_size,
        BLOCK_I=max(16, power_of_two(heads)),
        BLOCK_E=max(16, power_of_two(size)),
        BLOCK_N=block_n,
        num_warps=num_warps,
        num_stages=num_stages,
    )
