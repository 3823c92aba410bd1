"""What the token before adds to a draft's logits: a lookup and a product in one launch.

Owns logits += w2 · w1[previous], the vanilla Markov head (`engine.dspark.heads`). Sums are fp32 in one fixed
order, added to the logit before the one rounding. Logits of blocks of different lengths are fetched from where
they are packed. Ignores other heads, whose codes are no rows of a table.

A program keeps its rows of `w2` and goes through the batch, so that the weights are read once; they are asked
for before the launch ahead, which chooses the tokens, has finished.

Shapes: B rows, T packed rows of logits, V vocabulary, R rank.
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


@triton.jit(do_not_specialize=["rows"])
def markov_bias_kernel(
    logits_ptr, previous_ptr, w1_ptr, w2_ptr, at_ptr, out_ptr, rows, V, logits_stride, out_stride,
    R: tl.constexpr, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANK)
    w2_NR = tl.load(
        w2_ptr + n.to(tl.int64)[:, None] * R + r[None, :], mask=(n < V)[:, None] & (r < R)[None, :], other=0.0
    )
    await_inputs(EARLY)
    release_next(EARLY)
    last = rows
    if PACKED:
        # Rows that draft so far come first where their order is that of their blocks' lengths.
        b_B = tl.arange(0, ROWS)
        at_B = tl.load(at_ptr + b_B, mask=b_B < rows, other=-1)
        last = tl.max(tl.where(at_B >= 0, b_B + 1, 0), 0)
    for first in range(0, last, BM):
        m = first + tl.arange(0, BM)
        inside_M, from_M = m < last, m
        if PACKED:
            from_M = tl.load(at_ptr + m, mask=inside_M, other=-1)
            inside_M = from_M >= 0
        previous_M = tl.load(previous_ptr + m, mask=inside_M, other=0)
        # An idle row stands at no token.
        code_ptr = w1_ptr + tl.maximum(previous_M, 0)[:, None] * R + r[None, :]
        codes_MR = tl.load(code_ptr, mask=inside_M[:, None] & (r < R)[None, :], other=0.0)
        bias_NM = tl.dot(w2_NR, tl.trans(codes_MR), input_precision="ieee")
        from_MN = from_M.to(tl.int64)[:, None] * logits_stride + n[None, :]
        inside_MN = inside_M[:, None] & (n < V)[None, :]
        logits_MN = tl.load(logits_ptr + from_MN, mask=inside_MN, other=0.0).to(tl.float32) + tl.trans(bias_NM)
        to_MN = m.to(tl.int64)[:, None] * out_stride + n[None, :]
        tl.store(out_ptr + to_MN, logits_MN.to(out_ptr.dtype.element_ty), mask=inside_MN)


def markov_bias(
    logits_BV: torch.Tensor,
    previous_B: torch.Tensor,
    w1_VR: torch.Tensor,
    w2_VR: torch.Tensor,
    at_B: torch.Tensor | None = None,
    out_BV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add in place; `previous_B` int64, below 0 for rows that do not matter. With `at_B` (int32) row b's logits are
    row at_B[b] of those given, and the sum goes to `out_BV`; rows below 0 there are left as they are."""
    assert (at_B is None) == (out_BV is None), "packed logits need an output"
    out_BV = logits_BV if out_BV is None else out_BV
    rows, vocab = out_BV.shape
    rank = w1_VR.shape[1]
    assert logits_BV.stride(1) == 1 and w1_VR.is_contiguous() and w2_VR.is_contiguous(), "rows must be contiguous"
    assert out_BV.stride(1) == 1 and out_BV.dtype == logits_BV.dtype, "sums are like logits"
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
            previous_B if at_B is None else at_B,
            out_BV,
            rows,
            vocab,
            logits_BV.stride(0),
            out_BV.stride(0),
            R=rank,
            RANK=padded,
            BM=max(16, min(MAX_CODES, power_of_two(rows))),
            BN=block,
            ROWS=power_of_two(rows),
            PACKED=at_B is not None,
            EARLY=early,
            num_warps=8 if many else 4,
            **options(early),
        )
    return out_BV
