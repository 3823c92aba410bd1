"""Cuts a step's decode rows into work items of about equal length.

Owns the split of every row's own tokens, made on the device from the lengths there, so that one
captured graph serves any lengths. Ignores what is computed over an item.

An item is 8 int32: row, first token, end token, index of the split, number of splits of its row,
stored prefix states of its row, and two unused. Items of a row are consecutive. A row of length 0 is
one empty item; unused items have row -1.

Shapes: B rows, W items.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import ceil_div, power_of_two

ITEM = 8


def cut_rows_reference(
    seq_lens_B: torch.Tensor,
    own_start_B: torch.Tensor,
    prefix_parts_B: torch.Tensor,
    num_items: int,
    extra: int,
    min_split: int,
    multiple: int,
    fixed_splits: int = 0,
    window: int = 0,
) -> torch.Tensor:
    """items_W8, on the CPU; the arguments of `cut_rows`."""
    ends, starts = seq_lens_B.tolist(), own_start_B.tolist()
    if window:
        starts = [max(start, end - window) for start, end in zip(starts, ends, strict=True)]
    owns = [max(0, end - start) for end, start in zip(ends, starts, strict=True)]
    items = []
    for row, own in enumerate(owns):
        pieces = fixed_splits or extra
        wanted = ceil_div(own if fixed_splits else sum(owns), pieces)
        length = max(min_split, ceil_div(wanted, multiple) * multiple)
        count = max(1, ceil_div(own, length))
        length = max(ceil_div(ceil_div(own, count), multiple) * multiple, multiple)
        count = max(1, ceil_div(own, length))
        parts = int(prefix_parts_B[row]) if ends[row] > 0 else 0
        for split in range(count):
            first = ends[row] - own + split * length
            items.append([row, first, min(first + length, ends[row]), split, count, parts, 0, 0])
    items += [[-1] + [0] * 7] * (num_items - len(items))
    return torch.tensor(items, dtype=torch.int32)


@triton.jit
def _ceil_div(a, b):
    return (a + b - 1) // b


@triton.jit(
    do_not_specialize=["num_rows", "num_items", "extra"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "own_start_ptr", "prefix_parts_ptr"],
)
def _cut_kernel(
    seq_lens_ptr,
    own_start_ptr,
    prefix_parts_ptr,
    items_ptr,
    num_rows,
    num_items,
    extra,
    BLOCK_B: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    row_B = tl.arange(0, BLOCK_B)
    live_B = row_B < num_rows
    end_B = tl.load(seq_lens_ptr + row_B, mask=live_B, other=0)
    start_B = tl.minimum(tl.load(own_start_ptr + row_B, mask=live_B, other=0), end_B)
    if WINDOW > 0:
        start_B = tl.maximum(start_B, end_B - WINDOW)
    parts_B = tl.load(prefix_parts_ptr + row_B, mask=live_B, other=0)
    parts_B = tl.where(end_B > 0, parts_B, 0)
    own_B = end_B - start_B
    if FIXED_SPLITS > 0:
        wanted_B = _ceil_div(own_B, FIXED_SPLITS)
    else:
        wanted_B = _ceil_div(tl.sum(own_B, 0), extra) + own_B * 0
    length_B = tl.maximum(_ceil_div(wanted_B, MULTIPLE) * MULTIPLE, MIN_SPLIT)
    count_B = tl.maximum(_ceil_div(own_B, length_B), 1)
    # Equal pieces rather than full ones and a remainder.
    length_B = tl.maximum(_ceil_div(_ceil_div(own_B, count_B), MULTIPLE) * MULTIPLE, MULTIPLE)
    count_B = tl.maximum(_ceil_div(own_B, length_B), 1)
    count_B = tl.where(live_B, count_B, 0)
    item_B = tl.cumsum(count_B, 0) - count_B
    used = tl.sum(count_B, 0)
    for split in range(0, tl.max(count_B, 0)):
        here_B = live_B & (split < count_B)
        lo_B = start_B + split * length_B
        at_B = items_ptr + (item_B + split) * 8
        tl.store(at_B, row_B, mask=here_B)
        tl.store(at_B + 1, lo_B, mask=here_B)
        tl.store(at_B + 2, tl.minimum(lo_B + length_B, end_B), mask=here_B)
        tl.store(at_B + 3, row_B * 0 + split, mask=here_B)
        tl.store(at_B + 4, count_B, mask=here_B)
        tl.store(at_B + 5, parts_B, mask=here_B)
    for first in range(used, num_items, BLOCK_B):
        tl.store(items_ptr + (first + row_B) * 8, row_B * 0 - 1, mask=first + row_B < num_items)


def cut_rows(
    seq_lens_B: torch.Tensor,
    own_start_B: torch.Tensor,
    prefix_parts_B: torch.Tensor,
    items_W8: torch.Tensor,
    extra: int,
    min_split: int,
    multiple: int,
    fixed_splits: int = 0,
    window: int = 0,
) -> None:
    """Fill `items_W8` for rows whose tokens [own_start, seq_len) are their own, or the last `window` of them; one
    launch.

    With `fixed_splits` a row's cut depends on its length alone and W must hold every row's pieces,
    of which there are at most that many; without, lengths share `extra` pieces beyond one a row and
    W is B + extra.
    """
    rows, items = seq_lens_B.shape[0], items_W8.shape[0]
    assert items >= (rows if fixed_splits else rows + extra), f"{items} items for {rows} rows"
    assert min_split % multiple == 0, f"pieces of {min_split} are no multiple of {multiple}"
    _cut_kernel[(1,)](
        seq_lens_B,
        own_start_B,
        prefix_parts_B,
        items_W8,
        rows,
        items,
        extra,
        BLOCK_B=max(16, power_of_two(rows)),
        MIN_SPLIT=min_split,
        MULTIPLE=multiple,
        FIXED_SPLITS=fixed_splits,
        WINDOW=window,
    )
