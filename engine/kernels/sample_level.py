"""Between which logits a truncated row is cut: a bracket [low, high) that very likely holds the cut, and few ids.

Owns the choice of the bracket from what is cheap to know: the maxima of small parts of the vocabulary, and
a sample of the row's logits. Ignores whether the choice was right: that is checked on the ids themselves
(`engine.kernels.sample_cut`), and a row that was misjudged is searched whole
(`engine.kernels.sample_threshold`).

At least as many ids lie above a level as parts reach it, so the k-th highest maximum of a part bounds the
k-th logit from below. Further down the sample counts: groups of 8 ids, evenly spaced, whose number or mass
below a level stands for the row's within `CAUTION` standard deviations. A bracket without an upper end
holds every id that the row keeps, and the token is then drawn among them.

Shapes: M parts, G groups of the sample.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# Conditions known when compiling stay apart from those that are not.
# ruff: noqa: SIM102
from __future__ import annotations

import math

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_scan import GREEDY, LOG2_E, MAX, PARTS, STATS, SUM, slot_of, truncates

CUT, LAST_TIED, MASS, RECORD_MOMENT, TOKEN, SCORE, STATE, LOW, HIGH = (tl.constexpr(place) for place in range(9))
"""Columns of a truncated row's record."""
OPEN, KNOWN, DRAWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""States of a record: nothing is known, the cut is, or the token too."""
RECORD_WIDTH = tl.constexpr(10)
LOG_TINY = tl.constexpr(-708.396418532264)
"""Logarithm of the smallest normal float64: ids of less mass never remain."""
CAUTION = tl.constexpr(4.0)
HALVINGS = tl.constexpr(14)


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
def _level_holding(maxima_M, amounts_M, wanted, low, highest):
    """A level at which maxima hold at least `wanted` of their amounts, near the highest such; `low` has it."""
    high = highest
    if tl.sum(tl.where(maxima_M >= highest, amounts_M, 0.0), 0) >= wanted:
        low = highest
    for _ in range(HALVINGS):
        middle = low + (high - low) * 0.5
        enough = tl.sum(tl.where(maxima_M >= middle, amounts_M, 0.0), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _sum(x_G8):
    return tl.sum(tl.sum(x_G8, 1), 0)


@triton.jit
def _least(x_G8):
    """The lowest of the finite."""
    return tl.min(tl.min(tl.where(x_G8 > -INF, x_G8, INF), 1), 0)


@triton.jit
def _count_bracket(sample_G8, share, wanted, low, highest):
    """Levels above which surely at least, and at most, `wanted` ids lie; the number above the lower."""
    sampled = wanted / share
    count = _sum((sample_G8 > -INF).to(tl.float32))
    if count - CAUTION * tl.sqrt(count) - 1.0 >= sampled:
        low = tl.maximum(low, _least(sample_G8))
    low_a, low_b, high_a, high_b = low, highest, low, highest
    for _ in range(HALVINGS):
        middle, above = low_a + (low_b - low_a) * 0.5, high_a + (high_b - high_a) * 0.5
        count = _sum((sample_G8 >= middle).to(tl.float32))
        enough = count - CAUTION * tl.sqrt(count) - 1.0 >= sampled
        low_a, low_b = tl.where(enough, middle, low_a), tl.where(enough, low_b, middle)
        count = _sum((sample_G8 >= above).to(tl.float32))
        few = count + CAUTION * tl.sqrt(count) + 1.0 <= sampled
        high_a, high_b = tl.where(few, high_a, above), tl.where(few, above, high_b)
    return low_a, high_b


@triton.jit
def _below(sample_G8, weights_G8, level):
    """Mass of the sample below a level, and its standard deviation."""
    below_G8 = tl.where(sample_G8 < level, weights_G8, 0.0)
    return _sum(below_G8), tl.sqrt(_sum(below_G8 * below_G8))


@triton.jit
def _mass_bracket(sample_G8, weights_G8, spare, low, highest):
    """Levels below which surely at most, and at least, `spare` of the sample's mass lies."""
    low = tl.maximum(low, _least(sample_G8))
    low_a, low_b, high_a, high_b = low, highest, low, highest
    for _ in range(HALVINGS):
        middle, above = low_a + (low_b - low_a) * 0.5, high_a + (high_b - high_a) * 0.5
        mass, deviation = _below(sample_G8, weights_G8, middle)
        little = mass + CAUTION * deviation <= spare
        low_a, low_b = tl.where(little, middle, low_a), tl.where(little, low_b, middle)
        mass, deviation = _below(sample_G8, weights_G8, above)
        much = mass - CAUTION * deviation >= spare
        high_a, high_b = tl.where(much, high_a, above), tl.where(much, above, high_b)
    return low_a, high_b


