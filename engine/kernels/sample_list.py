"""The ids of a truncated row's bracket, and how much lies above it: one pass, split over the tiles.

Owns reading the parts that reach the bracket. Ignores how it was chosen (`engine.kernels.sample_level`) and
what follows from it (`engine.kernels.sample_cut`). Places in the list are taken by an atomic counter: in
which order ids lie there is left open, and nothing that reads the list depends on it.

Shapes: P parts of a tile, W ids of a part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2
from engine.kernels.sample_edits import INF, edits_of, values_at
from engine.kernels.sample_level import HIGH, LOW, RECORD_WIDTH
from engine.kernels.sample_scan import KEPT_MOMENT, KEPT_SUM, LOG2_E, MAX, PARTS, STATS

ABOVE_SUM, ABOVE_COUNT = KEPT_SUM, KEPT_MOMENT
"""Columns of statistics, by tile, until a later kernel uses them: mass and number of ids above the bracket."""


@triton.jit
def sample_list_kernel(
    logits_ptr, stats_ptr, maxima_ptr, record_ptr, found_ptr, list_ids_ptr, list_values_ptr, slots_ptr, active_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, repetition_ptr, frequency_ptr,
    presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, first_id,
    logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, LONG: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    low = tl.load(record_ptr + row * RECORD_WIDTH + LOW).to(tl.float32)
    high = tl.load(record_ptr + row * RECORD_WIDTH + HIGH).to(tl.float32)
    maxima_P = tl.load(maxima_ptr + (row * tiles + tile) * PARTS + tl.arange(0, PARTS))
    if low == INF:
        return
    bounded = high < INF
    stats_ptr += row * (STATS * tiles)
    if tl.max(maxima_P, 0) < low:
        if bounded:
            tl.store(stats_ptr + ABOVE_SUM * tiles + tile, low * 0.0)
            tl.store(stats_ptr + ABOVE_COUNT * tiles + tile, low * 0.0)
        return
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    position = row
    if EDITS:
        position = tl.load(position_ptr + slot)
    edits = edits_of(
        slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
        mask_row_ptr, bias_ptr, min_until_ptr, EDITS,
    )  # fmt: skip
    width: tl.constexpr = TILE // PARTS
    ids_PW = tile * TILE + tl.arange(0, PARTS)[:, None] * width + tl.arange(0, width)[None, :]
    read_PW = (ids_PW < V) & (maxima_P >= low)[:, None]
    values_PW = values_at(logits_ptr, row * logits_stride, read_PW, ids_PW, edits, EDITS)
    if bounded:
        temperature = tl.load(temperature_ptr + slot).to(tl.float32)
        at_T = tl.arange(0, TILES)
        highest = tl.max(tl.load(stats_ptr + MAX * tiles + at_T, mask=at_T < tiles, other=-INF), 0)
        above_PW = values_PW >= high
        weights_PW = tl.where(above_PW, fast_exp2((values_PW - highest) * (LOG2_E / temperature)), 0.0)
        tl.store(stats_ptr + ABOVE_SUM * tiles + tile, tl.sum(tl.sum(weights_PW, 1), 0))
        tl.store(stats_ptr + ABOVE_COUNT * tiles + tile, tl.sum(tl.sum(above_PW.to(tl.float32), 1), 0))
    listed_PW = (values_PW >= low) & (values_PW < high)
    ones_PW = listed_PW.to(tl.int32)
    count_P = tl.sum(ones_PW, 1)
    count = tl.sum(count_P, 0)
    if count > 0:
        first = tl.atomic_add(found_ptr + row, count, sem="relaxed")
        before_P = tl.cumsum(count_P, 0) - count_P
        place_PW = first + before_P[:, None] + tl.cumsum(ones_PW, 1) - 1
        listed_PW = listed_PW & (place_PW < LONG)
        tl.store(list_ids_ptr + row * LONG + place_PW, ids_PW, mask=listed_PW)
        tl.store(list_values_ptr + row * LONG + place_PW, values_PW, mask=listed_PW)
