"""The Mamba2 recurrence, step by step on states in slots: one token a row, or several one after the other.

Owns what a head does with one token: its step size is dt = softplus(raw + bias) within limits, its state
decays by exp(dt * A), A = -exp(a_log), and gains dt * x (outer) B; the output is state * C + skip * x
(Dao and Gu, 2024, arxiv.org/abs/2405.21060). States are fp32 and change in place. What a token gives does not
depend on where its row was cut. Ignores convolution and gate.

Shapes: T tokens of R rows back to back, H heads, P head size, G groups of heads that share B and C, N state
size, S slots, C = H * P + 2 * G * N (x, B and C side by side), I = H * P.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.state_tile import check_state, softplus, state_tile, step_blocks, tokens_of
from engine.layers.mamba2_reference import Mamba2Heads, Mamba2Shape


@triton.jit
def step_size(raw, bias, low, high):
    return tl.minimum(tl.maximum(softplus(raw.to(tl.float32) + bias.to(tl.float32)), low), high)


@triton.jit
def mamba2_decode_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, bias_ptr, skip_ptr, state_ptr, slots_ptr, ends_ptr, out_ptr,
    xbc_stride, dt_stride, low, high,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    SEVERAL: tl.constexpr, KEEP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    WIDTH: tl.constexpr = HEADS * HEAD_DIM
    row, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    in_p, in_n = p < HEAD_DIM, n < STATE
    a_log, bias, skip = tl.load(a_log_ptr + head), tl.load(bias_ptr + head), tl.load(skip_ptr + head)
    await_inputs(EARLY)
    release_next(EARLY)
    first, count = tokens_of(ends_ptr, row, SEVERAL)
    rate = -tl.exp(a_log.to(tl.float32))
    tile, inside = state_tile(state_ptr, slots_ptr, row, head, p, n, HEADS, HEAD_DIM, STATE)
    state = tl.load(tile, mask=inside, other=0.0)
    b_column = WIDTH + head // (HEADS // GROUPS) * STATE
    line, raw, out_line = xbc_ptr + first * xbc_stride, dt_ptr + first * dt_stride + head, out_ptr + first * WIDTH
    for _ in range(count):
        step = step_size(tl.load(raw), bias, low, high)
        x = tl.load(line + head * HEAD_DIM + p, mask=in_p, other=0.0).to(tl.float32)
        b = tl.load(line + b_column + n, mask=in_n, other=0.0).to(tl.float32)
        c = tl.load(line + b_column + GROUPS * STATE + n, mask=in_n, other=0.0).to(tl.float32)
        state = state * tl.exp(step * rate) + (step * x)[:, None] * b[None, :]
        out = tl.sum(state * c[None, :], 1) + skip.to(tl.float32) * x
        tl.store(out_line + head * HEAD_DIM + p, out.to(out_ptr.dtype.element_ty), mask=in_p)
        line, raw, out_line = line + xbc_stride, raw + dt_stride, out_line + WIDTH
    if KEEP:
        tl.store(tile, state, mask=inside)


def mamba2_decode(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    heads: Mamba2Heads,
    shape: Mamba2Shape,
    state_SHPN: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    keep: bool = True,
) -> torch.Tensor:
    """out_TI in the input's dtype. Row r is token r or, with `ends_R1`, tokens [ends_R1[r], ends_R1[r + 1]).
    What lies in a row of `xbc_TC` and `dt_TH` lies side by side; rows that share a slot must be padding. States
    stay as they were without `keep`."""
    check_rows(xbc_TC, dt_TH, state_SHPN, shape)
    rows = slots_R.shape[0]
    out = xbc_TC.new_empty(xbc_TC.shape[0], shape.inner) if out is None else out
    early = is_early(out)
    block_p, block_n = step_blocks(shape.head_dim, shape.state)
    if rows:
        mamba2_decode_kernel[(rows, shape.heads, triton.cdiv(shape.head_dim, block_p))](
            xbc_TC, dt_TH, heads.a_log_H, heads.bias_H, heads.skip_H, state_SHPN,
            slots_R, slots_R if ends_R1 is None else ends_R1, out,
            xbc_TC.stride(0), dt_TH.stride(0), heads.low, heads.high, **constants(shape),
            SEVERAL=ends_R1 is not None, KEEP=keep,
            BLOCK_P=block_p, BLOCK_N=block_n, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
    return out


def constants(shape: Mamba2Shape) -> dict[str, int]:
    return {"HEADS": shape.heads, "HEAD_DIM": shape.head_dim, "GROUPS": shape.groups, "STATE": shape.state}


def check_rows(xbc_TC: torch.Tensor, dt_TH: torch.Tensor, state_SHPN: torch.Tensor, shape: Mamba2Shape) -> None:
    assert xbc_TC.shape[1] == shape.convolved and dt_TH.shape[1] == shape.heads, (
        f"{tuple(xbc_TC.shape)} and {tuple(dt_TH.shape)} are not rows of {shape}"
    )
    assert xbc_TC.stride(1) == 1 and dt_TH.stride(1) == 1, "a row's numbers lie side by side"
    check_state(state_SHPN, shape.heads, shape.head_dim, shape.state)
