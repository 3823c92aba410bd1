"""Where a truncated row is cut, from the list of its bracket: top-k, top-p, min-p and, in a short list, the draw.

Owns the exact cut among listed ids, given how much lies above them, and the proof that it is the row's; the
kernel is for short lists, and leaves others and what it cannot prove to `engine.kernels.sample_threshold`.
The list stays in registers. A threshold is searched there in the ordered bits of fp32, by counts or sums at
P pivots a step. Where a short list holds every id that remains the token is drawn as well; otherwise
`engine.kernels.sample_bounds` follows.

Shapes: L listed ids, P pivots.
"""

# Conditions known when compiling stay apart from those that are not.
# ruff: noqa: SIM102
# Kernels return tuples, which the type checker cannot see.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.philox import noise_words_at
from engine.kernels.sample_edits import INF
from engine.kernels.sample_level import (
    CUT,
    DRAWN,
    HIGH,
    KNOWN,
    LAST_TIED,
    LOW,
    MASS,
    RECORD_MOMENT,
    RECORD_WIDTH,
    SCORE,
    STATE,
    TOKEN,
    log_floor_of,
    row_total,
)
from engine.kernels.sample_list import ABOVE_COUNT, ABOVE_SUM, TILES_EACH
from engine.kernels.sample_scan import LOG2_E, MAX, STATS, WORD_SCALE

NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered(x):
    """fp32 as int64 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value_of(ordered):
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _highest_with(values_L, amounts_L, needed, low, high, P: tl.constexpr):
    """The highest value at or above which at least `needed` of the amounts lie; at `low` they do."""
    a, b = _ordered(low), _ordered(high)
    at_P = tl.arange(0, P) + 1
    while a < b:
        pivots_P = a + ((b - a) * at_P + (P - 1)) // P
        if P == 1:
            pivots_P = a + (b - a + 1) // 2 + tl.zeros((P,), tl.int64)
        above_LP = values_L[:, None] >= _value_of(pivots_P)[None, :]
        enough_P = tl.sum(tl.where(above_LP, amounts_L[:, None], 0), 0) >= needed
        new_a = tl.maximum(a, tl.max(tl.where(enough_P, pivots_P, a), 0))
        a, b = new_a, tl.minimum(b, tl.min(tl.where(enough_P, b, pivots_P - 1), 0))
    return _value_of(a)


@triton.jit
def _id_of_tied(tied_L, ids_L, kept, V, P: tl.constexpr):
    """The lowest id up to which `kept` tied ids lie."""
    a, b = kept * 0, kept * 0 + V - 1
    at_P = tl.arange(0, P)
    while a < b:
        pivots_P = a + (b - a) // (P + 1) * (at_P + 1)
        upto_LP = tied_L[:, None] & (ids_L[:, None] <= pivots_P[None, :])
        enough_P = tl.sum(upto_LP.to(tl.int32), 0) >= kept
        new_a = tl.maximum(a, tl.max(tl.where(enough_P, a, pivots_P + 1), 0))
        a, b = new_a, tl.minimum(b, tl.min(tl.where(enough_P, pivots_P, b), 0))
    return a


@triton.jit
def _draw(
    record_ptr, values_L, ids_L, kept_L, mass_L, below_L, temperature, seed_ptr, position_ptr, slot, first_id
):  # fmt: skip
    seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
    words_L = noise_words_at(seed, tl.load(position_ptr + slot), tl.where(kept_L, ids_L, 0) + first_id)
    rest_L = (words_L.to(tl.float64) + 0.5) * -WORD_SCALE + 1.0
    scores_L = tl.where(kept_L, values_L.to(tl.float64) / temperature - tl.log(-tl.log(rest_L)), -INF)
    best = tl.max(scores_L, 0)
    token = tl.min(tl.where(scores_L == best, ids_L, NO_ID), 0)
    tl.store(record_ptr + MASS, tl.sum(tl.where(kept_L, mass_L, 0.0), 0))
    tl.store(record_ptr + RECORD_MOMENT, tl.sum(tl.where(kept_L, mass_L * below_L, 0.0), 0))
    tl.store(record_ptr + TOKEN, token.to(tl.float64))
    tl.store(record_ptr + SCORE, best)


@triton.jit
def cut_listed(
    record_ptr, ids_ptr, values_ptr, found, total, above_count, above_mass, low, high, highest, temperature, top_k,
    top_p, min_p, seed_ptr, position_ptr, slot, first_id, V, L: tl.constexpr, P: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Record the cut among the first L places of a list, and the token if `DRAW`; whether it is the row's."""
    at_L = tl.arange(0, L)
    present_L = at_L < found
    values_L = tl.load(values_ptr + at_L, mask=present_L, other=-INF)
    below_L = (values_L.to(tl.float64) - highest.to(tl.float64)) / temperature
    mass_L = tl.where(present_L, tl.exp(below_L), 0.0)
    log_floor = log_floor_of(min_p)
    floor = highest.to(tl.float64) + temperature * log_floor
    floored = low.to(tl.float64) <= floor
    top = tl.minimum(high, highest)
    by_count = (top_k > 0) & (top_k < V)
    threshold, kept, equal = low * 0.0 - INF, found * 0, found * 0
    good = found >= 0
    if by_count:
        if (above_count < top_k) & (above_count + found >= top_k):
            threshold = _highest_with(values_L, present_L.to(tl.int32), top_k - above_count, low, top, P)
            over_L = values_L > threshold
            over = above_count + tl.sum(over_L.to(tl.int32), 0)
            equal = tl.sum((values_L == threshold).to(tl.int32), 0)
            kept = top_k - over
            each = tl.exp((threshold.to(tl.float64) - highest.to(tl.float64)) / temperature)
            total = above_mass + tl.sum(tl.where(over_L, mass_L, 0.0), 0) + kept * each
        else:
            good = (above_count + found < top_k) & floored & (top_p >= 1.0)
    if top_p < 1.0:
        needed = top_p * total
        held = tl.where(threshold > -INF, total, above_mass + tl.sum(mass_L, 0))
        if (above_count > 0) & (above_mass >= needed):
            good = found < 0
        elif held >= needed:
            least = tl.maximum(threshold, low)
            edge = _highest_with(values_L, mass_L, needed - above_mass, least, top, P)
            over = above_mass + tl.sum(tl.where(values_L > edge, mass_L, 0.0), 0)
            tied = tl.sum((values_L == edge).to(tl.int32), 0)
            each = tl.exp((edge.to(tl.float64) - highest.to(tl.float64)) / temperature)
            edge_kept = tl.ceil(tl.minimum((needed - over) / each, tied * 1.0)).to(tl.int32)
            edge_kept = tl.maximum(tl.minimum(edge_kept, tied), 1)
            kept = tl.where(edge == threshold, tl.minimum(kept, edge_kept), edge_kept)
            threshold, equal = edge, tied
        else:
            good = good & floored
    if good:
        ids_L = tl.load(ids_ptr + at_L, mask=present_L, other=NO_ID)
        last_tied = found * 0 + V
        if kept < equal:
            last_tied = _id_of_tied((values_L == threshold) & present_L, ids_L, kept, V, P)
        kept_L = (values_L > threshold) | ((values_L == threshold) & (ids_L <= last_tied))
        kept_L = kept_L & present_L & (below_L >= log_floor)
        least = tl.min(tl.where(kept_L, values_L, INF), 0)
        cut = least.to(tl.float64)
        if least == INF:
            cut = tl.maximum(floor, threshold.to(tl.float64))
        tl.store(record_ptr + CUT, cut)
        tl.store(record_ptr + LAST_TIED, tl.where(least > threshold, V, last_tied).to(tl.float64))
        state = found * 0 + KNOWN
        if DRAW:
            if high == INF:
                _draw(
                    record_ptr, values_L, ids_L, kept_L, mass_L, below_L, temperature, seed_ptr, position_ptr, slot,
                    first_id,
                )  # fmt: skip
                state = found * 0 + DRAWN
        tl.store(record_ptr + STATE, state.to(tl.float64))
    return good


