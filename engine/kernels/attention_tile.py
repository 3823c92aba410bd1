"""The inner loop that all attention kernels share, and its definition in plain torch.

Owns a tile's rows, scores, softmax and the merging of softmax states over disjoint keys. Ignores which
keys a program reads and where results go.

Keys and values come from one layer of the pool, [slots, 2K, H] (see `engine.memory.kv_pool`),
through a page table. A softmax state is (values weighted by exp(score - top), sum of those weights,
top), with scores in units of log 2; a stored state is (weighted mean, log2 of the sum of exp2(score)).

Shapes: M query rows of a tile, N tokens of a tile, D the head size padded to a power of two,
Q queries, C context tokens, H head size, K key/value heads.
"""

# What kernels return is invisible to the type checker.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (value - 1).bit_length()


def attend_reference(
    q_QNH: torch.Tensor,
    kv_C2KH: torch.Tensor,
    positions_Q: torch.Tensor,
    positions_C: torch.Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sink_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_QNH, lse_QN) of queries over keys not after them, in double precision; lse in base 2.

    A query that sees nothing gets zeros and -inf.
    """
    kv_heads = kv_C2KH.shape[1] // 2
    group = q_QNH.shape[1] // kv_heads
    k_NHC = kv_C2KH[:, :kv_heads].double().repeat_interleave(group, dim=1).permute(1, 2, 0)
    v_NCH = kv_C2KH[:, kv_heads:].double().repeat_interleave(group, dim=1).transpose(0, 1)
    scores_NQC = q_QNH.double().transpose(0, 1) @ k_NHC * q_QNH.shape[-1] ** -0.5
    if softcap is not None:
        scores_NQC = softcap * torch.tanh(scores_NQC / softcap)
    distance_QC = positions_Q[:, None] - positions_C[None, :]
    visible_QC = distance_QC >= 0
    if window is not None:
        visible_QC &= distance_QC < window
    scores_NQC = scores_NQC.masked_fill(~visible_QC, float("-inf"))
    if sink_N is not None:
        sinks_NQ1 = sink_N.double()[:, None, None].expand(-1, q_QNH.shape[0], 1)
        scores_NQC = torch.cat((scores_NQC, sinks_NQ1), dim=-1)
        v_NCH = F.pad(v_NCH, (0, 0, 0, 1))
    lse_NQ = torch.logsumexp(scores_NQC, dim=-1)
    weights_NQC = torch.exp(scores_NQC - lse_NQ[..., None].nan_to_num(neginf=0.0))
    out_NQH = weights_NQC.nan_to_num() @ v_NCH
    return out_NQH.transpose(0, 1), (lse_NQ * LOG2E.value).transpose(0, 1)


@triton.jit
def tile_rows(
    kv_head,
    queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(query_M, head_M, mask_M, mask_MD) of a tile of queries with the heads of one key/value head."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    m_M = tl.arange(0, BLOCK_M)
    d_D = tl.arange(0, BLOCK_D)
    head_M = kv_head * GROUP + m_M % GROUP
    mask_M = m_M < queries * GROUP
    mask_MD = mask_M[:, None] & (d_D[None, :] < HEAD_DIM)
    return m_M // GROUP, head_M, mask_M, mask_MD


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The softmax state of no keys."""
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    return acc_MD, tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)


