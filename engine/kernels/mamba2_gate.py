"""What a Mamba2 layer puts out, gated: times silu(gate), with or without a norm over groups of its width.

Owns the three forms that published models have: gated alone, normed and then gated, gated and then normed.
Everything is fp32 between input and output.

Shapes: T tokens, I inner width, G groups of it that are normed each for itself.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.rms_norm import warps_for
from engine.layers.mamba2_reference import GroupNorm


@triton.jit
def mamba2_gate_kernel(
    x_ptr, gate_ptr, weight_ptr, out_ptr, gate_stride, eps,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, GATED_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    column = group * GROUP + at
    # Without a norm the last part of a row is narrower where the parts do not divide the width.
    inside = (at < GROUP) & (column < WIDTH)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    release_next(EARLY)
    x = tl.load(x_ptr + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.fdiv(gate, 1.0 + tl.exp(-gate))
    if NORMED:
        if GATED_FIRST:
            x *= factor
        x = x * tl.rsqrt(tl.sum(x * x, 0) * (1.0 / GROUP) + eps) * weight
        if not GATED_FIRST:
            x *= factor
    else:
        x *= factor
    tl.store(out_ptr + token * WIDTH + column, x.to(out_ptr.dtype.element_ty), mask=inside)


def mamba2_gate(
    x_TI: torch.Tensor, gate_TI: torch.Tensor, norm: GroupNorm | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, I], in `out` if given, which may be `x_TI` itself; rows of the gate may lie apart."""
    assert x_TI.is_contiguous() and gate_TI.stride(1) == 1, "a row's numbers lie side by side"
    out = torch.empty_like(x_TI) if out is None else out
    tokens, width = x_TI.shape
    group = width // norm.groups if norm is not None else min(width, 1024)
    early = is_early(out)
    if tokens:
        mamba2_gate_kernel[(tokens, triton.cdiv(width, group))](
            x_TI,
            gate_TI,
            x_TI if norm is None else norm.weight_I,
            out,
            gate_TI.stride(0),
            0.0 if norm is None else norm.eps,
            WIDTH=width,
            GROUP=group,
            BLOCK=triton.next_power_of_2(group),
            NORMED=norm is not None,
            GATED_FIRST=norm is not None and norm.gated_first,
            EARLY=early,
            num_warps=warps_for(group),
            **options(early),
        )
    return out
