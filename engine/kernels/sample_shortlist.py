"""Truncated rows from a short list: top-k, top-p, min-p and the draw among few candidates, sorted.

Owns the choice of a level above which few ids lie, their list, and, where the row's cut falls inside the
list, everything that follows: the ids kept, the token, their mass and its moment. A row whose cut may lie
lower (flat distributions with a high top-p) is left to `engine.kernels.sample_threshold`; rows that are
not truncated to `engine.kernels.sample_epilogue`.

The maxima of small parts of the vocabulary, sorted, say how many ids lie above a level: at least as many
as parts do. So the k-th of them bounds the k-th logit from below, and a level that `REACHING` of them
reach has about as many ids above it as wanted. One pass then lists the ids, in ascending order.

Shapes: M parts, L candidates, C ids of a chunk.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2
from engine.kernels.philox import noise_words_at
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_scan import (
    GREEDY,
    LOG2_E,
    MAX,
    PARTS,
    STATS,
    SUM,
    WORD_SCALE,
    slot_of,
    truncates,
)

CUT, LAST_TIED, MASS, RECORD_MOMENT, TOKEN, SCORE, DRAWN = (tl.constexpr(place) for place in range(7))
"""Columns of a truncated row's record; `DRAWN` is 1 where the token is known."""
RECORD_WIDTH = tl.constexpr(8)
LOG_TINY = tl.constexpr(-708.396418532264)
"""Logarithm of the smallest normal float64: ids of less mass never remain."""


def parts_reaching(parts: int, wanted: int) -> int:
    """How many of `parts` have any of `wanted` ids strewn evenly over them."""
    return max(1, round(parts * (1 - math.exp(-wanted / parts))))


@triton.jit
def row_total(stats_ptr, tiles, at, maxima_T, highest, scale):
    """float64 sum of a row's weights relative to its maximum."""
    sums_T = tl.load(stats_ptr + SUM * tiles + at, mask=at < tiles, other=0.0)
    return tl.sum(tl.where(sums_T > 0.0, sums_T * fast_exp2((maxima_T - highest) * scale), 0.0).to(tl.float64), 0)


@triton.jit
def log_floor_of(min_p):
    return tl.maximum(tl.where(min_p > 0.0, tl.log(min_p), LOG_TINY), LOG_TINY)


