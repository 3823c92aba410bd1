"""States of heads in slots, as programs of recurrent layers hold them: a tile of some of a head's rows.

Owns which tokens a row has and where its state lies, how large a tile is, and the softplus of step sizes and
decays. Ignores what a state learns (`gdn_decode`, `mamba2_decode` and the chunked forms of both).

A program is (row, head, part of the head's state). Shapes: R rows, H heads, P numbers of a head (a state's rows),
N state size (what lies side by side), S slots; the state is fp32 [S, H, P, N].
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

ELEMENTS = 4096
"""Of a state that a program holds where tokens come one after the other."""


@triton.jit
def softplus(value):
    """log(1 + exp(value)), whose digits are kept where the exponential is far below 1."""
    grown = tl.exp(tl.minimum(value, 20.0))
    whole = 1.0 + grown
    small = whole == 1.0
    log1p = tl.where(small, grown, tl.log(whole) * (grown / tl.where(small, 1.0, whole - 1.0)))
    return tl.where(value > 20.0, value, log1p)


@triton.jit
def tokens_of(ends_ptr, row, SEVERAL: tl.constexpr):
    """A row's first token and how many it has: token `row` alone, or those between its ends."""
    first, count = row.to(tl.int64), 1
    if SEVERAL:
        first = tl.load(ends_ptr + row).to(tl.int64)
        count = (tl.load(ends_ptr + row + 1) - first).to(tl.int32)
    return first, count


@triton.jit
def state_tile(state_ptr, slots_ptr, row, head, p_P, n_N, HEADS: tl.constexpr, P: tl.constexpr, N: tl.constexpr):
    """Where a tile of the row's state lies, and which of it is there."""
    slot = tl.load(slots_ptr + row).to(tl.int64)
    tile_PN = state_ptr + (slot * HEADS + head) * (P * N) + p_P[:, None] * N + n_N[None, :]
    return tile_PN, (p_P < P)[:, None] & (n_N < N)[None, :]


def step_blocks(p: int, n: int) -> tuple[int, int]:
    """Sizes of a tile where tokens come one after the other: whole lines, as many as a program holds."""
    block_n = triton.next_power_of_2(n)
    return max(1, min(triton.next_power_of_2(p), ELEMENTS // block_n)), block_n


def check_state(state_SHPN: torch.Tensor, heads: int, p: int, n: int) -> None:
    assert state_SHPN.dtype == torch.float32 and state_SHPN.is_contiguous(), "states are fp32 and contiguous"
    assert state_SHPN.shape[1:] == (heads, p, n), f"{tuple(state_SHPN.shape)} for {heads} heads of {p} by {n}"
