"""Copies of recurrent states on the grid, inside a captured step.

Owns the copy of a row's state to its partner's slot whenever the row stands on the grid: all tensors of all
layers in one launch. Ignores who has which slot. Rows that are padding or have finished have a length of 0.

Shapes: B rows, L state tensors, S slots.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PARTS = 8
"""Programs that share the copy of a row's tensor."""
BLOCK = 2048


def copy_on_grid_reference(
    tensors: Sequence[torch.Tensor], lengths_B: torch.Tensor, live_B: torch.Tensor, partners_B: torch.Tensor, grid: int
) -> None:
    """As `copy_on_grid`."""
    on_grid_B = (lengths_B > 0) & (lengths_B % grid == 0)
    for tensor in tensors:
        tensor[partners_B[on_grid_B]] = tensor[live_B[on_grid_B]]


@triton.jit
def copy_on_grid_kernel(
    addresses_ptr, words_ptr, lengths_ptr, live_ptr, partners_ptr, grid,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    length = tl.load(lengths_ptr + row)
    if (length > 0) & (length % grid == 0):
        words = tl.load(words_ptr + tl.program_id(1))
        base = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int16))
        source = base + tl.load(live_ptr + row).to(tl.int64) * words
        target = base + tl.load(partners_ptr + row).to(tl.int64) * words
        for first in range(tl.program_id(2) * BLOCK, words, PARTS * BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(target + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)


class StateAddresses:
    """Where state tensors [S, ...] lie, which they do for life, and how many 16-bit words a slot of each has."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device
        assert all(tensor.is_contiguous() and tensor[0].nbytes % 2 == 0 for tensor in tensors), "slots are words"
        self.tensors = tensors
        self.addresses_L = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=device)
        self.words_L = torch.tensor([tensor[0].nbytes // 2 for tensor in tensors], dtype=torch.int64, device=device)


def copy_on_grid(
    states: StateAddresses, lengths_B: torch.Tensor, live_B: torch.Tensor, partners_B: torch.Tensor, grid: int
) -> None:
    """Rows whose length is a multiple of `grid` and not 0: the states in `live_B` become those in `partners_B`."""
    copy_on_grid_kernel[(lengths_B.shape[0], len(states.tensors), PARTS)](
        states.addresses_L, states.words_L, lengths_B, live_B, partners_B, grid,
        PARTS=PARTS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
