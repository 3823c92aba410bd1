"""Products of chosen experts with the rows that chose them: gate and up with silu between, and down.

Owns both products. Rows come sorted by expert, so that a program reads its part of an expert's weight once for
all of them; an expert that nobody chose costs a program that leaves at once. Every row is the same sum in
the same order, whoever else chose its expert. Nothing is read on the host, so steps may be captured.

Shapes: T tokens, K experts a token, P = T * K pairs, X experts, D hidden, I an expert's width.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kernels.swiglu import silu

FEW_PAIRS = 16
"""Pairs an expert up to which tiles are those of decode steps."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Pair p is token p // K's. `order_P` lists pairs by expert, those of expert x at [starts_X1[x],
    starts_X1[x + 1])."""

    order_P: torch.Tensor
    starts_X1: torch.Tensor
    per_token: int

    @staticmethod
    def of(chosen_TK: torch.Tensor, count: int) -> ExpertRows:
        sorted_P, order_P = chosen_TK.reshape(-1).sort(stable=True)
        bounds_X1 = torch.arange(count + 1, device=chosen_TK.device, dtype=sorted_P.dtype)
        return ExpertRows(order_P, torch.searchsorted(sorted_P, bounds_X1), chosen_TK.shape[1])


def expert_gate_up_reference(x_TD: torch.Tensor, gate_up_RD: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """As `expert_gate_up`."""
    starts = rows.starts_X1.tolist()
    weights = gate_up_RD.chunk(len(starts) - 1)
    parts = []
    for weight, start, end in zip(weights, starts, starts[1:], strict=False):
        gate, up = F.linear(x_TD[rows.order_P[start:end] // rows.per_token], weight).chunk(2, dim=1)
        parts.append(F.silu(gate) * up)
    return torch.cat(parts)


def expert_down_reference(inner_PI: torch.Tensor, down_RI: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """As `expert_down`."""
    starts = rows.starts_X1.tolist()
    weights = down_RI.chunk(len(starts) - 1)
    spans = zip(weights, starts, starts[1:], strict=False)
    sorted_PD = torch.cat([F.linear(inner_PI[start:end], weight) for weight, start, end in spans])
    return torch.empty_like(sorted_PD).index_copy_(0, rows.order_P, sorted_PD)


@triton.jit
def expert_gate_up_kernel(
    x_ptr, weight_ptr, order_ptr, starts_ptr, out_ptr,
    K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    in_n, d = column < WIDTH, tl.arange(0, BLOCK_D)
    gate_line = weight_ptr + (expert * 2 * WIDTH + column)[None, :] * D
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    for base in range(start, end, BLOCK_M):
        place = base + tl.arange(0, BLOCK_M)
        inside = place < end
        token = tl.load(order_ptr + place, mask=inside, other=0) // K
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, D, BLOCK_D):
            at = first + d
            x = tl.load(x_ptr + token[:, None] * D + at[None, :], mask=inside[:, None] & (at < D)[None, :], other=0.0)
            wanted = (at < D)[:, None] & in_n[None, :]
            gate_w = tl.load(gate_line + at[:, None], mask=wanted, other=0.0)
            up_w = tl.load(gate_line + WIDTH * D + at[:, None], mask=wanted, other=0.0)
            gate = tl.dot(x, gate_w, gate, input_precision="ieee")
            up = tl.dot(x, up_w, up, input_precision="ieee")
        gated = silu(gate.to(DTYPE).to(tl.float32), DTYPE) * up.to(DTYPE).to(tl.float32)
        at_out = out_ptr + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(at_out, gated.to(DTYPE), mask=inside[:, None] & in_n[None, :])


@triton.jit
def expert_down_kernel(
    inner_ptr, weight_ptr, order_ptr, starts_ptr, out_ptr,
    WIDTH: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    in_n, i = column < D, tl.arange(0, BLOCK_I)
    line = weight_ptr + (expert * D + column)[None, :] * WIDTH
    for base in range(start, end, BLOCK_M):
        place = base + tl.arange(0, BLOCK_M)
        inside = place < end
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, WIDTH, BLOCK_I):
            at = first + i
            rows = inner_ptr + place.to(tl.int64)[:, None] * WIDTH + at[None, :]
            inner = tl.load(rows, mask=inside[:, None] & (at < WIDTH)[None, :], other=0.0)
            weight = tl.load(line + at[:, None], mask=(at < WIDTH)[:, None] & in_n[None, :], other=0.0)
            total = tl.dot(inner, weight, total, input_precision="ieee")
        pair = tl.load(order_ptr + place, mask=inside, other=0)
        at_out = out_ptr + pair[:, None] * D + column[None, :]
        tl.store(at_out, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_n[None, :])


def expert_gate_up(
    x_TD: torch.Tensor, gate_up_RD: torch.Tensor, rows: ExpertRows, out: torch.Tensor | None = None
) -> torch.Tensor:
    """inner_PI in the order of `rows`: silu(gate) * up of each pair's token, where an expert has 2 I rows of the
    weight, gates first."""
    count = rows.starts_X1.shape[0] - 1
    width, hidden, pairs = gate_up_RD.shape[0] // (2 * count), x_TD.shape[1], rows.order_P.shape[0]
    assert x_TD.is_contiguous() and gate_up_RD.is_contiguous(), "rows lie side by side"
    out = x_TD.new_empty(pairs, width) if out is None else out
    m, n, k, warps, stages = _tile(pairs, count)
    if pairs:
        expert_gate_up_kernel[(triton.cdiv(width, n), count)](
            x_TD, gate_up_RD, rows.order_P, rows.starts_X1, out, K=rows.per_token, D=hidden, WIDTH=width,
            BLOCK_M=m, BLOCK_N=n, BLOCK_D=k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def expert_down(
    inner_PI: torch.Tensor, down_RI: torch.Tensor, rows: ExpertRows, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out_PD by pair, where an expert has D rows of the weight."""
    count = rows.starts_X1.shape[0] - 1
    hidden, width, pairs = down_RI.shape[0] // count, inner_PI.shape[1], rows.order_P.shape[0]
    assert inner_PI.is_contiguous() and down_RI.is_contiguous(), "rows lie side by side"
    out = inner_PI.new_empty(pairs, hidden) if out is None else out
    m, n, k, warps, stages = _tile(pairs, count)
    if pairs:
        expert_down_kernel[(triton.cdiv(hidden, n), count)](
            inner_PI, down_RI, rows.order_P, rows.starts_X1, out, WIDTH=width, D=hidden,
            BLOCK_M=m, BLOCK_N=n, BLOCK_I=k, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out


def _tile(pairs: int, count: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and inputs of a tile, warps, stages."""
    if pairs <= FEW_PAIRS * count:
        return 16, 64, 128, 4, 4
    return 64, 128, 64, 8, 3
