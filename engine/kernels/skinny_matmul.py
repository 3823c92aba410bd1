"""Products of a few rows with a whole weight, at the speed of reading the weight.

Owns x @ w.T for 1 to `MAX_ROWS` rows on tensor cores: alone, with the gate of a gated block, or added
to the residual stream; optionally of rows normed on the way in. Ignores larger batches, where
arithmetic counts and cuBLAS wins.

The norm costs no pass of its own: the sum of squares is taken while the inputs stream by, and scales
the finished sums. Sums are fp32, in an order that depends on nothing but the tile sizes. Where the
device can, a program asks for its weights before the launch ahead of it has finished.

Shapes: M rows, K input features, N output features (gates, then ups, for the gated product).
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, prefetch, release_next
from engine.kernels.rms_norm import rms_norm_reference
from engine.kernels.swiglu import silu, silu_and_mul_reference
from engine.layers.matmul import linear

MAX_ROWS = 64


@dataclass(slots=True, frozen=True)
class SkinnyConfig:
    """Outputs a program computes, inputs it reads at a time, warps, and loads in flight."""

    outputs: int
    inputs: int
    warps: int
    stages: int


@dataclass(slots=True, frozen=True)
class InputNorm:
    """The norm that precedes the product: its weight [K] and epsilon."""

    weight_K: torch.Tensor
    eps: float


def skinny_matmul_reference(
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
def skinny_matmul_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, rows, x_stride, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    weight_ptr += first.to(tl.int64) * K
    size = tl.minimum(WIDTH - first, BN) * (K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(weight_ptr, size, EARLY)
    if GATED:
        prefetch(weight_ptr + WIDTH * K, size, EARLY)
    await_inputs(EARLY)
    release_next(EARLY)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    real_M1 = (m < rows)[:, None]
    real_N1 = (first + n < WIDTH)[:, None]
    x_ptr += m[:, None] * x_stride + k[None, :]
    weight_ptr += n[:, None] * K + k[None, :]
    sum_MN = tl.zeros((BM, BN), tl.float32)
    up_MN = tl.zeros((BM, BN), tl.float32)
    squares_M = tl.zeros((BM,), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        x_MK = tl.load(x_ptr + at, mask=real_M1, other=0.0)
        weight_NK = tl.load(weight_ptr + at, mask=real_N1, other=0.0)
        if NORM:
            wide_MK = x_MK.to(tl.float32)
            squares_M += tl.sum(wide_MK * wide_MK, 1)
            norm_K = tl.load(norm_ptr + at + k).to(tl.float32)
            x_MK = (wide_MK * norm_K[None, :]).to(x_MK.dtype)
        sum_MN = tl.dot(x_MK, tl.trans(weight_NK), sum_MN, input_precision="ieee")
        if GATED:
            up_NK = tl.load(weight_ptr + WIDTH * K + at, mask=real_N1, other=0.0)
            up_MN = tl.dot(x_MK, tl.trans(up_NK), up_MN, input_precision="ieee")
    if NORM:
        scale_M1 = tl.rsqrt(squares_M * (1.0 / K) + eps)[:, None]
        sum_MN *= scale_M1
        up_MN *= scale_M1
    column_1N = first + n[None, :]
    real_MN = real_M1 & (column_1N < WIDTH)
    at_MN = m[:, None] * WIDTH + column_1N
    if BIAS:
        sum_MN += tl.load(bias_ptr + column_1N, mask=column_1N < WIDTH, other=0.0).to(tl.float32)
    if GATED:
        sum_MN = silu(sum_MN.to(dtype).to(tl.float32), dtype) * up_MN.to(dtype).to(tl.float32)
    if RESIDUAL:
        residual_MN = tl.load(residual_ptr + at_MN, mask=real_MN, other=0.0).to(tl.float32)
        sum_MN = sum_MN.to(dtype).to(tl.float32) + residual_MN
    tl.store(out_ptr + at_MN, sum_MN.to(dtype), mask=real_MN)


def default_config(rows: int, outputs: int, inputs: int, gated: bool) -> SkinnyConfig:
    """Enough programs to fill the chip, and some tens of KiB of weights in flight in each."""
    width = outputs // 2 if gated else outputs
    columns = 16 if width < 4096 else 32
    chunk = min(128, inputs & -inputs)
    return SkinnyConfig(columns // 2 if gated and columns > 16 else columns, chunk, 2 if columns == 16 else 4, 5)


def skinny_matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual_MN: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
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
    assert inputs % config.inputs == 0, f"{inputs} input features, expected a multiple of {config.inputs}"
    early = is_early(x_MK)
    skinny_matmul_kernel[(triton.cdiv(width, config.outputs),)](
        x_MK,
        weight_NK,
        x_MK if norm is None else norm.weight_K,
        x_MK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN,
        out,
        rows,
        x_MK.stride(0),
        0.0 if norm is None else norm.eps,
        K=inputs,
        WIDTH=width,
        BM=max(16, triton.next_power_of_2(rows)),
        BN=config.outputs,
        BK=config.inputs,
        STAGES=config.stages,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias_N is not None,
        RESIDUAL=residual_MN is not None,
        EARLY=early,
        num_warps=config.warps,
        **options(early),
    )
    return out
