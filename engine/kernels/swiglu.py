"""The gate of a gated block: silu of one half times the other.

Owns that one operation. Rounds where the model does: silu to the storage dtype, then the product.

Shapes: T tokens, I intermediate; the input holds gates, then ups, of one token side by side.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next

BLOCK = 1024


def silu_and_mul_reference(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return F.silu(gate_TI) * up_TI


@triton.jit
def silu(gate, DTYPE: tl.constexpr):
    """fp32 silu of fp32 values, rounded to DTYPE."""
    return tl.fdiv(gate, 1.0 + tl.exp(-gate)).to(DTYPE).to(tl.float32)


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    release_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gate = tl.load(gate_up_ptr + token * (2 * WIDTH) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + token * (2 * WIDTH) + WIDTH + at, mask=inside, other=0.0).to(tl.float32)
    product = silu(gate, out_ptr.dtype.element_ty) * up
    tl.store(out_ptr + token * WIDTH + at, product.to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(
    gate_up_T2I: torch.Tensor, out: torch.Tensor | None = None, block: int = BLOCK, warps: int = 4
) -> torch.Tensor:
    """[T, I] of contiguous [T, 2I]."""
    tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    assert gate_up_T2I.is_contiguous(), "rows must be contiguous"
    out = gate_up_T2I.new_empty(tokens, width) if out is None else out
    early = is_early(out)
    if tokens:
        silu_and_mul_kernel[(tokens, triton.cdiv(width, block))](
            gate_up_T2I, out, WIDTH=width, BLOCK=block, EARLY=early, num_warps=warps, **options(early)
        )
    return out