@triton.jit
def attend_tokens(
    q_MD,
    acc_MD,
    sum_M,
    top_M,
    kv_ptr,
    table_ptr,
    lo,
    hi,
    position_M,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Add tokens [lo, hi) to a softmax state.

    `kv_ptr` is the head's first key. WHOLE promises that hi - lo is a multiple of BLOCK_N. Without
    CAUSAL and WINDOW every query sees every token. Places past `hi` read token hi - 1 again, so
    that no load needs a mask and storage that nobody wrote is never touched.
    """
    d_D = tl.arange(0, BLOCK_D)
    for first in range(lo, hi, BLOCK_N):
        token_N = first + tl.arange(0, BLOCK_N)
        if WHOLE:
            read_N = token_N
        else:
            read_N = tl.minimum(token_N, hi - 1)
        page_N = tl.load(table_ptr + read_N // PAGE)
        slot_N = page_N.to(tl.int64) * PAGE + read_N % PAGE
        at_ND = slot_N[:, None] * (2 * KV_HEADS * HEAD_DIM) + d_D[None, :]
        if BLOCK_D == HEAD_DIM:
            k_ND = tl.load(kv_ptr + at_ND)
            v_ND = tl.load(kv_ptr + KV_HEADS * HEAD_DIM + at_ND)
        else:
            k_ND = tl.load(kv_ptr + at_ND, mask=d_D[None, :] < HEAD_DIM, other=0.0)
            v_ND = tl.load(kv_ptr + KV_HEADS * HEAD_DIM + at_ND, mask=d_D[None, :] < HEAD_DIM, other=0.0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if SOFTCAP > 0:
            # tanh(x) = 1 - 2 / (1 + exp(2x)), which saturates rightly where exp overflows.
            grown_MN = tl.exp2(score_MN * (2 * SCALE * LOG2E / SOFTCAP))
            score_MN = SOFTCAP - 2 * SOFTCAP / (1 + grown_MN)
            scale: tl.constexpr = LOG2E
        else:
            scale: tl.constexpr = SCALE * LOG2E
        if not WHOLE:
            score_MN = tl.where(token_N[None, :] < hi, score_MN, float("-inf"))
        if CAUSAL or WINDOW > 0:
            distance_MN = position_M[:, None] - token_N[None, :]
            if CAUSAL:
                score_MN = tl.where(distance_MN >= 0, score_MN, float("-inf"))
            if WINDOW > 0:
                score_MN = tl.where(distance_MN < WINDOW, score_MN, float("-inf"))
        newer_M = tl.maximum(top_M, tl.max(score_MN, 1) * scale)
        if CAUSAL or WINDOW > 0:
            base_M = tl.where(newer_M == float("-inf"), 0.0, newer_M)
        else:
            base_M = newer_M
        weight_MN = tl.exp2(score_MN * scale - base_M[:, None])
        decay_M = tl.exp2(top_M - base_M)
        sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
        acc_MD = acc_MD * decay_M[:, None]
        acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
        top_M = newer_M
    return acc_MD, sum_M, top_M


@triton.jit
def merge_stored(acc_MD, sum_M, top_M, mean_MD, lse_M):
    """Add a stored state to a running one. Either may be empty (-inf)."""
    newer_M = tl.maximum(top_M, lse_M)
    base_M = tl.where(newer_M == float("-inf"), 0.0, newer_M)
    decay_M = tl.exp2(top_M - base_M)
    weight_M = tl.exp2(lse_M - base_M)
    acc_MD = acc_MD * decay_M[:, None] + mean_MD * weight_M[:, None]
    return acc_MD, sum_M * decay_M + weight_M, newer_M


@triton.jit
def merge_all(
    acc_MD, sum_M, top_M, mean_ptr, lse_ptr, first_M, count, stride, mask_M, mask_MD,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add `count` stored states in order; state i of a query is number first_M + i * stride.

    Four at a time, since a load takes far longer than the merge that waits for it. What stands for
    the mean of a state that saw nothing is ignored.
    """
    d_1D = tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, count, 4):
        at_M = first_M.to(tl.int64) + start * stride
        lse0_M = tl.load(lse_ptr + at_M, mask=mask_M, other=float("-inf"), cache_modifier=".cg")
        lse1_M = tl.load(
            lse_ptr + at_M + stride, mask=mask_M & (start + 1 < count), other=float("-inf"), cache_modifier=".cg"
        )
        lse2_M = tl.load(
            lse_ptr + at_M + 2 * stride, mask=mask_M & (start + 2 < count), other=float("-inf"), cache_modifier=".cg"
        )
        lse3_M = tl.load(
            lse_ptr + at_M + 3 * stride, mask=mask_M & (start + 3 < count), other=float("-inf"), cache_modifier=".cg"
        )
        mean_ptr_MD = mean_ptr + at_M[:, None] * HEAD_DIM + d_1D
        step = stride * HEAD_DIM
        mean0_MD = tl.load(mean_ptr_MD, mask=mask_MD, other=0.0, cache_modifier=".cg")
        mean1_MD = tl.load(mean_ptr_MD + step, mask=mask_MD & (start + 1 < count), other=0.0, cache_modifier=".cg")
        mean2_MD = tl.load(mean_ptr_MD + 2 * step, mask=mask_MD & (start + 2 < count), other=0.0, cache_modifier=".cg")
        mean3_MD = tl.load(mean_ptr_MD + 3 * step, mask=mask_MD & (start + 3 < count), other=0.0, cache_modifier=".cg")
        mean0_MD = tl.where((lse0_M > float("-inf"))[:, None], mean0_MD, 0.0)
        acc_MD, sum_M, top_M = merge_stored(acc_MD, sum_M, top_M, mean0_MD, lse0_M)
        mean1_MD = tl.where((lse1_M > float("-inf"))[:, None], mean1_MD, 0.0)
        acc_MD, sum_M, top_M = merge_stored(acc_MD, sum_M, top_M, mean1_MD, lse1_M)
        mean2_MD = tl.where((lse2_M > float("-inf"))[:, None], mean2_MD, 0.0)
        acc_MD, sum_M, top_M = merge_stored(acc_MD, sum_M, top_M, mean2_MD, lse2_M)
        mean3_MD = tl.where((lse3_M > float("-inf"))[:, None], mean3_MD, 0.0)
        acc_MD, sum_M, top_M = merge_stored(acc_MD, sum_M, top_M, mean3_MD, lse3_M)
    return acc_MD, sum_M, top_M


