"""A depthwise causal convolution over each row's tokens, with silu behind it: its last inputs are the state.

Owns the sum, oldest input first in fp32, rounded once behind the silu, and the state, exact copies of inputs. An
output has the same bits whether its token came alone or in a chunk. Inputs may lie anywhere in a product's
rows: `columns_C` names each channel's.

Shapes: T tokens of R rows back to back, I columns of the product, C channels, K the convolution's width, S slots.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next

TOKENS, CHANNELS, STEP_CHANNELS = 16, 128, 256


@triton.jit
def finished(total, bias_ptr, channel, inside, BIASED: tl.constexpr):
    if BIASED:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    return tl.fdiv(total, 1.0 + tl.exp(-total))


@triton.jit
def causal_conv_step_kernel(
    x_ptr, columns_ptr, weight_ptr, bias_ptr, state_ptr, slots_ptr, out_ptr, x_stride, width,
    TAPS: tl.constexpr, MAPPED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    column = channel
    if MAPPED:
        column = tl.load(columns_ptr + channel, mask=inside, other=0)
    await_inputs(EARLY)
    release_next(EARLY)
    state = state_ptr + tl.load(slots_ptr + row).to(tl.int64) * ((TAPS - 1) * width) + channel
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            value = tl.load(state + tap * width, mask=inside, other=0.0)
        else:
            value = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        if tap:
            tl.store(state + (tap - 1) * width, value, mask=inside)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * weight
    out = finished(total, bias_ptr, channel, inside, BIASED)
    tl.store(out_ptr + row * width + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def causal_conv_kernel(
    x_ptr, columns_ptr, weight_ptr, bias_ptr, state_ptr, slots_ptr, ends_ptr, rows_ptr, out_ptr,
    x_stride, tokens, width,
    TAPS: tl.constexpr, MAPPED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Outputs of many tokens; states are read only."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_t, in_c = token < tokens, channel < width
    column = channel
    if MAPPED:
        column = tl.load(columns_ptr + channel, mask=in_c, other=0)
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.load(rows_ptr + token, mask=in_t, other=0)
    place = token - tl.load(ends_ptr + row, mask=in_t, other=0)
    slot = tl.load(slots_ptr + row, mask=in_t, other=0).to(tl.int64)
    total = tl.zeros((BLOCK_T, BLOCK_C), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        ago = TAPS - 1 - tap
        here = (in_t & (place >= ago))[:, None] & in_c[None, :]
        before = (in_t & (place < ago))[:, None] & in_c[None, :]
        at = x_ptr + (token - ago).to(tl.int64)[:, None] * x_stride + column[None, :]
        value = tl.load(at, mask=here, other=0.0)
        if ago:
            line = slot * (TAPS - 1) + TAPS - 1 + place - ago
            value += tl.load(state_ptr + line[:, None] * width + channel[None, :], mask=before, other=0.0)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=in_c, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * weight[None, :]
    out = finished(total, bias_ptr, channel[None, :], in_c[None, :], BIASED)
    at = out_ptr + token.to(tl.int64)[:, None] * width + channel[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_t[:, None] & in_c[None, :])


@triton.jit
def causal_conv_keep_kernel(
    x_ptr, columns_ptr, state_ptr, slots_ptr, ends_ptr, x_stride, width,
    TAPS: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The states behind each row's last token, oldest input first: what is overwritten has been read."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    column = channel
    if MAPPED:
        column = tl.load(columns_ptr + channel, mask=inside, other=0)
    await_inputs(EARLY)
    release_next(EARLY)
    start, end = tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)
    state = state_ptr + tl.load(slots_ptr + row).to(tl.int64) * ((TAPS - 1) * width) + channel
    for tap in tl.static_range(TAPS - 1):
        token = end - (TAPS - 1) + tap
        if token >= start:
            value = tl.load(x_ptr + token.to(tl.int64) * x_stride + column, mask=inside, other=0.0)
            tl.store(state + tap * width, value, mask=inside)
        else:
            value = tl.load(state + (tap + end - start) * width, mask=inside, other=0.0)
            tl.store(state + tap * width, value, mask=inside)


def causal_conv_step(
    x_RI: torch.Tensor,
    columns_C: torch.Tensor | None,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_SKC: torch.Tensor,
    slots_R: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_RC of one token a row, in the input's dtype; the states of `slots_R` move on by it. What lies in a row
    of `x_RI` lies side by side."""
    width, taps = _check(x_RI, columns_C, weight_CK, state_SKC)
    rows = x_RI.shape[0]
    out = x_RI.new_empty(rows, width) if out is None else out
    early = is_early(out)
    if rows:
        causal_conv_step_kernel[(rows, triton.cdiv(width, STEP_CHANNELS))](
            x_RI, columns_C, weight_CK, bias_C, state_SKC, slots_R, out, x_RI.stride(0), width,
            TAPS=taps, MAPPED=columns_C is not None, BIASED=bias_C is not None,
            BLOCK=STEP_CHANNELS, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
    return out


def causal_conv(
    x_TI: torch.Tensor,
    columns_C: torch.Tensor | None,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    state_SKC: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor,
    rows_T: torch.Tensor,
    out: torch.Tensor | None = None,
    keep: bool = True,
) -> torch.Tensor:
    """out_TC of rows of tokens [ends_R1[r], ends_R1[r + 1]), where token t is row `rows_T[t]`'s; their states in
    `slots_R` move on by all of them, or stay without `keep`."""
    width, taps = _check(x_TI, columns_C, weight_CK, state_SKC)
    tokens, rows, mapped = x_TI.shape[0], slots_R.shape[0], columns_C is not None
    out = x_TI.new_empty(tokens, width) if out is None else out
    early = is_early(out)
    if tokens:
        causal_conv_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(width, CHANNELS))](
            x_TI, columns_C, weight_CK, bias_C, state_SKC, slots_R, ends_R1, rows_T, out,
            x_TI.stride(0), tokens, width,
            TAPS=taps, MAPPED=mapped, BIASED=bias_C is not None,
            BLOCK_T=TOKENS, BLOCK_C=CHANNELS, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
    if tokens and keep:
        causal_conv_keep_kernel[(rows, triton.cdiv(width, STEP_CHANNELS))](
            x_TI, columns_C, state_SKC, slots_R, ends_R1, x_TI.stride(0), width,
            TAPS=taps, MAPPED=mapped, BLOCK=STEP_CHANNELS, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
    return out


def _check(
    x_TI: torch.Tensor, columns_C: torch.Tensor | None, weight_CK: torch.Tensor, state_SKC: torch.Tensor
) -> tuple[int, int]:
    width, taps = weight_CK.shape
    given = x_TI.shape[1] if columns_C is None else columns_C.shape[0]
    assert given == width == state_SKC.shape[2], f"{given} channels, weights of {width}, states {state_SKC.shape}"
    assert taps > 1 and state_SKC.shape[1] == taps - 1, f"a state of {state_SKC.shape[1]} inputs for {taps} taps"
    assert x_TI.stride(1) == 1, "a row's numbers lie side by side"
    assert weight_CK.is_contiguous() and state_SKC.is_contiguous(), "weights and states are contiguous"
    return width, taps
