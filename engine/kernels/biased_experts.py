"""Products of chosen experts whose weights lie inputs first, with a bias: gpt-oss's.

Owns the product, used twice a block: rows are gathered by token on the way in, or scattered by pair on the way
out. Rows come sorted by expert (`engine.kernels.expert_rows`), an expert that nobody chose costs a program that
leaves at once, and every row is the same sum in the same order whoever else chose its expert. Nothing is read on
the host, so steps may be captured.

Shapes: T tokens, K experts a token, P = T * K pairs, X experts, D inputs, N outputs, M input rows.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl

from engine.kernels.expert_rows import FEW_PAIRS, ExpertRows


def biased_experts_reference(
    x_MD: torch.Tensor, weight_XDN: torch.Tensor, bias_XN: torch.Tensor, rows: ExpertRows, gather: bool
) -> torch.Tensor:
    """As `biased_experts`."""
    starts = rows.starts_X1.tolist()
    x_PD = x_MD[rows.order_P // rows.per_token] if gather else x_MD
    spans = enumerate(pairwise(starts))
    out_PN = torch.cat([x_PD[start:end] @ weight_XDN[x] + bias_XN[x] for x, (start, end) in spans])
    return out_PN if gather else torch.empty_like(out_PN).index_copy_(0, rows.order_P, out_PN)


@triton.jit
def biased_experts_kernel(
    x_ptr, weight_ptr, bias_ptr, order_ptr, starts_ptr, out_ptr,
    K: tl.constexpr, D: tl.constexpr, N: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    column, d = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    in_n = column < N
    bias = tl.load(bias_ptr + expert * N + column, mask=in_n, other=0.0).to(tl.float32)
    for base in range(start, end, BLOCK_M):
        place = base + tl.arange(0, BLOCK_M)
        inside = place < end
        pair = tl.load(order_ptr + place, mask=inside, other=0).to(tl.int64)
        row = pair // K if GATHER else place.to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, D, BLOCK_D):
            at = first + d
            x = tl.load(x_ptr + row[:, None] * D + at[None, :], mask=inside[:, None] & (at < D)[None, :], other=0.0)
            line = weight_ptr + (expert * D + at)[:, None] * N + column[None, :]
            weight = tl.load(line, mask=(at < D)[:, None] & in_n[None, :], other=0.0)
            total = tl.dot(x, weight, total, input_precision="ieee")
        to = place.to(tl.int64) if GATHER else pair
        at_out = out_ptr + to[:, None] * N + column[None, :]
        tl.store(at_out, (total + bias[None, :]).to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_n[None, :])


def biased_experts(
    x_MD: torch.Tensor, weight_XDN: torch.Tensor, bias_XN: torch.Tensor, rows: ExpertRows, gather: bool
) -> torch.Tensor:
    """out_PN. With `gather` x has a row for each token and results are in the order of `rows`; without, x is in
    that order and results are by pair."""
    count, inputs, outputs = weight_XDN.shape
    pairs = rows.order_P.shape[0]
    assert x_MD.is_contiguous() and weight_XDN.is_contiguous() and bias_XN.is_contiguous(), "rows lie side by side"
    out_PN = x_MD.new_empty(pairs, outputs)
    few = pairs <= FEW_PAIRS * count
    if pairs:
        m, n, k, warps, stages = (16, 64, 128, 4, 4) if few else (64, 128, 64, 8, 3)
        biased_experts_kernel[(triton.cdiv(outputs, n), count)](
            x_MD, weight_XDN, bias_XN, rows.order_P, rows.starts_X1, out_PN,
            K=rows.per_token, D=inputs, N=outputs, GATHER=gather,
            BLOCK_M=m, BLOCK_N=n, BLOCK_D=k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out_PN
