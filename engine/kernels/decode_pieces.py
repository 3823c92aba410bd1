"""Cuts decode rows at fixed positions, so that sharing changes no bits.

Owns the pieces of the deterministic engine: where they begin and end, and the list of those that every
row must read for itself, made on the device from the lengths there. A row's whole pieces become stored
states, whether it reads them alone or with others; what lies behind the last one is its tail. Both
follow from its length alone. Ignores which rows share (`engine.attention.fixed_prefixes`) and what is
computed over a piece (`prefix_attention`).

Shapes: B rows, X pieces.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two

SHORT = 256
"""Tokens of a piece. Short ones let short prompts share."""

LONG = 2048
"""Tokens of a piece from LONG_FROM on, which keeps the number of states of long rows low. A row's tail
is shorter than the piece it would become, or as long."""

LONG_FROM = 4096


def whole_pieces(end: int) -> int:
    """Pieces that end at or before token `end`."""
    return min(end, LONG_FROM) // SHORT + max(0, end - LONG_FROM) // LONG


def piece_start(piece: int) -> int:
    """First token of a piece, which the one before ends at."""
    short = LONG_FROM // SHORT
    return min(piece, short) * SHORT + max(0, piece - short) * LONG


def cut_pieces_reference(
    seq_lens_B: torch.Tensor, shared_B: torch.Tensor, pieces_X8: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(own_start_B, parts_B, pieces_X8 as far as they are listed), on the CPU; the arguments of `cut_pieces`."""
    listed = pieces_X8[:count].tolist()
    wholes = [whole_pieces(max(0, length - 1)) for length in seq_lens_B.tolist()]
    for row, whole in enumerate(wholes):
        for piece in range(int(shared_B[row]), whole):
            listed.append([row, 1, piece_start(piece), piece_start(piece + 1), row, piece, 0, 0])
    starts = torch.tensor([piece_start(whole) for whole in wholes], dtype=torch.int32)
    return starts, torch.tensor(wholes, dtype=torch.int32), torch.tensor(listed, dtype=torch.int32).view(-1, 8)


@triton.jit
def _piece_start(piece, SHORT: tl.constexpr, LONG: tl.constexpr, LONG_FROM: tl.constexpr):
    FEW: tl.constexpr = LONG_FROM // SHORT
    return tl.minimum(piece, FEW) * SHORT + tl.maximum(piece - FEW, 0) * LONG


@triton.jit(
    do_not_specialize=["num_rows", "capacity"],
    do_not_specialize_on_alignment=[
        "seq_lens_ptr",
        "shared_ptr",
        "pieces_ptr",
        "counts_ptr",
        "own_start_ptr",
        "parts_ptr",
    ],
)
def _cut_pieces_kernel(
    seq_lens_ptr,
    shared_ptr,
    pieces_ptr,
    counts_ptr,
    own_start_ptr,
    parts_ptr,
    num_rows,
    capacity,
    BLOCK_B: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
    LONG_FROM: tl.constexpr,
):
    row_B = tl.arange(0, BLOCK_B)
    live_B = row_B < num_rows
    end_B = tl.maximum(tl.load(seq_lens_ptr + row_B, mask=live_B, other=0) - 1, 0)
    shared_B = tl.load(shared_ptr + row_B, mask=live_B, other=0)
    whole_B = tl.minimum(end_B, LONG_FROM) // SHORT + tl.maximum(end_B - LONG_FROM, 0) // LONG
    tl.store(own_start_ptr + row_B, _piece_start(whole_B, SHORT, LONG, LONG_FROM), mask=live_B)
    tl.store(parts_ptr + row_B, whole_B, mask=live_B)
    own_B = tl.maximum(whole_B - shared_B, 0)
    at_B = tl.load(counts_ptr) + tl.cumsum(own_B, 0) - own_B
    for index in range(0, tl.max(own_B, 0)):
        here_B = live_B & (index < own_B) & (at_B + index < capacity)
        piece_B = shared_B + index
        piece_ptr_B = pieces_ptr + (at_B + index) * 8
        tl.store(piece_ptr_B, row_B, mask=here_B)
        tl.store(piece_ptr_B + 1, row_B * 0 + 1, mask=here_B)
        tl.store(piece_ptr_B + 2, _piece_start(piece_B, SHORT, LONG, LONG_FROM), mask=here_B)
        tl.store(piece_ptr_B + 3, _piece_start(piece_B + 1, SHORT, LONG, LONG_FROM), mask=here_B)
        tl.store(piece_ptr_B + 4, row_B, mask=here_B)
        tl.store(piece_ptr_B + 5, piece_B, mask=here_B)
    tl.store(counts_ptr + 1, tl.minimum(tl.load(counts_ptr) + tl.sum(own_B, 0), capacity))


def cut_pieces(
    seq_lens_B: torch.Tensor,
    shared_B: torch.Tensor,
    pieces_X8: torch.Tensor,
    counts_2: torch.Tensor,
    own_start_B: torch.Tensor,
    parts_B: torch.Tensor,
) -> None:
    """List what rows read for themselves behind the counts_2[0] pieces listed already; one launch.

    Of each row's pieces the first shared_B are listed. counts_2[1] receives the number of all,
    `own_start_B` and `parts_B` where tails start and how many pieces come before.
    """
    rows = seq_lens_B.shape[0]
    _cut_pieces_kernel[(1,)](
        seq_lens_B,
        shared_B,
        pieces_X8,
        counts_2,
        own_start_B,
        parts_B,
        rows,
        pieces_X8.shape[0],
        BLOCK_B=max(16, power_of_two(rows)),
        SHORT=SHORT,
        LONG=LONG,
        LONG_FROM=LONG_FROM,
    )
