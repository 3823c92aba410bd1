"""The product of one row with a whole weight, at the speed of reading the weight.

Owns x @ w.T for a single row: alone, with the gate of a gated block, or added to the residual stream;
optionally of a row normed on the way in. Ignores more rows (`skinny_matmul`, cuBLAS). Sums are fp32
in a fixed order, and scaled by the norm when finished. One launch, no workspace: every
program owns whole outputs, and asks for its weights before the launch ahead of it has finished.

Shapes: K input features, N output features (gates, then ups, for the gated product).
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.rms_norm import rms_norm_reference
from engine.kernels.swiglu import silu, silu_and_mul_reference
from engine.layers.matmul import linear


@dataclass(slots=True, frozen=True)
class GemvConfig:
    """Outputs a program computes, inputs it reads at a time, warps."""

    outputs: int = 4
    inputs: int = 2048
    warps: int = 4


@dataclass(slots=True, frozen=True)
class InputNorm:
    """The norm that precedes a product: its weight [K] and epsilon."""

    weight_K: torch.Tensor
    eps: float


def gemv_reference(
    x_1K: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual_1N: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Also the reference of products of more rows."""
    if norm is not None:
        x_1K = rms_norm_reference(x_1K, norm.weight_K, norm.eps)
    y_1N = linear(x_1K, weight_NK, bias_N)
    if gated:
        y_1N = silu_and_mul_reference(y_1N)
    return y_1N if residual_1N is None else y_1N + residual_1N


@triton.jit
def gemv_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    real_N = n < WIDTH
    real_NK = real_N[:, None] & (k < K)[None, :]
    weight_ptr += n.to(tl.int64)[:, None] * K + k[None, :]
    up_ptr = weight_ptr + WIDTH * K
    weight_NK = tl.load(weight_ptr, mask=real_NK, other=0.0, eviction_policy="evict_first")
    up_NK = tl.load(up_ptr, mask=real_NK & GATED, other=0.0, eviction_policy="evict_first")
    await_inputs(EARLY)
    release_next(EARLY)
    sum_NK = tl.zeros((BN, BK), tl.float32)
    sum_up_NK = tl.zeros((BN, BK), tl.float32)
    squares_K = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        real_K = start + k < K
        x_K = tl.load(x_ptr + start + k, mask=real_K, other=0.0).to(tl.float32)
        if NORM:
            squares_K += x_K * x_K
            x_K *= tl.load(norm_ptr + start + k, mask=real_K, other=0.0).to(tl.float32)
        sum_NK += weight_NK.to(tl.float32) * x_K[None, :]
        if GATED:
            sum_up_NK += up_NK.to(tl.float32) * x_K[None, :]
        if K > BK:
            real_NK = real_N[:, None] & (start + BK + k < K)[None, :]
            weight_NK = tl.load(weight_ptr + start + BK, mask=real_NK, other=0.0, eviction_policy="evict_first")
            up_NK = tl.load(up_ptr + start + BK, mask=real_NK & GATED, other=0.0, eviction_policy="evict_first")
    y_N = tl.sum(sum_NK, 1)
    up_N = tl.sum(sum_up_NK, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares_K, 0) * (1.0 / K) + eps)
        y_N *= scale
        up_N *= scale
    if BIAS:
        y_N += tl.load(bias_ptr + n, mask=real_N, other=0.0).to(tl.float32)
    if GATED:
        y_N = silu(y_N.to(dtype).to(tl.float32), dtype) * up_N.to(dtype).to(tl.float32)
    if RESIDUAL:
        y_N = y_N.to(dtype).to(tl.float32) + tl.load(residual_ptr + n, mask=real_N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, y_N.to(dtype), mask=real_N)


def default_config(outputs: int, inputs: int, gated: bool) -> GemvConfig:
    """As measured on an H200 at the shapes of 135M to 8B models."""
    if inputs >= 4096:
        return GemvConfig(2, 2048, 4)
    if outputs >= 32768:
        return GemvConfig(4, 512, 2)
    if gated or outputs >= 4096:
        return GemvConfig(2, 512, 1)
    return GemvConfig(1 if inputs >= 3072 else 2, 1024, 2)


def gemv(
    x_1K: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    norm: InputNorm | None = None,
    residual_1N: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """[1, N], or [1, N / 2] if `gated`; see the reference for what the options mean.

    `out` is contiguous and may be `residual_1N`. A gated product takes neither bias nor residual.
    """
    rows, inputs = x_1K.shape
    outputs = weight_NK.shape[0]
    assert rows == 1, f"{rows} rows"
    assert weight_NK.is_contiguous() and x_1K.stride(1) == 1, "rows must be contiguous"
    assert not gated or (bias_N is None and residual_1N is None), "a gated product takes neither bias nor residual"
    width = outputs // 2 if gated else outputs
    out = x_1K.new_empty(1, width) if out is None else out
    config = config or default_config(outputs, inputs, gated)
    early = is_early(x_1K)
    gemv_kernel[(triton.cdiv(width, config.outputs),)](
        x_1K,
        weight_NK,
        x_1K if norm is None else norm.weight_K,
        x_1K if bias_N is None else bias_N,
        x_1K if residual_1N is None else residual_1N,
        out,
        0.0 if norm is None else norm.eps,
        K=inputs,
        WIDTH=width,
        BN=config.outputs,
        BK=config.inputs,
        GATED=gated,
        NORM=norm is not None,
        BIAS=bias_N is not None,
        RESIDUAL=residual_1N is not None,
        EARLY=early,
        num_warps=config.warps,
        **options(early),
    )
    return out
