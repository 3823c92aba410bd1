"""What the token before adds to a draft's logits: a lookup and a product in one launch.

Owns logits += w2 · w1[previous], the vanilla Markov head (`engine.dspark.heads`). Sums are fp32 in one fixed
order, added to the logit before the one rounding. Ignores other heads, whose codes are no rows of a table.

A program keeps its rows of `w2` and goes through the batch, so that the weights are read once; they are asked
for before the launch ahead, which chooses the tokens, has finished.

Shapes: B rows, V vocabulary, R rank.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next

MAX_CODES = 64
"""Rows of the batch that are computed together."""


def markov_bias_reference(
    logits_BV: torch.Tensor, previous_B: torch.Tensor, w1_VR: torch.Tensor, w2_VR: torch.Tensor
) -> torch.Tensor:
    """The new logits, summed in fp32."""
    codes_BR = w1_VR[previous_B.clamp(min=0).long()]
    return (logits_BV.float() + codes_BR.float() @ w2_VR.float().t()).to(logits_BV.dtype)


@triton.jit
def markov_bias_kernel(
    logits_ptr, previous_ptr, w1_ptr, w2_ptr, rows, V, logits_stride,
    R: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    w2_NR = tl.load(
        w2_ptr + n.to(tl.int64)[:, None] * R + r[None, :], mask=(n < V)[:, None] & (r < R)[None, :], other=0.0
    )
    await_inputs(EARLY)
    release_next(EARLY)
    for first in range(0, rows, BM):
        m = first + tl.arange(0, BM)
        previous_M = tl.load(previous_ptr + m, mask=m < rows, other=0)
        # An idle row stands at no token.
        code_ptr = w1_ptr + tl.maximum(previous_M, 0)[:, None] * R + r[None, :]
        codes_MR = tl.load(code_ptr, mask=(m < rows)[:, None] & (r < R)[None, :], other=0.0)
        bias_NM = tl.dot(w2_NR, tl.trans(codes_MR), input_precision="ieee")
        at_MN = m.to(tl.int64)[:, None] * logits_stride + n[None, :]
        inside_MN = (m < rows)[:, None] & (n < V)[None, :]
        logits_MN = tl.load(logits_ptr + at_MN, mask=inside_MN, other=0.0).to(tl.float32) + tl.trans(bias_NM)
        tl.store(logits_ptr + at_MN, logits_MN.to(logits_ptr.dtype.element_ty), mask=inside_MN)


def markov_bias(
    logits_BV: torch.Tensor, previous_B: torch.Tensor, w1_VR: torch.Tensor, w2_VR: torch.Tensor
) -> torch.Tensor:
    """Add in place; `previous_B` int64, below 0 for rows that do not matter."""
    rows, vocab = logits_BV.shape
    rank = w1_VR.shape[1]
    assert logits_BV.stride(1) == 1 and w1_VR.is_contiguous() and w2_VR.is_contiguous(), "rows must be contiguous"
    assert previous_B.dtype == torch.int64 and previous_B.is_contiguous(), "tokens are contiguous int64"
    padded = max(16, power_of_two(rank))
    early = is_early(logits_BV)
    # With many rows of codes to go through, more of the weights at once: every program reads all codes.
    many = rows > 32
    block = max(16, min(128 if many else 64, (32768 if many else 16384) // padded))
    if rows:
        markov_bias_kernel[(triton.cdiv(vocab, block),)](
            logits_BV,
            previous_B,
            w1_VR,
            w2_VR,
            rows,
            vocab,
            logits_BV.stride(0),
            R=rank,
            RANK=padded,
            BM=max(16, min(MAX_CODES, power_of_two(rows))),
            BN=block,
            EARLY=early,
            num_warps=8 if many else 4,
            **options(early),
        )
    return logits_BV
