"""Which verify rows belong to which adapter, once it is decided how many each row of a round has.

Owns the tables that adapters' kernels walk (`lora.segments.Tiles`), filled on the device: entries by slot,
and tiles of them. Ignores factors, and verify rows themselves (`engine.kernels.round_rows`), whose order it
follows. What no row of the round owns is the base's.

The host knows slots and so their order; only counts are the device's. The first place in that order stands
for the verify rows behind the last row.

Shapes: B rows of a round, J = 1 + B places, R verify rows, N tiles.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next
from lora.segments import Segments, Tiles


def tile_adapters_reference(
    adapters_B: np.ndarray, window_B: torch.Tensor, lens_B: torch.Tensor, verify: int
) -> tuple[Segments, np.ndarray]:
    """The order by slot that `tile_adapters` leaves in tables, and each verify row's slot; the host steers."""
    slots_R, at = np.zeros(verify, dtype=np.int64), 0
    for slot, window, length in zip(adapters_B.tolist(), window_B.tolist(), lens_B.tolist(), strict=True):
        count = 1 + length if window >= 0 else 0
        slots_R[at : at + count] = slot
        at += count
    behind = np.arange(verify) >= at
    order_R = np.lexsort((np.arange(verify), ~behind, slots_R))
    runs = Segments.of(slots_R, with_base=True).runs
    return Segments(order_R, runs), slots_R


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b)


@triton.jit
def _tiles_kernel(
    order_ptr, slots_ptr, window_ptr, lens_ptr, entries_ptr, tiles_ptr, rows, verify, tiles,
    BLOCK: tl.constexpr, PLACES: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    place = tl.program_id(0)
    j_J = tl.arange(0, PLACES)
    real_J = (j_J > 0) & (j_J <= rows)
    row_J = tl.load(order_ptr + j_J - 1, mask=real_J, other=-1)
    window_J = tl.load(window_ptr + row_J, mask=real_J, other=-1)
    lens_J = tl.load(lens_ptr + row_J, mask=real_J, other=0).to(tl.int32)
    counts_J = tl.where(window_J >= 0, lens_J + 1, 0)
    used = tl.sum(counts_J, 0)
    counts_J = tl.where(j_J == 0, _greater(verify - used, 0), counts_J)
    # A run begins where the slot is another than before; the first place is the base's.
    slot_J = tl.load(slots_ptr + j_J - 1, mask=real_J, other=0)
    before_J = tl.load(slots_ptr + j_J - 2, mask=real_J & (j_J > 1), other=0)
    after_J = tl.load(slots_ptr + j_J, mask=j_J < rows, other=-1)
    first_J = (j_J == 0) | (real_J & (slot_J != before_J))
    last_J = (j_J <= rows) & (slot_J != after_J)
    ends_J = tl.cumsum(counts_J, 0)
    begins_J = tl.associative_scan(tl.where(first_J, ends_J - counts_J, 0), 0, _greater)
    tiles_J = tl.where(last_J, (ends_J - begins_J + BLOCK - 1) // BLOCK, 0)

    slot = tl.sum(tl.where(j_J == place, slot_J, 0), 0)
    row = tl.sum(tl.where(j_J == place, row_J, 0), 0)
    entry = tl.sum(tl.where(j_J < place, counts_J, 0), 0)
    start = tl.where(place == 0, used, tl.sum(tl.where(real_J & (row_J < row), counts_J, 0), 0))
    count = tl.sum(tl.where(j_J == place, counts_J, 0), 0)
    k_W = tl.arange(0, WIDE)
    for done in range(0, count, WIDE):
        inside_W = (done + k_W < count) & (entry + done + k_W < verify)
        tl.store(entries_ptr + entry + done + k_W, start + done + k_W, mask=inside_W)
    tile = tl.sum(tl.where(j_J < place, tiles_J, 0), 0)
    if tl.sum(tl.where(j_J == place, first_J.to(tl.int32), 0), 0) > 0:
        whole = tl.sum(tl.where((j_J <= rows) & (slot_J == slot), counts_J, 0), 0)
        for done in range(0, (whole + BLOCK - 1) // BLOCK, WIDE):
            inside_W = ((done + k_W) * BLOCK < whole) & (tile + done + k_W < tiles)
            at_W = tiles_ptr + (tile + done + k_W) * 3
            tl.store(at_W, slot + k_W * 0, mask=inside_W)
            tl.store(at_W + 1, entry + (done + k_W) * BLOCK, mask=inside_W)
            tl.store(at_W + 2, tl.minimum(BLOCK, whole - (done + k_W) * BLOCK), mask=inside_W)
    if place == rows:
        # Tiles that nobody needs have no rows.
        for done in range(tl.sum(tiles_J, 0), tiles, WIDE):
            at_W = tiles_ptr + (done + k_W) * 3
            inside_W = done + k_W < tiles
            for field in tl.static_range(3):
                tl.store(at_W + field, k_W * 0, mask=inside_W)


def tile_adapters(
    order_B: torch.Tensor, slots_B: torch.Tensor, window_B: torch.Tensor, lens_B: torch.Tensor, verify: int, out: Tiles
) -> None:
    """Describe `verify` packed verify rows, of which row b has 1 + lens_B[b], or none where its window is negative.
    `order_B` int32 are the rows by their adapters' slots and then their numbers, `slots_B` int32 those slots in that
    order; `out` has room for however many rows each slot has (`lora.segments.most_tiles`)."""
    rows = order_B.shape[0]
    assert out.rows_T.shape[0] == verify, f"tables of {out.rows_T.shape[0]} rows, {verify} verify rows"
    early = is_early(order_B)
    _tiles_kernel[(rows + 1,)](
        order_B, slots_B, window_B, lens_B, out.rows_T, out.tiles_N3, rows, verify, out.num_tiles,
        BLOCK=out.block, PLACES=power_of_two(rows + 1), WIDE=64, EARLY=early, num_warps=1, **options(early),
    )  # fmt: skip
