"""The Mamba2 recurrence over many tokens of several rows, in chunks.

Owns the chunked form (Dao and Gu, 2024, arxiv.org/abs/2405.21060): within a chunk a causal product of C and B
weighs the inputs as attention would, between chunks the state carries what came before. What a head does with
a token is `mamba2_decode`'s. Chunks end at multiples of `chunk` counted from a row's first token ever, wherever
the rows' tokens here start, so that who goes on from a state that was kept there computes the same bits.

Shapes: T tokens of R rows back to back, H heads, P head size, G groups, N state size, S slots, L a chunk's
tokens, C = H * P + 2 * G * N, I = H * P.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.mamba2_decode import check_rows, constants, step_size
from engine.kernels.state_tile import state_tile
from engine.layers.mamba2_reference import Mamba2Heads, Mamba2Shape


@triton.jit
def mamba2_prefill_kernel(
    xbc_ptr, dt_ptr, a_log_ptr, bias_ptr, skip_ptr, state_ptr, slots_ptr, ends_ptr, positions_ptr, out_ptr,
    xbc_stride, dt_stride, low, high,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tokens before a row's first and behind its last, in its first and last chunk, have a step of 0: they decay
    nothing and add nothing."""
    row, head = tl.program_id(0), tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n, place = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    in_p, in_n = p < HEAD_DIM, n < STATE
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias, skip = tl.load(bias_ptr + head), tl.load(skip_ptr + head).to(tl.float32)
    await_inputs(EARLY)
    release_next(EARLY)
    start, end, position = tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1), tl.load(positions_ptr + row)
    tile, in_tile = state_tile(state_ptr, slots_ptr, row, head, p, n, HEADS, HEAD_DIM, STATE)
    state = tl.load(tile, mask=in_tile, other=0.0)
    b_column = HEADS * HEAD_DIM + head // (HEADS // GROUPS) * STATE
    causal = place[:, None] >= place[None, :]
    for base in range(start - position % CHUNK, end, CHUNK):
        token = base + place
        inside = (token >= start) & (token < end)
        line = token.to(tl.int64)
        raw = tl.load(dt_ptr + line * dt_stride + head, mask=inside, other=0.0)
        step = tl.where(inside, step_size(raw, bias, low, high), 0.0)
        past = tl.cumsum(step * rate, 0)
        total = tl.sum(step * rate, 0)
        rows = xbc_ptr + line[:, None] * xbc_stride
        x = tl.load(rows + head * HEAD_DIM + p[None, :], mask=inside[:, None] & in_p[None, :], other=0.0)
        wanted = inside[:, None] & in_n[None, :]
        b = tl.load(rows + b_column + n[None, :], mask=wanted, other=0.0)
        c = tl.load(rows + b_column + GROUPS * STATE + n[None, :], mask=wanted, other=0.0)
        between = tl.exp(tl.where(causal, past[:, None] - past[None, :], float("-inf")))
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * between * step[None, :]
        out = tl.dot(c, tl.trans(state).to(c.dtype), input_precision="ieee") * tl.exp(past)[:, None]
        out += tl.dot(scores.to(x.dtype), x, input_precision="ieee")
        out += skip * x.to(tl.float32)
        weighed = (x.to(tl.float32) * (step * tl.exp(total - past))[:, None]).to(x.dtype)
        state = state * tl.exp(total) + tl.dot(tl.trans(weighed), b, input_precision="ieee")
        out_at = out_ptr + (line[:, None] * HEADS + head) * HEAD_DIM + p[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & in_p[None, :])
    tl.store(tile, state, mask=in_tile)


def mamba2_prefill(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    heads: Mamba2Heads,
    shape: Mamba2Shape,
    state_SHPN: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor,
    positions_R: torch.Tensor,
    chunk: int,
    out: torch.Tensor | None = None,
    widest: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> torch.Tensor:
    """out_TI. Row r has the tokens [ends_R1[r], ends_R1[r + 1]), the first at `positions_R[r]` of its sequence. A
    program has up to `widest` numbers of a head."""
    check_rows(xbc_TC, dt_TH, state_SHPN, shape)
    out = xbc_TC.new_empty(xbc_TC.shape[0], shape.inner) if out is None else out
    early, rows = is_early(out), slots_R.shape[0]
    block_n = max(16, triton.next_power_of_2(shape.state))
    # Small tiles leave room to load the next chunk ahead.
    small = xbc_TC.dtype != torch.float32 and block_n <= 128
    widest = widest or (64 if small else 32)
    block_p = max(16, min(triton.next_power_of_2(shape.head_dim), widest))
    if rows:
        mamba2_prefill_kernel[(rows, shape.heads, triton.cdiv(shape.head_dim, block_p))](
            xbc_TC, dt_TH, heads.a_log_H, heads.bias_H, heads.skip_H, state_SHPN,
            slots_R, ends_R1, positions_R, out,
            xbc_TC.stride(0), dt_TH.stride(0), heads.low, heads.high, **constants(shape),
            CHUNK=chunk, BLOCK_P=block_p, BLOCK_N=block_n, EARLY=early,
            num_warps=warps or (4 if small else 8), num_stages=stages or (2 if small else 1), **options(early),
        )  # fmt: skip
    return out
