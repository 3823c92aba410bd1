"""The inner loop of attention over latent rows, dense and chosen.

Owns a tile's scores, softmax and sum where one stored row is the key of every head, and its first numbers are
the value. Ignores which tokens a program reads and where results go; states are those of `attention_tile`.

Shapes: M heads of a tile, N tokens of a tile, L the latent padded to a power of two, R the rotated key too,
T tokens of the step, C numbers of a row, S splits.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import LOG2E, ceil_div, empty_state, mean_and_lse, power_of_two, store_state
from engine.kernels.decode_attention import States, TileConfig
from engine.kernels.merge_states import merge_states


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What a kernel must know of a layer: `rank` numbers of a latent, `rope_dim` of the rotated key behind it."""

    num_heads: int
    rank: int
    rope_dim: int
    page_size: int
    scale: float


def latent_config(heads: int, rank: int, itemsize: int, capability: int = 90) -> TileConfig:
    """`block_m` heads share the rows that a program reads. Sums of a tile are block_m x rank in fp32: what fits
    the registers of its warps. A Hopper or newer GPU multiplies 64 rows at once."""
    if itemsize > 2:
        return TileConfig(block_n=16, num_warps=4, num_stages=1, block_m=16)
    tile = 64 if capability >= 90 else 32
    block_m = max(16, min(tile, power_of_two(heads)))
    warps = 8 if block_m * rank >= 16384 else 4
    # Measured on an H200, 64 heads: 64 tokens take three quarters of the time of 32. Blackwell's form of the
    # products keeps more in shared memory than it has.
    block_n = 64 if 90 <= capability < 100 and block_m == 64 else 32
    return TileConfig(block_n=block_n, num_warps=warps, num_stages=2, block_m=block_m)


