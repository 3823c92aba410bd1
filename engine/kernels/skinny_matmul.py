"""Products of a few rows with a whole weight of a small model.

Owns x @ w.T for 1 to `MAX_ROWS` rows on tensor cores: alone, with the gate of a gated block, or added
to the residual stream. Ignores one row (`gemv`) and larger products, where cuBLAS wins. A program takes up to
`BLOCK_ROWS` rows: outputs of a small model are too few to keep a device busy, and so further rows have programs
of their own.

A norm between two products costs no launch. The product that ends the residual stream also writes
its rows times the next norm's weight, and its programs' sums of squares (`UnscaledRows`); the
product that follows scales its finished sums by them. Sums are fp32, in an order that depends on
nothing but the tile sizes. Where the device can, a program asks for its weights before the launch
ahead of it has finished.

Shapes: M rows, K input features, N output features (gates, then ups, for the gated product), P parts
of a row's sum of squares.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, prefetch, release_next
from engine.kernels.gemv import InputNorm
from engine.kernels.swiglu import silu

MAX_ROWS, BLOCK_ROWS = 256, 64

PREFETCHED = 16 << 20
"""Bytes of a weight that may be asked for at once: a part of the level-2 cache."""


@dataclass(slots=True, frozen=True)
class SkinnyConfig:
    """Outputs a program computes, inputs it reads at a time, warps, and loads in flight."""

    outputs: int
    inputs: int
    warps: int
    stages: int


@dataclass(slots=True, frozen=True)
class UnscaledRows:
    """Rows before a norm: norm(row) = values * rsqrt(sum(squares) / K + eps).

    `values_MK` are multiplied by the norm's weight already; `squares_MP` holds the parts, fp32, of
    the sum of squares of the rows as they were.
    """

    values_MK: torch.Tensor
    squares_MP: torch.Tensor
    eps: float


@triton.jit
def skinny_matmul_kernel(
    x_ptr, weight_ptr, squares_ptr, bias_ptr, residual_ptr, next_norm_ptr, out_ptr, next_ptr, next_squares_ptr,
    rows, x_stride, parts, eps,
    K: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    NEXT: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program * BN
    weight_ptr += first.to(tl.int64) * K
    if PREFETCH:
        size = tl.minimum(WIDTH - first, BN) * (K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        prefetch(weight_ptr, size, EARLY)
        if GATED:
            prefetch(weight_ptr + WIDTH * K, size, EARLY)
    await_inputs(EARLY)
    release_next(EARLY)
    # Tensor cores of Hopper take 64 and more outputs as the rows of a product straight from shared
    # memory; fewer are its columns.
    SWAP: tl.constexpr = BN >= 64
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    real_M1 = (m < rows)[:, None]
    real_N1 = (first + n < WIDTH)[:, None]
    x_ptr += m[:, None] * x_stride + k[None, :]
    weight_ptr += n[:, None] * K + k[None, :]
    if SWAP:
        sums = tl.zeros((BN, BM), tl.float32)
        ups = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
        ups = tl.zeros((BM, BN), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        x_MK = tl.load(x_ptr + at, mask=real_M1, other=0.0)
        weight_NK = tl.load(weight_ptr + at, mask=real_N1, other=0.0)
        if SWAP:
            sums = tl.dot(weight_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(weight_NK), sums, input_precision="ieee")
        if GATED:
            up_NK = tl.load(weight_ptr + WIDTH * K + at, mask=real_N1, other=0.0)
            if SWAP:
                ups = tl.dot(up_NK, tl.trans(x_MK), ups, input_precision="ieee")
            else:
                ups = tl.dot(x_MK, tl.trans(up_NK), ups, input_precision="ieee")
    if SWAP:
        y_MN, up_MN = tl.trans(sums), tl.trans(ups)
    else:
        y_MN, up_MN = sums, ups
    if SCALED:
        p = tl.arange(0, BP)
        squares_MP = tl.load(
            squares_ptr + m[:, None] * parts + p[None, :], mask=real_M1 & (p < parts)[None, :], other=0.0
        )
        scale_M1 = tl.rsqrt(tl.sum(squares_MP, 1) * (1.0 / K) + eps)[:, None]
        y_MN *= scale_M1
        up_MN *= scale_M1
    column_1N = first + n[None, :]
    real_MN = real_M1 & (column_1N < WIDTH)
    at_MN = m[:, None] * WIDTH + column_1N
    if BIAS:
        y_MN += tl.load(bias_ptr + column_1N, mask=column_1N < WIDTH, other=0.0).to(tl.float32)
    if GATED:
        y_MN = silu(y_MN.to(dtype).to(tl.float32), dtype) * up_MN.to(dtype).to(tl.float32)
    if RESIDUAL:
        y_MN = y_MN.to(dtype).to(tl.float32) + tl.load(residual_ptr + at_MN, mask=real_MN, other=0.0).to(tl.float32)
    rounded_MN = y_MN.to(dtype)
    tl.store(out_ptr + at_MN, rounded_MN, mask=real_MN)
    if NEXT:
        y_MN = tl.where(real_MN, rounded_MN.to(tl.float32), 0.0)
        norm_1N = tl.load(next_norm_ptr + column_1N, mask=column_1N < WIDTH, other=0.0).to(tl.float32)
        tl.store(next_ptr + at_MN, (y_MN * norm_1N).to(dtype), mask=real_MN)
        tl.store(next_squares_ptr + m * tl.num_programs(0) + program, tl.sum(y_MN * y_MN, 1), mask=m < rows)


def default_config(rows: int, outputs: int, inputs: int, gated: bool) -> SkinnyConfig:
    """As measured on an H200 at the shapes of 135M and 0.6B models."""
    width = outputs // 2 if gated else outputs
    chunk = inputs & -inputs
    if gated:
        if chunk >= 256:
            return SkinnyConfig(16, 256, 2, 4)
        return SkinnyConfig(64, min(64, chunk), 4, 4) if 16 < rows <= 32 else SkinnyConfig(32, min(64, chunk), 4, 5)
    if width > inputs:
        return SkinnyConfig(64, min(64, chunk), 4, 6)
    if chunk >= 512 and inputs >= 2048 and rows <= 32:
        return SkinnyConfig(16, 512, 4, 3)
    return SkinnyConfig(16, min(256, chunk), 4, 4 if chunk >= 256 else 6)


def skinny_matmul(
    x_MK: torch.Tensor | UnscaledRows,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    residual_MN: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    config: SkinnyConfig | None = None,
) -> torch.Tensor:
    """[M, N], or [M, N / 2] if `gated`.

    `out` is contiguous and may be `residual_MN`. A gated product takes neither bias nor residual.
    """
    return _launch(x_MK, weight_NK, bias_N, residual_MN, gated, out, None, config)[0]


def skinny_matmul_then_norm(
    x_MK: torch.Tensor | UnscaledRows,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_MN: torch.Tensor,
    norm: InputNorm,
    config: SkinnyConfig | None = None,
    out: torch.Tensor | None = None,
) -> UnscaledRows:
    """Add the product to `residual_MN`, in place or into `out`; what comes back stands for `norm` of the sum."""
    out = residual_MN if out is None else out
    unscaled = _launch(x_MK, weight_NK, bias_N, residual_MN, False, out, norm, config)[1]
    assert unscaled is not None
    return unscaled


def _launch(
    x: torch.Tensor | UnscaledRows,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_MN: torch.Tensor | None,
    gated: bool,
    out: torch.Tensor | None,
    next_norm: InputNorm | None,
    config: SkinnyConfig | None,
) -> tuple[torch.Tensor, UnscaledRows | None]:
    unscaled = x if isinstance(x, UnscaledRows) else None
    x_MK = x.values_MK if isinstance(x, UnscaledRows) else x
    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    width = outputs // 2 if gated else outputs
    config = config or default_config(rows, outputs, inputs, gated)
    assert 1 <= rows <= MAX_ROWS, f"{rows} rows, at most {MAX_ROWS}"
    assert weight_NK.is_contiguous() and x_MK.stride(1) == 1, "rows must be contiguous"
    assert inputs % config.inputs == 0, f"{inputs} input features, expected a multiple of {config.inputs}"
    assert not gated or (bias_N is None and residual_MN is None), "a gated product takes neither bias nor residual"
    programs = triton.cdiv(width, config.outputs)
    out = x_MK.new_empty(rows, width) if out is None else out
    following = None
    if next_norm is not None:
        squares_MP = torch.empty(rows, programs, dtype=torch.float32, device=x_MK.device)
        following = UnscaledRows(torch.empty_like(out), squares_MP, next_norm.eps)
    parts = 1 if unscaled is None else unscaled.squares_MP.shape[1]
    early = is_early(x_MK)
    block = min(BLOCK_ROWS, max(16, triton.next_power_of_2(rows)))
    skinny_matmul_kernel[(programs, triton.cdiv(rows, block))](
        x_MK,
        weight_NK,
        x_MK if unscaled is None else unscaled.squares_MP,
        x_MK if bias_N is None else bias_N,
        x_MK if residual_MN is None else residual_MN,
        x_MK if next_norm is None else next_norm.weight_K,
        out,
        x_MK if following is None else following.values_MK,
        x_MK if following is None else following.squares_MP,
        rows,
        x_MK.stride(0),
        parts,
        0.0 if unscaled is None else unscaled.eps,
        K=inputs,
        WIDTH=width,
        BM=block,
        BN=config.outputs,
        BK=config.inputs,
        BP=triton.next_power_of_2(parts),
        STAGES=config.stages,
        GATED=gated,
        SCALED=unscaled is not None,
        BIAS=bias_N is not None,
        RESIDUAL=residual_MN is not None,
        NEXT=next_norm is not None,
        PREFETCH=weight_NK.nbytes <= PREFETCHED,
        EARLY=early,
        num_warps=config.warps,
        **options(early),
    )
    return out, following
