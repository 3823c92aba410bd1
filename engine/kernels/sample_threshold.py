"""Where a truncated row is cut: top-k, top-p and min-p without sorting.

Owns the exact search for the lowest value kept and, among ids that tie there, the last one kept,
as `engine.sampling.truncate` defines them; in one program per row: in the row's list where that is a
long one, else in the whole row, whose bracket `engine.kernels.sample_level` then misjudged or whose ties no
list holds. Rows whose cut is known it leaves at once.

The search keeps two logits a <= t <= b around the threshold t. Each pass counts ids and mass at or
above PIVOTS values between them, then moves a and b to the nearest logits that still enclose t.
Tiles whose maximum lies below a are not read, so passes after the first are short. Mass is summed
from fp32 weights, as on the host: where mass reaches top-p within 1e-6 of equality the cut may
differ by the ids at the edge.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2
from engine.kernels.sample_cut import cut_listed, listed_row
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_level import (
    CUT,
    KNOWN,
    LAST_TIED,
    LOG_TINY,
    LOW,
    OPEN,
    RECORD_WIDTH,
    STATE,
    log_floor_of,
)
from engine.kernels.sample_scan import (
    LOG2_E,
    MAX,
    STATS,
)

PIVOTS = tl.constexpr(8)


@triton.jit
def _at_least(
    logits_ptr, maxima_ptr, at, V, tiles, edits, pivots_P, lowest, highest, scale,
    TILE: tl.constexpr, CHUNK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Count and mass of values at or above each pivot; `lowest` is the lowest pivot."""
    count_IP = tl.zeros((CHUNK, PIVOTS), tl.int32)
    mass_IP = tl.zeros((CHUNK, PIVOTS), tl.float32)
    for tile in range(tiles):
        if tl.load(maxima_ptr + tile) >= lowest:
            for part in range(TILE // CHUNK):
                ids = tile * TILE + part * CHUNK + tl.arange(0, CHUNK)
                values = row_values(logits_ptr, at, V, ids, edits, EDITS)
                weights = fast_exp2((values - highest) * scale)
                above = values[:, None] >= pivots_P[None, :]
                count_IP += above.to(tl.int32)
                mass_IP += tl.where(above, weights[:, None], 0.0)
    return tl.sum(count_IP, 0), tl.sum(mass_IP.to(tl.float64), 0)


@triton.jit
def _nearest(
    logits_ptr, maxima_ptr, at, V, tiles, edits, low, high,
    TILE: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The least value at or above `low` and the greatest in [low, high), or infinities."""
    least_I = tl.full((TILE,), INF, tl.float32)
    greatest_I = tl.full((TILE,), -INF, tl.float32)
    for tile in range(tiles):
        if tl.load(maxima_ptr + tile) >= low:
            ids = tile * TILE + tl.arange(0, TILE)
            values = row_values(logits_ptr, at, V, ids, edits, EDITS)
            least_I = tl.minimum(least_I, tl.where(values >= low, values, INF))
            greatest_I = tl.maximum(greatest_I, tl.where((values >= low) & (values < high), values, -INF))
    return tl.min(least_I, 0), tl.max(greatest_I, 0)


@triton.jit
def search(
    logits_ptr, maxima_ptr, at, V, tiles, edits, low, highest, scale, needed_count,
    needed_mass, TILE: tl.constexpr, CHUNK: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The highest logit at or above which enough ids or mass lie; the lowest from `low` if none."""
    a, b = low, highest
    steps_P = (tl.arange(0, PIVOTS) + 1).to(tl.float32) * (1.0 / PIVOTS)
    while a < b:
        pivots_P = tl.where(tl.arange(0, PIVOTS) == PIVOTS - 1, b, tl.minimum(a + (b - a) * steps_P, b))
        count_P, mass_P = _at_least(
            logits_ptr, maxima_ptr, at, V, tiles, edits, pivots_P, tl.min(pivots_P, 0),
            highest, scale, TILE, CHUNK, EDITS,
        )  # fmt: skip
        enough_P = (count_P >= needed_count) & (mass_P >= needed_mass)
        new_a = tl.maximum(tl.max(tl.where(enough_P, pivots_P, -INF), 0), a)
        new_b = tl.min(tl.where(enough_P, INF, pivots_P), 0)
        if new_b == INF:
            a = b
        else:
            least, greatest = _nearest(logits_ptr, maxima_ptr, at, V, tiles, edits, new_a, new_b, TILE, EDITS)
            a, b = least, tl.maximum(least, greatest)
    return a


@triton.jit
def tally_around(
    logits_ptr, maxima_ptr, at, V, tiles, edits, value, highest, scale,
    TILE: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """Count and mass strictly above a value, and the count of ids that equal it."""
    count_I = tl.zeros((TILE,), tl.int32)
    mass_I = tl.zeros((TILE,), tl.float32)
    equal_I = tl.zeros((TILE,), tl.int32)
    for tile in range(tiles):
        if tl.load(maxima_ptr + tile) >= value:
            ids = tile * TILE + tl.arange(0, TILE)
            values = row_values(logits_ptr, at, V, ids, edits, EDITS)
            above = values > value
            count_I += above.to(tl.int32)
            mass_I += tl.where(above, fast_exp2((values - highest) * scale), 0.0)
            equal_I += (values == value).to(tl.int32)
    return tl.sum(count_I, 0), tl.sum(mass_I.to(tl.float64), 0), tl.sum(equal_I, 0)


@triton.jit
def last_tied_of(
    logits_ptr, maxima_ptr, at, V, tiles, edits, value, kept,
    TILE: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    """The id of the `kept`-th value equal to `value`."""
    found = V
    for tile in range(tiles):
        if (kept > 0) & (tl.load(maxima_ptr + tile) >= value):
            ids = tile * TILE + tl.arange(0, TILE)
            equal = row_values(logits_ptr, at, V, ids, edits, EDITS) == value
            ordinal = tl.cumsum(equal.to(tl.int32), 0)
            found = tl.minimum(found, tl.min(tl.where(equal & (ordinal == kept), ids, V), 0))
            kept -= tl.sum(equal.to(tl.int32), 0)
    return found


@triton.jit
def is_kept(values, ids, threshold, last_tied):
    """Whether ids remain; `threshold` is float64."""
    wide = values.to(tl.float64)
    return (wide > threshold) | ((wide == threshold) & (ids <= last_tied))


@triton.jit
def sample_threshold_kernel(
    logits_ptr, stats_ptr, record_ptr, found_ptr, list_ids_ptr, list_values_ptr, slots_ptr, active_ptr,
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, repetition_ptr, frequency_ptr,
    presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr,
    ahead_width, first_id,
    logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
    HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    record_ptr += row * RECORD_WIDTH
    if (tl.load(record_ptr + STATE) != OPEN) | (tl.load(record_ptr + LOW) == INF):
        return
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    wide_temperature = tl.load(temperature_ptr + slot)
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    stats_ptr += row * (STATS * tiles)
    maxima_ptr = stats_ptr + MAX * tiles
    found, total, above_count, above_mass, low, high, highest = listed_row(
        record_ptr, found_ptr, stats_ptr, row, tiles, wide_temperature, TILES
    )
    if (found > SHORT) & (found <= LONG):
        settled = cut_listed(
            record_ptr, list_ids_ptr + row * LONG, list_values_ptr + row * LONG, found, total, above_count, above_mass,
            low, high, highest, wide_temperature, top_k, top_p, min_p, seed_ptr, position_ptr, slot, first_id, V, LONG,
            1, False,
        )  # fmt: skip
        if settled:
            return
    inverse = 1.0 / wide_temperature.to(tl.float32)
    scale = inverse * LOG2_E
    position = tl.load(position_ptr + slot)
    edits = edits_of(
        slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
        mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
    )  # fmt: skip
    at = row * logits_stride
    log_floor = log_floor_of(min_p)
    floor = highest.to(tl.float64) + wide_temperature * log_floor
    threshold, kept, equal = (floor - 1.0).to(tl.float32), V, V
    lowest = (highest.to(tl.float64) + wide_temperature * LOG_TINY).to(tl.float32)
    by_count = ((top_k > 0) & (top_k < V)).to(tl.int32)
    # Once by count, then once by mass, each if asked.
    for stage in range(1 - by_count, 1 + (top_p < 1.0).to(tl.int32)):
        needed_count, needed_mass = top_k, total * 0.0
        if stage == 1:
            needed_count, needed_mass = 0, top_p * total
            spare = tl.log((1.0 - top_p) * total / V) - 1e-3
            start = (highest.to(tl.float64) + wide_temperature * tl.maximum(spare, log_floor)).to(tl.float32)
            lowest = tl.minimum(tl.maximum(start, lowest), highest)
        edge = search(
            logits_ptr, maxima_ptr, at, V, tiles, edits, lowest, highest, scale, needed_count, needed_mass, TILE, CHUNK,
            EDITS,
        )  # fmt: skip
        above, mass, tied = tally_around(logits_ptr, maxima_ptr, at, V, tiles, edits, edge, highest, scale, TILE, EDITS)
        each = fast_exp2((edge - highest) * scale).to(tl.float64)
        edge_kept = tl.minimum(top_k - above, tied)
        if stage == 1:
            edge_kept = tl.ceil(tl.minimum((needed_mass - mass) / each, tied * 1.0)).to(tl.int32)
            edge_kept = tl.maximum(tl.minimum(edge_kept, tied), 1)
            edge_kept = tl.where(edge == threshold, tl.minimum(kept, edge_kept), edge_kept)
        total = mass + edge_kept * each
        lowest, threshold, kept, equal = edge, edge, edge_kept, tied
    cut = threshold.to(tl.float64)
    last_tied = V
    if floor > cut:
        cut = floor
    elif kept < equal:
        last_tied = last_tied_of(logits_ptr, maxima_ptr, at, V, tiles, edits, threshold, kept, TILE, EDITS)
    tl.store(record_ptr + CUT, cut)
    tl.store(record_ptr + LAST_TIED, (last_tied * 1.0).to(tl.float64))
    tl.store(record_ptr + STATE, cut * 0.0 + KNOWN)