@triton.jit
def merge_each(
    acc_MD, sum_M, top_M, mean_ptr, lse_ptr, first_M, count, stride, mask_M, mask_MD,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`merge_all` one after another: for few states of many queries, whose loads would cost registers."""
    d_1D = tl.arange(0, BLOCK_D)[None, :]
    for state in range(0, count):
        at_M = first_M.to(tl.int64) + state * stride
        lse_M = tl.load(lse_ptr + at_M, mask=mask_M, other=float("-inf"), cache_modifier=".cg")
        mean_MD = tl.load(mean_ptr + at_M[:, None] * HEAD_DIM + d_1D, mask=mask_MD, other=0.0, cache_modifier=".cg")
        mean_MD = tl.where((lse_M > float("-inf"))[:, None], mean_MD, 0.0)
        acc_MD, sum_M, top_M = merge_stored(acc_MD, sum_M, top_M, mean_MD, lse_M)
    return acc_MD, sum_M, top_M


@triton.jit
def add_sink(acc_MD, sum_M, top_M, sink_M):
    """Add one logit without a value to a non-empty state."""
    newer_M = tl.maximum(top_M, sink_M * LOG2E)
    base_M = tl.where(newer_M == float("-inf"), 0.0, newer_M)
    decay_M = tl.exp2(top_M - base_M)
    return acc_MD * decay_M[:, None], sum_M * decay_M + tl.exp2(sink_M * LOG2E - base_M), newer_M


@triton.jit
def mean_and_lse(acc_MD, sum_M, top_M):
    """The stored form of a state: zeros and -inf for an empty one."""
    safe_M = tl.where(sum_M > 0, sum_M, 1.0)
    lse_M = tl.where(sum_M > 0, top_M + tl.log2(safe_M), float("-inf"))
    return acc_MD / safe_M[:, None], lse_M


@triton.jit
def store_state(mean_ptr, lse_ptr, state_M, acc_MD, sum_M, top_M, mask_M, mask_MD, HEAD_DIM: tl.constexpr):
    """Store each row's state at `state_M`, the index counted over all states and heads."""
    mean_MD, lse_M = mean_and_lse(acc_MD, sum_M, top_M)
    # Addresses are computed here: those of the queries, kept for it, would cost registers in the loop.
    d_D = tl.arange(0, acc_MD.shape[1])
    tl.store(mean_ptr + state_M[:, None] * HEAD_DIM + d_D[None, :], mean_MD, mask=mask_MD)
    tl.store(lse_ptr + state_M, lse_M, mask=mask_M)
