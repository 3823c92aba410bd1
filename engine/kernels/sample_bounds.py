"""What a truncated row keeps, where its cut is known and its token is not: bounds and sums of every tile.

Owns, per tile, an upper bound of the best perturbed logit among the ids kept, their mass and its first
moment, both relative to the row's maximum. `engine.kernels.sample_epilogue` draws from these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_level import CUT, KNOWN, LAST_TIED, RECORD_WIDTH, STATE
from engine.kernels.sample_scan import (
    BEST,
    KEPT_MOMENT,
    KEPT_SUM,
    LOG2_E,
    MAX,
    STATS,
    bound_of,
    largest_ratio,
    tile_ids,
    tile_words,
)
from engine.kernels.sample_threshold import is_kept

TILES_EACH = tl.constexpr(4)
"""Tiles of a program, so that few programs leave at once where there is nothing to do."""


@triton.jit
def sample_bounds_kernel(
    logits_ptr, stats_ptr, record_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, position_ptr, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
    mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, first_id, logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    record_ptr += row * RECORD_WIDTH
    if tl.load(record_ptr + STATE) != KNOWN:
        return
    cut, last_tied = tl.load(record_ptr + CUT), tl.load(record_ptr + LAST_TIED).to(tl.int32)
    stats_ptr += row * (STATS * tiles)
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(position_ptr + slot)
    seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
    inverse = 1.0 / tl.load(temperature_ptr + slot).to(tl.float32)
    edits = edits_of(
        slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
        mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
    )  # fmt: skip
    at_T = tl.arange(0, TILES)
    highest = tl.max(tl.load(stats_ptr + MAX * tiles + at_T, mask=at_T < tiles, other=-INF), 0)
    for tile in range(segment * TILES_EACH, tl.minimum(segment * TILES_EACH + TILES_EACH, tiles)):
        best, mass, moment = highest * 0.0 - INF, highest * 0.0, highest * 0.0
        if tl.load(stats_ptr + MAX * tiles + tile).to(tl.float64) >= cut:
            ids = tile_ids(tile, TILE)
            values = row_values(logits_ptr, row * logits_stride, V, ids, edits, EDITS)
            exponents = tl.where(is_kept(values, ids, cut, last_tied), (values - highest) * inverse, -INF)
            weights = fast_exp2(exponents * LOG2_E)
            mass = tl.sum(tl.sum(weights, 1), 0)
            moment = tl.sum(tl.sum(tl.where(weights > 0.0, weights * exponents, 0.0), 1), 0)
            words = tile_words(seed, position, first_id, tile, TILE)
            best = bound_of(largest_ratio(weights, words), highest, inverse)
        out = stats_ptr + tile
        tl.store(out + BEST * tiles, best)
        tl.store(out + KEPT_SUM * tiles, mass)
        tl.store(out + KEPT_MOMENT * tiles, moment)
