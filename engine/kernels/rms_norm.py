"""Root-mean-square normalisation, alone and after adding to the residual stream.

Owns both operations for contiguous rows. Rounds where `engine.layers.norm` does: statistics in
fp32, the normalised value to the storage dtype before the weight multiplies it (unit norms multiply by 1 +
weight in fp32 and round once), the sum of the residual stream before it is normed. A row of zeros gives zeros.

Shapes: T tokens, D width.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next


def rms_norm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, unit: bool = False) -> torch.Tensor:
    wide_TD = x_TD.float()
    scale_T1 = torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
    if unit:
        return (wide_TD * scale_T1 * (1.0 + weight_D.float())).to(x_TD.dtype)
    return (wide_TD * scale_T1).to(x_TD.dtype) * weight_D


def add_rms_norm_reference(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total_TD = x_TD + residual_TD
    return rms_norm_reference(total_TD, weight_D, eps), total_TD


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, total_ptr, weight_ptr, out_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, BLOCK)
    inside = at < D
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    await_inputs(EARLY)
    release_next(EARLY)
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / D) + eps)
    if UNIT:
        normed = x * scale * (1.0 + weight.to(tl.float32))
    else:
        normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row + at, normed.to(out_ptr.dtype.element_ty), mask=inside)


def warps_for(width: int) -> int:
    """Warps that leave a thread 8 to 16 elements of a row."""
    return max(1, min(8, triton.next_power_of_2(width) // 512))


def rms_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    warps: int | None = None,
    unit: bool = False,
) -> torch.Tensor:
    """`x_TD` normed, in `out` if given (which may be `x_TD` itself); with `unit` by a unit norm."""
    out = torch.empty_like(x_TD) if out is None else out
    _launch(x_TD, None, None, weight_D, eps, out, warps, unit)
    return out


def add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    warps: int | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed sum, sum). The sum is in `total` if given and replaces `residual_TD` in place if not; `out` may be
    `x_TD`."""
    out = torch.empty_like(x_TD) if out is None else out
    total = residual_TD if total is None else total
    _launch(x_TD, residual_TD, total, weight_D, eps, out, warps)
    return out, total


def _launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    total_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    warps: int | None,
    unit: bool = False,
) -> None:
    tokens, width = x_TD.shape
    assert x_TD.is_contiguous() and out.is_contiguous(), "rows must be contiguous"
    for stream_TD in (residual_TD, total_TD):
        assert stream_TD is None or stream_TD.is_contiguous(), "rows must be contiguous"
    early = is_early(x_TD)
    if tokens:
        rms_norm_kernel[(tokens,)](
            x_TD,
            x_TD if residual_TD is None else residual_TD,
            x_TD if total_TD is None else total_TD,
            weight_D,
            out,
            eps,
            D=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=residual_TD is not None,
            UNIT=unit,
            EARLY=early,
            num_warps=warps or warps_for(width),
            **options(early),
        )