@triton.jit
def sample_level_kernel(
    logits_ptr, stats_ptr, maxima_ptr, record_ptr, found_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr,
    top_p_ptr, min_p_ptr, seed_ptr, position_ptr, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr,
    counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width,
    first_id, logits_stride, V, tiles,
    TILES: tl.constexpr, LONG: tl.constexpr, REACHING: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    record_ptr += row * RECORD_WIDTH
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    unused = (slot * 0).to(tl.float64)
    tl.store(record_ptr + STATE, unused + OPEN)
    tl.store(record_ptr + LOW, unused + INF)
    tl.store(found_ptr + row, 0)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    if not truncates(slot, temperature < GREEDY, top_k_ptr, top_p_ptr, min_p_ptr):
        return
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    stats_ptr += row * (STATS * tiles)
    at_T = tl.arange(0, TILES)
    maxima_T = tl.load(stats_ptr + MAX * tiles + at_T, mask=at_T < tiles, other=-INF)
    highest = tl.max(maxima_T, 0)
    scale = LOG2_E / temperature.to(tl.float32)
    total = row_total(stats_ptr, tiles, at_T, maxima_T, highest, scale)
    if not ((highest > -INF) & (highest < INF) & (total < INF)):
        return
    wide_highest = highest.to(tl.float64)
    bottom = tl.maximum((wide_highest + temperature * LOG_TINY).to(tl.float32), -3.0e38)
    floor = (wide_highest + temperature * log_floor_of(min_p)).to(tl.float32)
    floor = tl.minimum(tl.maximum(floor - tl.abs(floor) * 1e-6, bottom), highest)

    at_M = tl.arange(0, TILES * PARTS)
    parts = tiles * PARTS
    maxima_M = tl.load(maxima_ptr + row * parts + at_M, mask=at_M < parts, other=-INF)
    by_count, by_mass = (top_k > 0) & (top_k < V), top_p < 1.0
    low, high = floor, highest * 0.0 + INF
    asked = (by_count & (top_k > parts - parts // 8)) | ((by_count == 0) & (by_mass == 0))
    if by_count | by_mass:
        lowest = tl.maximum(bottom, tl.min(tl.where(at_M < parts, maxima_M, INF), 0))
        reaching = tl.minimum(tl.where(by_count, top_k, REACHING), parts).to(tl.float32)
        low = _level_holding(maxima_M, (maxima_M > -INF).to(tl.float32), reaching, lowest, highest)
        if (by_count == 0) & (low > floor):
            # Maxima alone may hold the mass that remains, among few of them.
            weights_M = tl.where(maxima_M >= low, fast_exp2((maxima_M - highest) * scale), 0.0)
            needed = (top_p * total).to(tl.float32) * (1.0 + 1e-5)
            if tl.sum(weights_M, 0) >= needed:
                low = _level_holding(maxima_M, weights_M, needed, low, highest)
            else:
                asked = True
    if asked:
        edits = edits_of(
            slot, tl.load(position_ptr + slot), V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr,
            counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
        )  # fmt: skip
        groups: tl.constexpr = LONG // 8
        at_G = tl.arange(0, groups)
        all_groups = tl.cdiv(V, 8)
        used = tl.minimum(all_groups, groups)
        group_G = tl.where(at_G < used, ((at_G * all_groups.to(tl.int64)) // used).to(tl.int32), all_groups)
        ids_G8 = group_G[:, None] * 8 + tl.arange(0, 8)[None, :]
        sample_G8 = row_values(logits_ptr, row * logits_stride, V, ids_G8, edits, EDITS)
        weights_G8 = fast_exp2((sample_G8 - highest) * scale)
        share = all_groups.to(tl.float32) / used.to(tl.float32)
        if by_count:
            low, high = _count_bracket(sample_G8, share, top_k.to(tl.float32), bottom, highest)
        elif by_mass:
            spare = ((1.0 - top_p) * total).to(tl.float32) / share
            mass, deviation = _below(sample_G8, weights_G8, low)
            if mass + CAUTION * deviation > spare:
                low, high = _mass_bracket(sample_G8, weights_G8, spare, tl.maximum(bottom, floor), highest)
        if high < INF:
            # Both cuts of a row that has two must be found, and a list without an upper end is drawn from.
            if (by_count & by_mass) | (_sum((sample_G8 >= low).to(tl.float32)) * share < LONG // 2):
                high = highest * 0.0 + INF
        elif (by_count == 0) & (by_mass == 0):
            if _sum((sample_G8 >= floor).to(tl.float32)) * share > LONG:
                high = floor
    # Top-p is of the mass that top-k left, whatever min-p removes then.
    if (by_count & by_mass) == 0:
        low = tl.maximum(low, floor)
    low = tl.minimum(low, highest)
    tl.store(record_ptr + LOW, low.to(tl.float64))
    tl.store(record_ptr + HIGH, tl.maximum(high, low).to(tl.float64))
