"""Merges softmax states over disjoint keys into outputs.

Owns the merge of states stored by other kernels. Ignores how they came about.

Shapes: S states, T tokens, N query heads, H head size, D = H padded to a power of two.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import add_sink, ceil_div, empty_state, mean_and_lse, merge_all, power_of_two
from engine.kernels.decode_attention import States


def merge_reference(mean_STNH: torch.Tensor, lse_STN: torch.Tensor, sink_N: torch.Tensor | None = None) -> torch.Tensor:
    """out_TNH in double precision; zeros where every state is empty. lse is in base 2."""
    lse_STN = lse_STN.double() * 0.6931471805599453
    if sink_N is not None:
        sink = sink_N.double().expand(1, *lse_STN.shape[1:])
        mean_STNH = torch.cat((mean_STNH, torch.zeros_like(mean_STNH[:1])))
        lse_STN = torch.cat((lse_STN, sink))
    weights_STN = torch.softmax(lse_STN, dim=0).nan_to_num()
    return (weights_STN[..., None] * mean_STNH.double().masked_fill(weights_STN[..., None] == 0, 0.0)).sum(0)


@triton.jit(
    do_not_specialize=["num_states", "num_tokens"],
    do_not_specialize_on_alignment=["lse_ptr", "sink_ptr"],
)
def _merge_kernel(
    mean_ptr,
    lse_ptr,
    out_ptr,
    sink_ptr,
    num_states,
    num_tokens,
    out_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head_M = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d_D = tl.arange(0, BLOCK_D)
    mask_M = head_M < HEADS
    mask_MD = mask_M[:, None] & (d_D[None, :] < HEAD_DIM)
    acc_MD, sum_M, top_M = empty_state(BLOCK_H, BLOCK_D)
    acc_MD, sum_M, top_M = merge_all(
        acc_MD, sum_M, top_M, mean_ptr, lse_ptr, token * HEADS + head_M, num_states, num_tokens.to(tl.int64) * HEADS,
        mask_M, mask_MD, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    if SINK:
        sink_M = tl.load(sink_ptr + head_M, mask=mask_M, other=0.0).to(tl.float32)
        acc_MD, sum_M, top_M = add_sink(acc_MD, sum_M, top_M, sink_M)
    mean_MD, _ = mean_and_lse(acc_MD, sum_M, top_M)
    at_MD = head_M[:, None] * HEAD_DIM + d_D[None, :]
    tl.store(out_ptr + token * out_stride + at_MD, mean_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


def merge_states(states: States, num_states: int, out_TNH: torch.Tensor, sink_N: torch.Tensor | None = None) -> None:
    """Merge the first `num_states` of `states` ([S, T]) in their order; an lse of -inf counts for nothing."""
    tokens, heads, size = out_TNH.shape
    assert states.lse_IN.shape[1] == tokens and out_TNH.stride()[1:] == (size, 1)
    block_h = min(8, power_of_two(heads))
    _merge_kernel[(tokens, ceil_div(heads, block_h))](
        states.mean_INH,
        states.lse_IN,
        out_TNH,
        sink_N,
        num_states,
        tokens,
        out_TNH.stride(0),
        HEADS=heads,
        HEAD_DIM=size,
        BLOCK_H=block_h,
        BLOCK_D=power_of_two(size),
        SINK=sink_N is not None,
    )