@triton.jit
def listed_row(record_ptr, found_ptr, stats_ptr, row, tiles, temperature, TILES: tl.constexpr):
    """What is known of a row's list: length, total mass, number and mass above it, ends, highest logit."""
    low, high = tl.load(record_ptr + LOW).to(tl.float32), tl.load(record_ptr + HIGH).to(tl.float32)
    found = tl.load(found_ptr + row)
    at_T = tl.arange(0, TILES)
    maxima_T = tl.load(stats_ptr + MAX * tiles + at_T, mask=at_T < tiles, other=-INF)
    highest = tl.max(maxima_T, 0)
    total = row_total(stats_ptr, tiles, at_T, maxima_T, highest, LOG2_E / temperature.to(tl.float32))
    above_count, above_mass = found * 0, total * 0.0
    if high < INF:
        written_T = at_T < tl.cdiv(tiles, TILES_EACH)
        sums_T = tl.load(stats_ptr + ABOVE_SUM * tiles + at_T, mask=written_T, other=0.0)
        counts_T = tl.load(stats_ptr + ABOVE_COUNT * tiles + at_T, mask=written_T, other=0.0)
        above_mass = tl.sum(sums_T.to(tl.float64), 0)
        above_count = tl.sum(counts_T.to(tl.int32), 0)
    return found, total, above_count, above_mass, low, high, highest


@triton.jit
def sample_cut_kernel(
    stats_ptr, record_ptr, found_ptr, list_ids_ptr, list_values_ptr, slots_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, seed_ptr, position_ptr, first_id, V, tiles,
    TILES: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr, HAS_SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    record_ptr += row * RECORD_WIDTH
    if (tl.load(record_ptr + LOW) == INF) | (tl.load(found_ptr + row) > SHORT):
        return
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    top_k, top_p, min_p = tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot), tl.load(min_p_ptr + slot)
    stats_ptr += row * (STATS * tiles)
    found, total, above_count, above_mass, low, high, highest = listed_row(
        record_ptr, found_ptr, stats_ptr, row, tiles, temperature, TILES
    )
    cut_listed(
        record_ptr, list_ids_ptr + row * LONG, list_values_ptr + row * LONG, found, total, above_count, above_mass, low,
        high, highest, temperature, top_k, top_p, min_p, seed_ptr, position_ptr, slot, first_id, V, SHORT, 4, True,
    )  # fmt: skip
