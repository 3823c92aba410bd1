"""What a gated delta layer puts out: each head normed, times its weight, times silu of its gate.

Owns that one operation. Rounds where the model does: the normed value before the weight, and the result.

Shapes: T tokens, H value heads, V value size, O = H * V, I columns of the product that holds the gates.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.layers.gated_delta_reference import GatedDeltaShape, HeadColumns


@triton.jit
def gdn_gate_kernel(
    x_ptr, inputs_ptr, weight_ptr, out_ptr, inputs_stride, eps,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, VALUE: tl.constexpr, GATE: tl.constexpr,
    GATE_STRIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    inside = (head < VALUE_HEADS)[:, None] & (at < VALUE)[None, :]
    weight = tl.load(weight_ptr + at, mask=at < VALUE, other=0.0)
    await_inputs(EARLY)
    release_next(EARLY)
    place = token * (VALUE_HEADS * VALUE) + head[:, None] * VALUE + at[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    first = GATE + head // SHARED * GATE_STRIDE + head % SHARED * VALUE
    gate = tl.load(inputs_ptr + token * inputs_stride + first[:, None] + at[None, :], mask=inside, other=0.0)
    gate = gate.to(tl.float32)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    normed = (x * tl.rsqrt(tl.sum(x * x, 1) / VALUE + eps)[:, None]).to(DTYPE)
    weighed = (normed * weight[None, :]).to(DTYPE).to(tl.float32)
    out = weighed * tl.fdiv(gate, 1.0 + tl.exp(-gate))
    tl.store(out_ptr + place, out.to(DTYPE), mask=inside)


def gdn_gate(
    x_TO: torch.Tensor,
    inputs_TI: torch.Tensor,
    columns: HeadColumns,
    weight_V: torch.Tensor,
    eps: float,
    shape: GatedDeltaShape,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_TO; `columns` are the gates' among `inputs_TI`. `out` may be `x_TO`."""
    assert x_TO.is_contiguous() and inputs_TI.stride(1) == 1, "rows lie side by side"
    tokens = x_TO.shape[0]
    out = torch.empty_like(x_TO) if out is None else out
    early, block_v = is_early(out), triton.next_power_of_2(shape.value_dim)
    block_h = max(1, min(triton.next_power_of_2(shape.value_heads), 1024 // block_v))
    if tokens:
        gdn_gate_kernel[(tokens, triton.cdiv(shape.value_heads, block_h))](
            x_TO, inputs_TI, weight_V, out, inputs_TI.stride(0), eps,
            VALUE_HEADS=shape.value_heads, SHARED=shape.shared, VALUE=shape.value_dim,
            GATE=columns.base, GATE_STRIDE=columns.stride,
            BLOCK_H=block_h, BLOCK_V=block_v, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
    return out
