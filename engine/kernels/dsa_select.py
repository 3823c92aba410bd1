"""The positions of each token's K best index scores: of equal scores the lowest positions, in order.

Owns the kernels and their launcher. Four rounds find the K-th best score, eight bits at a time: a round counts
how many scores that agree with what is known so far fall into each of 256 buckets, by pieces of the context, and
the next adds the pieces up. The same counts tell each piece how many positions those before it write, so that
all pieces write at once and nothing depends on who comes first. -0.0 counts as 0.0. The reference is
`engine.attention.mla.choose_tokens`.

Shapes: T tokens, S the longest context, K tokens chosen, P pieces, N scores of a tile.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import ceil_div, power_of_two

ROUNDS = 4
BUCKETS = 256
MAX_PIECES = 32
LOWEST = tl.constexpr(-2147483648)


@triton.jit
def _keys(scores_ptr, place_N, hi):
    """Scores as integers in the same order, with the sign bit turned: eight bits at a time they compare as
    unsigned numbers."""
    score_N = tl.load(scores_ptr + place_N, mask=place_N < hi, other=0.0)
    bits_N = tl.where(score_N == 0.0, 0.0, score_N).to(tl.int32, bitcast=True)
    return bits_N ^ ((bits_N >> 31) & 2147483647) ^ LOWEST


@triton.jit
def _piece(part, pieces, seen, BLOCK_N: tl.constexpr):
    """(first, end) of a part of what is seen: whole tiles, but for the last."""
    piece = tl.cdiv(tl.cdiv(seen, pieces), BLOCK_N) * BLOCK_N
    return part * piece, tl.minimum((part + 1) * piece, seen)


@triton.jit
def _decide(counts_ptr, pieces, before, need, rounds, BLOCK_P: tl.constexpr):
    """After some rounds: (prefix of the K-th best key, how many with it are still to be taken, how many of the
    pieces before `before` lie above it, how many of those pieces' agree with it)."""
    p_P1 = tl.arange(0, BLOCK_P)[:, None]
    b_B = tl.arange(0, 256)
    prefix = need * 0
    above = need * 0
    equal = need * 0
    for number in range(rounds):
        count_PB = tl.load(counts_ptr + (number * pieces + p_P1) * 256 + b_B[None, :], mask=p_P1 < pieces, other=0)
        count_B = tl.sum(count_PB, 0)
        # Counts from each bucket up fall: the K-th best is in the last bucket from which enough lie up.
        up_B = tl.sum(count_B, 0) - tl.cumsum(count_B, 0) + count_B
        bucket = tl.sum((up_B >= need).to(tl.int32), 0) - 1
        need -= tl.sum(tl.where(b_B > bucket, count_B, 0), 0)
        earlier_B = tl.sum(tl.where(p_P1 < before, count_PB, 0), 0)
        above += tl.sum(tl.where(b_B > bucket, earlier_B, 0), 0)
        equal = tl.sum(tl.where(b_B == bucket, earlier_B, 0), 0)
        prefix = prefix * 256 + bucket
    return prefix, need, above, equal


@triton.jit(do_not_specialize=["pieces", "rounds", "top"], do_not_specialize_on_alignment=["visible_ptr"])
def _count_kernel(
    scores_ptr, visible_ptr, counts_ptr, scores_stride, pieces, rounds, top,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The counts of one more round, after `rounds`."""
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    seen = tl.load(visible_ptr + token)
    if seen > top:
        row_ptr = counts_ptr + token * (4 * pieces * 256)
        prefix, _need, _above, _equal = _decide(row_ptr, pieces, 0, top, rounds, BLOCK_P)
        lo, hi = _piece(part, pieces, seen, BLOCK_N)
        known = (1 << (8 * rounds)) - 1
        count_B = tl.zeros([256], tl.int32)
        for first in range(lo, hi, BLOCK_N):
            place_N = first + tl.arange(0, BLOCK_N)
            upper_N = _keys(scores_ptr + token * scores_stride, place_N, hi) >> (24 - 8 * rounds)
            agrees_N = (place_N < hi) & (((upper_N >> 8) & known) == prefix)
            count_B += tl.histogram(upper_N & 255, 256, mask=agrees_N)
        tl.store(row_ptr + (rounds * pieces + part) * 256 + tl.arange(0, 256), count_B)


@triton.jit(do_not_specialize=["pieces", "top"], do_not_specialize_on_alignment=["visible_ptr"])
def _take_kernel(
    scores_ptr, visible_ptr, counts_ptr, chosen_ptr, scores_stride, pieces, top,
    BLOCK_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    seen = tl.load(visible_ptr + token)
    if seen <= top:
        if part == 0:
            k_K = tl.arange(0, BLOCK_K)
            tl.store(chosen_ptr + token * top + k_K, tl.where(k_K < seen, k_K, -1), mask=k_K < top)
    else:
        last, need, above, equal = _decide(counts_ptr + token * (4 * pieces * 256), pieces, part, top, 4, BLOCK_P)
        lo, hi = _piece(part, pieces, seen, BLOCK_N)
        written = above + tl.minimum(equal, need)
        for first in range(lo, hi, BLOCK_N):
            place_N = first + tl.arange(0, BLOCK_N)
            key_N = _keys(scores_ptr + token * scores_stride, place_N, hi)
            valid_N = place_N < hi
            same_N = valid_N & (key_N == last)
            rank_N = equal + tl.cumsum(same_N.to(tl.int32), 0)
            taken_N = (valid_N & ((key_N ^ LOWEST) > (last ^ LOWEST))) | (same_N & (rank_N <= need))
            at_N = written + tl.cumsum(taken_N.to(tl.int32), 0) - 1
            tl.store(chosen_ptr + token * top + at_N, place_N, mask=taken_N)
            written += tl.sum(taken_N.to(tl.int32), 0)
            equal += tl.sum(same_N.to(tl.int32), 0)


def select_pieces(tokens: int, most: int, processors: int, block_n: int = 1024) -> int:
    """How many programs read a token's scores: all processors busy, each with a few tiles."""
    wanted = ceil_div(2 * processors, max(1, tokens))
    return max(1, min(wanted, ceil_div(most, 2 * block_n), MAX_PIECES))


def counts_shape(tokens: int, pieces: int) -> tuple[int, int, int, int]:
    """Of the workspace, int32."""
    return tokens, ROUNDS, pieces, BUCKETS


def dsa_select(
    scores_TS: torch.Tensor,
    visible_T: torch.Tensor,
    chosen_TK: torch.Tensor,
    counts: torch.Tensor,
    block_n: int = 1024,
    num_warps: int = 4,
) -> None:
    """Write chosen_TK, int32, -1 behind the last: of the first `visible_T` scores. `counts`
    (`counts_shape`) says by its shape how many pieces there are; what is in it does not matter."""
    tokens, top = chosen_TK.shape
    pieces = counts.shape[2]
    assert scores_TS.dtype == torch.float32 and scores_TS.stride(1) == 1 and chosen_TK.is_contiguous()
    assert chosen_TK.dtype == visible_T.dtype == counts.dtype == torch.int32 and counts.is_contiguous()
    assert tuple(counts.shape) == counts_shape(tokens, pieces) and pieces <= MAX_PIECES
    block_p = power_of_two(pieces)
    for number in range(ROUNDS):
        _count_kernel[(pieces, tokens)](
            scores_TS,
            visible_T,
            counts,
            scores_TS.stride(0),
            pieces,
            number,
            top,
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            num_warps=num_warps,
        )
    _take_kernel[(pieces, tokens)](
        scores_TS,
        visible_T,
        counts,
        chosen_TK,
        scores_TS.stride(0),
        pieces,
        top,
        BLOCK_K=power_of_two(top),
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
