"""The ids of a truncated row's bracket, and how much lies above it: one pass, split over segments of tiles.

Owns reading the parts that reach the bracket, one after the other in programs of one warp, which needs no
barrier to number the ids it finds. Ignores how it was chosen (`engine.kernels.sample_level`) and
what follows from it (`engine.kernels.sample_cut`). Places in the list are taken by an atomic counter: in
which order ids lie there is left open, and nothing that reads the list depends on it.

Shapes: P parts of a segment, W ids of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_level import HIGH, LOW, RECORD_WIDTH
from engine.kernels.sample_scan import KEPT_MOMENT, KEPT_SUM, LOG2_E, MAX, PARTS, STATS

ABOVE_SUM, ABOVE_COUNT = KEPT_SUM, KEPT_MOMENT
"""Columns of statistics until a later kernel uses them: mass and number of ids above the bracket, by segment."""
TILES_EACH = tl.constexpr(2)
"""Tiles of a segment."""


@triton.jit
def sample_list_kernel(
    logits_ptr, stats_ptr, maxima_ptr, record_ptr, found_ptr, list_ids_ptr, list_values_ptr, slots_ptr, active_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, repetition_ptr, frequency_ptr,
    presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr,
    ahead_width, first_id,
    logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, LONG: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    low = tl.load(record_ptr + row * RECORD_WIDTH + LOW).to(tl.float32)
    high = tl.load(record_ptr + row * RECORD_WIDTH + HIGH).to(tl.float32)
    at_P = tl.arange(0, TILES_EACH * PARTS)
    part_P = segment * (TILES_EACH * PARTS) + at_P
    maxima_P = tl.load(maxima_ptr + row * (tiles * PARTS) + part_P, mask=part_P < tiles * PARTS, other=-INF)
    if low == INF:
        return
    width: tl.constexpr = TILE // PARTS
    bounded = high < INF
    reached_P = maxima_P >= low
    at = tl.min(tl.where(reached_P, at_P, TILES_EACH * PARTS), 0)
    above_W, mass_W = tl.zeros((width,), tl.int32), tl.zeros((width,), tl.float32)
    stats_ptr += row * (STATS * tiles)
    if at < TILES_EACH * PARTS:
        slot = row
        if HAS_SLOTS:
            slot = tl.load(slots_ptr + row).to(tl.int64)
        position = row
        if EDITS:
            position = tl.load(position_ptr + slot)
        edits = edits_of(
            slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
            mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
        )  # fmt: skip
        highest, scale = low, low * 0.0
        if bounded:
            scale = LOG2_E / tl.load(temperature_ptr + slot).to(tl.float32)
            at_T = tl.arange(0, TILES)
            highest = tl.max(tl.load(stats_ptr + MAX * tiles + at_T, mask=at_T < tiles, other=-INF), 0)
        while at < TILES_EACH * PARTS:
            ids_W = (segment * (TILES_EACH * PARTS) + at) * width + tl.arange(0, width)
            values_W = row_values(logits_ptr, row * logits_stride, V, ids_W, edits, EDITS)
            if bounded:
                over_W = values_W >= high
                above_W += over_W.to(tl.int32)
                mass_W += tl.where(over_W, fast_exp2((values_W - highest) * scale), 0.0)
            listed_W = (values_W >= low) & (values_W < high)
            order_W = tl.cumsum(listed_W.to(tl.int32), 0)
            count = tl.max(order_W, 0)
            if count > 0:
                place_W = tl.atomic_add(found_ptr + row, count, sem="relaxed") + order_W - 1
                listed_W = listed_W & (place_W < LONG)
                tl.store(list_ids_ptr + row * LONG + place_W, ids_W, mask=listed_W)
                tl.store(list_values_ptr + row * LONG + place_W, values_W, mask=listed_W)
            at = tl.min(tl.where(reached_P & (at_P > at), at_P, TILES_EACH * PARTS), 0)
    if bounded:
        tl.store(stats_ptr + ABOVE_SUM * tiles + segment, tl.sum(mass_W, 0))
        tl.store(stats_ptr + ABOVE_COUNT * tiles + segment, tl.sum(above_W, 0).to(tl.float32))
