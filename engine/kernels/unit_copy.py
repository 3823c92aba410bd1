"""Whole units between a pool and rows of a buffer.

Owns one launch that gathers units (pages with all that lies under their ids, slots of states) of every tensor into
rows, or scatters rows back. Ignores what units hold and where rows travel.

Shapes: N units, L tensors, X bytes of a row.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

PARTS = 4
"""Programs that share a unit's copy of one tensor."""
BLOCK = 2048


def gather_units_reference(
    tensors: Sequence[torch.Tensor], starts: Sequence[int], ids_N: torch.Tensor, rows_NX: torch.Tensor
) -> None:
    """Bytes [N units, ...] of each tensor go to the rows from `starts` on."""
    for tensor, start in zip(tensors, starts, strict=True):
        flat = _flat(tensor)
        _columns(rows_NX, start, flat).copy_(flat.index_select(0, ids_N))


def scatter_units_reference(
    tensors: Sequence[torch.Tensor], starts: Sequence[int], ids_N: torch.Tensor, rows_NX: torch.Tensor
) -> None:
    """The way back."""
    for tensor, start in zip(tensors, starts, strict=True):
        flat = _flat(tensor)
        flat.index_copy_(0, ids_N, _columns(rows_NX, start, flat))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(tensor.shape[0], -1)
    return flat.view(torch.int32 if flat[0].nbytes % 4 == 0 and flat.itemsize <= 4 else torch.uint8)


def _columns(rows_NX: torch.Tensor, start: int, flat: torch.Tensor) -> torch.Tensor:
    return rows_NX[:, start : start + flat[0].nbytes].view(flat.dtype)


@triton.jit
def unit_copy_kernel(
    addresses_ptr, words_ptr, starts_ptr, ids_ptr, rows_ptr, row_words,
    SCATTER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    unit, tensor = tl.program_id(0), tl.program_id(1)
    words = tl.load(words_ptr + tensor)
    pool = tl.load(addresses_ptr + tensor).to(tl.pointer_type(tl.int16))
    pool += tl.load(ids_ptr + unit).to(tl.int64) * words
    row = rows_ptr + unit.to(tl.int64) * row_words + tl.load(starts_ptr + tensor)
    for first in range(tl.program_id(2) * BLOCK, words, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        if SCATTER:
            tl.store(pool + at, tl.load(row + at, mask=at < words, other=0), mask=at < words)
        else:
            tl.store(row + at, tl.load(pool + at, mask=at < words, other=0), mask=at < words)


class UnitAddresses:
    """Where tensors [units, ...] lie, which they do for life, the 16-bit words of a unit of each, and where in a
    row they start."""

    def __init__(self, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        device = tensors[0].device
        assert all(tensor.is_contiguous() and tensor[0].nbytes % 2 == 0 for tensor in tensors), "units are words"
        self.count = len(tensors)
        columns = [
            [tensor.data_ptr() for tensor in tensors],
            [tensor[0].nbytes // 2 for tensor in tensors],
            [start // 2 for start in starts],
        ]
        self.table_3L = torch.tensor(columns, dtype=torch.int64, device=device)


def unit_copy(units: UnitAddresses, ids_N: torch.Tensor, rows_NX: torch.Tensor, scatter: bool) -> None:
    """Gather the units `ids_N` into rows (uint8, contiguous), or scatter rows to them."""
    words_NX = rows_NX.view(torch.int16)
    unit_copy_kernel[(ids_N.shape[0], units.count, PARTS)](
        units.table_3L[0], units.table_3L[1], units.table_3L[2], ids_N, words_NX, words_NX.shape[1],
        SCATTER=scatter, PARTS=PARTS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