@triton.jit
def _list(
    logits_ptr, at, V, edits, stats_ptr, tiles, level, ids_ptr, values_ptr,
    L: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """List the first L ids at or above the level; how many there are in all."""
    found = 0
    tiles_each: tl.constexpr = CHUNK // TILE
    for chunk in range(tl.cdiv(tiles, tiles_each)):
        each = chunk * tiles_each + tl.arange(0, tiles_each)
        maxima = tl.load(stats_ptr + MAX * tiles + each, mask=each < tiles, other=-INF)
        if tl.max(maxima, 0) >= level:
            ids_C = chunk * CHUNK + tl.arange(0, CHUNK)
            values_C = row_values(logits_ptr, at, V, ids_C, edits, EDITS)
            above_C = values_C >= level
            place_C = found + tl.cumsum(above_C.to(tl.int32), 0) - 1
            listed_C = above_C & (place_C < L)
            tl.store(ids_ptr + place_C, ids_C, mask=listed_C)
            tl.store(values_ptr + place_C, values_C, mask=listed_C)
            found += tl.sum(above_C.to(tl.int32), 0)
    return found


@triton.jit
def _descending(ids_ptr, values_ptr, found, L: tl.constexpr):
    """Listed ids and values, the highest value first, ties by the lower id; -inf beyond `found`."""
    at_L = tl.arange(0, L)
    ids_L = tl.load(ids_ptr + at_L, mask=at_L < found, other=0x7FFFFFFF)
    bits_L = tl.load(values_ptr + at_L, mask=at_L < found, other=-INF).to(tl.int32, bitcast=True)
    ordered_L = bits_L ^ ((bits_L >> 31) & 0x7FFFFFFF)
    keys_L = (ordered_L.to(tl.int64) << 32) | (0x7FFFFFFF - ids_L).to(tl.int64)
    keys_L = tl.sort(keys_L, descending=True)
    ids_L = 0x7FFFFFFF - (keys_L & 0x7FFFFFFF).to(tl.int32)
    ordered_L = (keys_L >> 32).to(tl.int32)
    return ids_L, (ordered_L ^ ((ordered_L >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sample_shortlist_kernel(
    logits_ptr, stats_ptr, maxima_ptr, record_ptr, candidate_ids_ptr, candidate_values_ptr, slots_ptr, active_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, repetition_ptr, frequency_ptr,
    presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, first_id,
    logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, L: tl.constexpr, REACHING: tl.constexpr,
    HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    if not truncates(slot, temperature < GREEDY, top_k_ptr, top_p_ptr, min_p_ptr):
        return
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    stats_ptr += row * (STATS * tiles)
    record_ptr += row * RECORD_WIDTH
    tl.store(record_ptr + DRAWN, temperature * 0.0)
    at_T = tl.arange(0, TILES)
    maxima_T = tl.load(stats_ptr + MAX * tiles + at_T, mask=at_T < tiles, other=-INF)
    highest = tl.max(maxima_T, 0)
    if (highest == INF) | (highest == -INF) | (highest != highest):
        return
    position = tl.load(position_ptr + slot)
    edits = edits_of(
        slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
        mask_row_ptr, bias_ptr, min_until_ptr, EDITS,
    )  # fmt: skip
    ids_ptr, values_ptr = candidate_ids_ptr + row * L, candidate_values_ptr + row * L
    logits_at = row * logits_stride
    wide_highest = highest.to(tl.float64)
    floor = (wide_highest + temperature * log_floor_of(min_p)).to(tl.float32)
    floor = floor - tl.abs(floor) * 1e-6

    at_M = tl.arange(0, TILES * PARTS)
    parts = tiles * PARTS
    ranked_M = tl.sort(tl.load(maxima_ptr + row * parts + at_M, mask=at_M < parts, other=-INF), descending=True)
    by_count = (top_k > 0) & (top_k < V)
    reaching = tl.minimum(tl.maximum(tl.where(by_count, top_k, REACHING), 1), parts)
    if (by_count == 0) & (top_p >= 1.0):
        reaching = 0  # min-p alone names its level
    found, level = L + 1, floor
    tries = 4
    while (found > L) & (tries > 0):
        level = tl.max(tl.where(at_M == reaching - 1, ranked_M, -INF), 0)
        level = tl.minimum(tl.maximum(tl.maximum(level, floor), -3.0e38), highest)
        found = _list(
            logits_ptr, logits_at, V, edits, stats_ptr, tiles, level, ids_ptr, values_ptr, L, TILE, CHUNK, EDITS
        )
        tries = tl.where(reaching > 1, tries - 1, 0)
        reaching = reaching // 4
    if found > L:
        return
    tl.debug_barrier()
    ids_L, values_L = _descending(ids_ptr, values_ptr, found, L)
    rank_L = tl.arange(0, L)
    present_L = rank_L < found
    below_L = tl.where(present_L, (values_L.to(tl.float64) - wide_highest) / temperature, -INF)
    mass_L = tl.where(present_L, tl.exp(below_L), 0.0)
    # The cut is inside the list if some filter ends it there; the list is whole above `level`.
    kept_L = present_L & (below_L >= log_floor_of(min_p))
    closed = level <= floor
    total = row_total(stats_ptr, tiles, at_T, maxima_T, highest, LOG2_E / temperature.to(tl.float32))
    known = True
    if by_count:
        known = found >= top_k
        closed = closed | known
        kept_L = kept_L & (rank_L < top_k)
        total = tl.sum(tl.where(rank_L < top_k, mass_L, 0.0), 0)
    if (top_p < 1.0) & known:
        before_L = tl.cumsum(mass_L, 0) - mass_L
        needed = top_p * total
        kept_L = kept_L & ((before_L < needed) | (rank_L == 0))
        closed = closed | (tl.sum(mass_L, 0) >= needed)
    if not (closed & known):
        return
    count = tl.sum(kept_L.to(tl.int32), 0)
    seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
    words_L = noise_words_at(seed, position, tl.where(present_L, ids_L, 0) + first_id)
    rest_L = (words_L.to(tl.float64) + 0.5) * -WORD_SCALE + 1.0
    scores_L = tl.where(kept_L, values_L.to(tl.float64) / temperature - tl.log(-tl.log(rest_L)), -INF)
    best = tl.max(scores_L, 0)
    token = tl.min(tl.where(scores_L == best, ids_L, 0x7FFFFFFF), 0)
    is_last_L = rank_L == count - 1
    tl.store(record_ptr + CUT, tl.max(tl.where(is_last_L, values_L, -INF), 0).to(tl.float64))
    tl.store(record_ptr + LAST_TIED, tl.max(tl.where(is_last_L, ids_L, 0), 0).to(tl.float64))
    tl.store(record_ptr + MASS, tl.sum(tl.where(kept_L, mass_L, 0.0), 0))
    tl.store(record_ptr + RECORD_MOMENT, tl.sum(tl.where(kept_L, mass_L * below_L, 0.0), 0))
    tl.store(record_ptr + TOKEN, token.to(tl.float64))
    tl.store(record_ptr + SCORE, best)
    tl.store(record_ptr + DRAWN, temperature * 0.0 + 1.0)
