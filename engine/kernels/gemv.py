"""Products of a few rows with a whole weight, at the speed of reading the weight.

Owns x @ w.T for 1 to 4 rows, alone, with the gate of a gated block, or added to the residual
stream; optionally of rows normed on the way in. Ignores larger batches, where tensor cores and
cuBLAS win. Sums are fp32 in a fixed order; rounding follows the unfused operations. One launch, no
workspace: every program owns whole outputs.

Shapes: M rows, K input features, N output features (gates, then ups, for the gated product).
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.rms_norm import rms_norm_reference
from engine.kernels.swiglu import silu, silu_and_mul_reference
from engine.layers.matmul import linear

MAX_ROWS = 4


@dataclass(slots=True, frozen=True)
class GemvConfig:
    """Outputs a program computes, inputs it reads at a time, warps, and loads in flight ahead (1: none)."""

    outputs: int = 4
    inputs: int = 2048
    warps: int = 4
    stages: int = 1


@dataclass(slots=True, frozen=True)
class InputNorm:
    """The norm that precedes the product: its weight [K] and epsilon."""

    weight_K: torch.Tensor
    eps: float


def gemv_reference(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual_MN: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    if norm is not None:
        x_MK = rms_norm_reference(x_MK, norm.weight_K, norm.eps)
    y_MN = linear(x_MK, weight_NK, bias_N)
    if gated:
        y_MN = silu_and_mul_reference(y_MN)
    return y_MN if residual_MN is None else y_MN + residual_MN


@triton.jit
def _scale_of(x_ptr, stride, eps, M: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """1 / root mean square of each row: [ROWS]."""
    row = tl.arange(0, ROWS)[:, None]
    squares = tl.zeros((ROWS, BK), tl.float32)
    for start in range(0, K, BK):
        at = start + tl.arange(0, BK)[None, :]
        x = tl.load(x_ptr + row * stride + at, mask=(at < K) & (row < M), other=0.0).to(tl.float32)
        squares += x * x
    return tl.rsqrt(tl.sum(squares, 1) * (1.0 / K) + eps)


@triton.jit
def _rows(x_ptr, norm_ptr, stride, scale, at, m: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr):
    """fp32 inputs of row m, [1, BK]."""
    x = tl.load(x_ptr + m * stride + at, mask=at < K, other=0.0).to(tl.float32)
    if NORM:
        own = tl.sum(tl.where(tl.arange(0, ROWS) == m, scale, 0.0), 0)
        weight = tl.load(norm_ptr + at, mask=at < K, other=0.0).to(tl.float32)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        x = ((x * own).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    return x[None, :]


@triton.jit
def _finish(
    total, m: tl.constexpr, n, inside, bias_ptr, residual_ptr, out_ptr, N: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if BIAS:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + m * N + n, mask=inside, other=0.0).to(tl.float32)
        total = total.to(dtype).to(tl.float32) + residual
    tl.store(out_ptr + m * N + n, total.to(dtype), mask=inside)


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, x_stride, eps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    scale = tl.zeros((ROWS,), tl.float32)
    if NORM:
        scale = _scale_of(x_ptr, x_stride, eps, M, K, BK, ROWS)
    row_ptr = weight_ptr + n.to(tl.int64)[:, None] * K
    sum_0 = tl.zeros((BN, BK), tl.float32)
    sum_1, sum_2, sum_3 = sum_0, sum_0, sum_0
    for start in tl.range(0, K, BK, num_stages=STAGES):
        at = start + tl.arange(0, BK)
        weight = tl.load(
            row_ptr + at[None, :], mask=inside[:, None] & (at < K)[None, :], other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        sum_0 += weight * _rows(x_ptr, norm_ptr, x_stride, scale, at, 0, K, NORM, ROWS)
        if M > 1:
            sum_1 += weight * _rows(x_ptr, norm_ptr, x_stride, scale, at, 1, K, NORM, ROWS)
        if M > 2:
            sum_2 += weight * _rows(x_ptr, norm_ptr, x_stride, scale, at, 2, K, NORM, ROWS)
        if M > 3:
            sum_3 += weight * _rows(x_ptr, norm_ptr, x_stride, scale, at, 3, K, NORM, ROWS)
    _finish(tl.sum(sum_0, 1), 0, n, inside, bias_ptr, residual_ptr, out_ptr, N, BIAS, RESIDUAL)
    if M > 1:
        _finish(tl.sum(sum_1, 1), 1, n, inside, bias_ptr, residual_ptr, out_ptr, N, BIAS, RESIDUAL)
    if M > 2:
        _finish(tl.sum(sum_2, 1), 2, n, inside, bias_ptr, residual_ptr, out_ptr, N, BIAS, RESIDUAL)
    if M > 3:
        _finish(tl.sum(sum_3, 1), 3, n, inside, bias_ptr, residual_ptr, out_ptr, N, BIAS, RESIDUAL)


@triton.jit
def _gate(gate, up, m: tl.constexpr, n, inside, out_ptr, WIDTH: tl.constexpr):
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    product = silu(gate.to(dtype).to(tl.float32), dtype) * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + m * WIDTH + n, product.to(dtype), mask=inside)


@triton.jit
def gated_gemv_kernel(
    x_ptr, weight_ptr, norm_ptr, out_ptr, x_stride, eps,
    M: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < WIDTH
    scale = tl.zeros((ROWS,), tl.float32)
    if NORM:
        scale = _scale_of(x_ptr, x_stride, eps, M, K, BK, ROWS)
    gate_ptr = weight_ptr + n.to(tl.int64)[:, None] * K
    up_ptr = gate_ptr + WIDTH * K
    gate_0 = tl.zeros((BN, BK), tl.float32)
    gate_1, gate_2, gate_3 = gate_0, gate_0, gate_0
    up_0, up_1, up_2, up_3 = gate_0, gate_0, gate_0, gate_0
    for start in tl.range(0, K, BK, num_stages=STAGES):
        at = start + tl.arange(0, BK)
        real = inside[:, None] & (at < K)[None, :]
        gate = tl.load(gate_ptr + at[None, :], mask=real, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(up_ptr + at[None, :], mask=real, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = _rows(x_ptr, norm_ptr, x_stride, scale, at, 0, K, NORM, ROWS)
        gate_0, up_0 = gate_0 + gate * x, up_0 + up * x
        if M > 1:
            x = _rows(x_ptr, norm_ptr, x_stride, scale, at, 1, K, NORM, ROWS)
            gate_1, up_1 = gate_1 + gate * x, up_1 + up * x
        if M > 2:
            x = _rows(x_ptr, norm_ptr, x_stride, scale, at, 2, K, NORM, ROWS)
            gate_2, up_2 = gate_2 + gate * x, up_2 + up * x
        if M > 3:
            x = _rows(x_ptr, norm_ptr, x_stride, scale, at, 3, K, NORM, ROWS)
            gate_3, up_3 = gate_3 + gate * x, up_3 + up * x
    _gate(tl.sum(gate_0, 1), tl.sum(up_0, 1), 0, n, inside, out_ptr, WIDTH)
    if M > 1:
        _gate(tl.sum(gate_1, 1), tl.sum(up_1, 1), 1, n, inside, out_ptr, WIDTH)
    if M > 2:
        _gate(tl.sum(gate_2, 1), tl.sum(up_2, 1), 2, n, inside, out_ptr, WIDTH)
    if M > 3:
        _gate(tl.sum(gate_3, 1), tl.sum(up_3, 1), 3, n, inside, out_ptr, WIDTH)


def default_config(rows: int, outputs: int, inputs: int, gated: bool) -> GemvConfig:
    """One row: as measured on an H200 at the shapes of 135M to 8B models. More rows: enough programs
    to fill the chip, and about 16 KiB of weights in flight in each."""
    if rows > 1:
        per_program = 2 if gated or outputs < 4096 else 4
        chunk = min(2048, triton.next_power_of_2(inputs))
        return GemvConfig(per_program, chunk if rows == 2 else max(chunk // 2, 256), 4)
    is_head = outputs >= 32768 and not gated
    if inputs < 4096:
        if is_head:
            return GemvConfig(2, 512, 1) if inputs > 768 else GemvConfig(4, 512, 2)
        wide = outputs >= 4096 and inputs > 768
        return GemvConfig(2 if wide else 1, 1024, 2)
    if is_head:
        return GemvConfig(4, 2048, 4)
    return GemvConfig(2, 2048, 4) if gated else GemvConfig(1, 4096, 4)


def gemv(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual_MN: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """[M, N], or [M, N / 2] if `gated`; see the reference for what the options mean.

    `out` is contiguous and may be `residual_MN`. A gated product takes neither bias nor residual.
    """
    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    assert 1 <= rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
    assert weight_NK.is_contiguous() and x_MK.stride(1) == 1, "rows must be contiguous"
    assert not gated or (bias_N is None and residual_MN is None), "a gated product takes neither bias nor residual"
    width = outputs // 2 if gated else outputs
    out = x_MK.new_empty(rows, width) if out is None else out
    config = config or default_config(rows, outputs, inputs, gated)
    norm_weight, eps = (x_MK, 0.0) if norm is None else (norm.weight_K, norm.eps)
    shape = dict(
        M=rows, K=inputs, BN=config.outputs, BK=config.inputs, STAGES=config.stages, NORM=norm is not None,
        ROWS=triton.next_power_of_2(rows), num_warps=config.warps,
    )  # fmt: skip
    grid = (triton.cdiv(width, config.outputs),)
    if gated:
        gated_gemv_kernel[grid](x_MK, weight_NK, norm_weight, out, x_MK.stride(0), eps, WIDTH=width, **shape)
        return out
    gemv_kernel[grid](
        x_MK, weight_NK, norm_weight, x_MK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN, out, x_MK.stride(0), eps,
        N=outputs, BIAS=bias_N is not None, RESIDUAL=residual_MN is not None, **shape,
    )  # fmt: skip
    return out