@triton.jit
def attend_latents(
    q_ML, q_MR, acc_ML, sum_M, top_M, rows_ptr, table_ptr, chosen_ptr, lo, hi,
    RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr, SCALE: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Add places [lo, hi) to a softmax state: tokens of the row's context, or with CHOSEN of the list of those
    chosen. Places past `hi` read the last one again, so that storage that nobody wrote is never touched."""
    l_L = tl.arange(0, BLOCK_L)
    r_R = tl.arange(0, BLOCK_R)
    for first in range(lo, hi, BLOCK_N):
        place_N = first + tl.arange(0, BLOCK_N)
        token_N = tl.minimum(place_N, hi - 1)
        if CHOSEN:
            token_N = tl.load(chosen_ptr + token_N)
        slot_N = tl.load(table_ptr + token_N // PAGE).to(tl.int64) * PAGE + token_N % PAGE
        row_N1 = (rows_ptr + slot_N * (RANK + ROPE))[:, None]
        if BLOCK_L == RANK:
            k_NL = tl.load(row_N1 + l_L[None, :])
        else:
            k_NL = tl.load(row_N1 + l_L[None, :], mask=l_L[None, :] < RANK, other=0.0)
        if BLOCK_R == ROPE:
            k_NR = tl.load(row_N1 + RANK + r_R[None, :])
        else:
            k_NR = tl.load(row_N1 + RANK + r_R[None, :], mask=r_R[None, :] < ROPE, other=0.0)
        score_MN = tl.dot(q_MR, tl.trans(k_NR), input_precision="ieee")
        score_MN = tl.dot(q_ML, tl.trans(k_NL), score_MN, input_precision="ieee") * (SCALE * LOG2E)
        score_MN = tl.where(place_N[None, :] < hi, score_MN, float("-inf"))
        newer_M = tl.maximum(top_M, tl.max(score_MN, 1))
        weight_MN = tl.exp2(score_MN - newer_M[:, None])
        decay_M = tl.exp2(top_M - newer_M)
        sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
        acc_ML = tl.dot(weight_MN.to(k_NL.dtype), k_NL, acc_ML * decay_M[:, None], input_precision="ieee")
        top_M = newer_M
    return acc_ML, sum_M, top_M


@triton.jit(
    do_not_specialize=["table_stride", "piece", "tokens"],
    do_not_specialize_on_alignment=["rows_of_ptr", "visible_ptr"],
)
def latent_kernel(
    q_ptr, rows_ptr, out_ptr, part_ptr, part_lse_ptr, tables_ptr, rows_of_ptr, visible_ptr, chosen_ptr,
    q_stride, out_stride, table_stride, piece, tokens,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    TOP: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One token, a tile of heads, one piece of what the token sees: `piece` places, or an equal share where that is
    0. TOP is how many tokens are chosen at most,
    0 where all are seen."""
    token = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    count = tl.load(visible_ptr + token)
    if TOP > 0:
        count = tl.minimum(count, TOP)
    if piece == 0:
        piece = tl.cdiv(tl.cdiv(count, tl.num_programs(1)), BLOCK_N) * BLOCK_N
    lo = tl.minimum(split * piece, count)
    hi = tl.minimum(lo + piece, count)
    head_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    l_L = tl.arange(0, BLOCK_L)
    r_R = tl.arange(0, BLOCK_R)
    mask_M = head_M < HEADS
    mask_ML = mask_M[:, None] & (l_L[None, :] < RANK)
    q_M1 = q_ptr + token * q_stride + head_M[:, None] * (RANK + ROPE)
    q_ML = tl.load(q_M1 + l_L[None, :], mask=mask_ML, other=0.0)
    q_MR = tl.load(q_M1 + RANK + r_R[None, :], mask=mask_M[:, None] & (r_R[None, :] < ROPE), other=0.0)
    row = tl.load(rows_of_ptr + token).to(tl.int64)
    acc_ML, sum_M, top_M = empty_state(BLOCK_M, BLOCK_L)
    acc_ML, sum_M, top_M = attend_latents(
        q_ML, q_MR, acc_ML, sum_M, top_M, rows_ptr, tables_ptr + row * table_stride, chosen_ptr + token * TOP, lo, hi,
        RANK, ROPE, BLOCK_L, BLOCK_R, BLOCK_N, PAGE, SCALE, TOP > 0,
    )  # fmt: skip
    if SPLIT:
        state_M = (split.to(tl.int64) * tokens + token) * HEADS + head_M
        store_state(part_ptr, part_lse_ptr, state_M, acc_ML, sum_M, top_M, mask_M, mask_ML, RANK)
    else:
        mean_ML, _ = mean_and_lse(acc_ML, sum_M, top_M)
        at_ML = head_M[:, None] * RANK + l_L[None, :]
        tl.store(out_ptr + token * out_stride + at_ML, mean_ML.to(out_ptr.dtype.element_ty), mask=mask_ML)


def launch_latents(
    q_TNC: torch.Tensor,
    rows: torch.Tensor,
    page_tables_BP: torch.Tensor,
    row_of_T: torch.Tensor,
    visible_T: torch.Tensor,
    chosen_TK: torch.Tensor | None,
    out_TNL: torch.Tensor,
    shape: LatentShape,
    pieces: int,
    piece: int,
    partial: States | None,
    config: TileConfig,
) -> None:
    """What a token sees is cut into `pieces`, of `piece` places or (0) of equal length; where there are several
    they are states of `partial` [pieces, T], merged in order."""
    tokens, width = q_TNC.shape[0], shape.rank + shape.rope_dim
    assert q_TNC.stride()[1:] == (width, 1) and out_TNL.stride()[1:] == (shape.rank, 1), "heads must be contiguous"
    assert rows.is_contiguous() and page_tables_BP.stride(1) == 1
    assert row_of_T.dtype == visible_T.dtype == torch.int32
    if pieces > 1:
        assert partial is not None and partial.lse_IN.shape[0] >= pieces, f"room for {pieces} states of a token"
        assert partial.lse_IN.shape[1] == tokens, "a state for each token"
    latent_kernel[(ceil_div(shape.num_heads, config.block_m), pieces, tokens)](
        q_TNC,
        rows,
        out_TNL,
        None if partial is None else partial.mean_INH,
        None if partial is None else partial.lse_IN,
        page_tables_BP,
        row_of_T,
        visible_T,
        visible_T if chosen_TK is None else chosen_TK,
        q_TNC.stride(0),
        out_TNL.stride(0),
        page_tables_BP.stride(0),
        piece,
        tokens,
        HEADS=shape.num_heads,
        RANK=shape.rank,
        ROPE=shape.rope_dim,
        PAGE=shape.page_size,
        SCALE=shape.scale,
        TOP=0 if chosen_TK is None else chosen_TK.shape[1],
        SPLIT=pieces > 1,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_L=max(16, power_of_two(shape.rank)),
        BLOCK_R=max(16, power_of_two(shape.rope_dim)),
        **config.options,
    )
    if pieces > 1 and partial is not None:
        merge_states(partial, pieces, out_TNL)


def pieces_of(most: int, tokens: int, head_tiles: int, processors: int, block_n: int) -> int:
    """How many programs read what a token sees, at most `most` places: enough for all processors, each with a few
    tiles."""
    return max(1, min(processors // max(1, tokens * head_tiles), ceil_div(most, 4 * block_n)))
