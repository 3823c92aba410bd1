"""First pass of sampling: statistics and the best bound of every tile of the vocabulary.

Owns reading the logits once, the edits, and what one tile contributes: maxima, sums of
exponentials, and an upper bound of its best perturbed logit. Ignores which token wins
(`engine.kernels.sample_epilogue`) and truncation (`engine.kernels.sample_threshold`).

A token's weight exp((l - max) / T) divided by its exponential E = -log(1 - u) orders ids as their
perturbed logits do. The bound replaces E by the first terms of its series, which lie below it, so
what fp32 gives is never too small beyond rounding. Weights that vanish in fp32 (87 below the
maximum) cannot win: noise spans [-3.2, 22.9].

Shapes: N blocks of 8 ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.fast_math import fast_exp2, fast_reciprocal
from engine.kernels.philox import noise_words
from engine.sampling.params import GREEDY_BELOW

RAW_MAX = tl.constexpr(0)
RAW_SUM = tl.constexpr(1)
TEMPERATURE_SUM = tl.constexpr(2)
MAX = tl.constexpr(3)
SUM = tl.constexpr(4)
MOMENT = tl.constexpr(5)
BEST = tl.constexpr(6)
STATS = tl.constexpr(7)
GREEDY = tl.constexpr(GREEDY_BELOW)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WORD_SCALE = tl.constexpr(2.0**-32)
INF = tl.constexpr(float("inf"))


@triton.jit
def slot_of(row, slots_ptr, active_ptr, HAS_SLOTS: tl.constexpr):
    """The row's slot, -1 where nothing is to be drawn."""
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if slot >= 0:
            slot = tl.where(tl.load(active_ptr + slot) != 0, slot, -1)
    else:
        slot = tl.where(tl.load(active_ptr + slot) != 0, slot, -1)
    return slot


@triton.jit
def tile_ids(tile, TILE: tl.constexpr):
    """Ids [N, 8] of a tile, counted from the shard's first."""
    return tile * TILE + tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def tile_words(seed, position, first_id, tile, TILE: tl.constexpr):
    """Noise words uint32 [N, 8] of a tile."""
    blocks = (first_id + tile * TILE) // 8 + tl.arange(0, TILE // 8)
    return noise_words(seed, position, blocks, TILE // 8)


@triton.jit
def largest_ratio(weights, words):
    """The largest weight / E over [N, 8], no smaller than exact beyond rounding."""
    u = tl.fma(words.to(tl.float32), WORD_SCALE, 0.5 * WORD_SCALE)
    series = tl.fma(u, tl.fma(u, tl.fma(u, 0.25, 0.33333334), 0.5), 1.0)
    return tl.max(tl.max(weights * fast_reciprocal(u * series), 1), 0)


@triton.jit
def bound_of(ratio, base, inverse_temperature):
    """fp32 upper bound of perturbed logits whose weights are relative to `base`."""
    return tl.where(ratio > 0.0, tl.log(ratio) + base * inverse_temperature, -INF)


@triton.jit
def has_edits(
    slot, position, repetition_ptr, frequency_ptr, presence_ptr, bias_ids_ptr, stop_ids_ptr, min_until_ptr,
    BIAS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Whether this slot's logits are edited at this position, and whether by penalties."""
    penalised = (
        (tl.load(repetition_ptr + slot) != 1.0)
        | (tl.load(frequency_ptr + slot) != 0.0)
        | (tl.load(presence_ptr + slot) != 0.0)
    )
    biased = tl.load(bias_ids_ptr + slot * BIAS) >= 0
    masked = (position < tl.load(min_until_ptr + slot)) & (tl.load(stop_ids_ptr + slot * STOPS) >= 0)
    return penalised | biased | masked, penalised, masked


@triton.jit
def _edit(
    values, ids, inside, first_id, slot, V, penalised, masked, repetition_ptr, frequency_ptr, presence_ptr,
    counts_ptr, bias_ids_ptr, bias_ptr, stop_ids_ptr, BIAS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Bias, repetition, frequency, presence, then the mask of stop ids."""
    for n in range(BIAS):
        token = tl.load(bias_ids_ptr + slot * BIAS + n) - first_id
        bias = tl.load(bias_ptr + slot * BIAS + n)
        values = tl.where(ids == token, values + bias, values)
    if penalised:
        counts = tl.load(counts_ptr + slot * V + ids, mask=inside, other=0).to(tl.int32)
        repetition = tl.load(repetition_ptr + slot)
        divided = tl.div_rn(values, tl.zeros_like(values) + repetition)
        repeated = tl.where(values > 0, divided, values * repetition)
        values = tl.where(counts > 0, repeated, values)
        produced = (counts >> 1).to(tl.float32)
        values = tl.where(counts > 1, values - tl.load(frequency_ptr + slot) * produced, values)
        values = tl.where(counts > 1, values - tl.load(presence_ptr + slot), values)
    if masked:
        for n in range(STOPS):
            token = tl.load(stop_ids_ptr + slot * STOPS + n) - first_id
            values = tl.where(ids == token, -INF, values)
    return values


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def sample_scan_kernel(
    logits_ptr, edited_ptr, stats_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, position_ptr, repetition_ptr, frequency_ptr, presence_ptr, counts_ptr, bias_ids_ptr, bias_ptr,
    stop_ids_ptr, min_until_ptr, first_id, logits_stride, V, tiles,
    TILE: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr, BIAS: tl.constexpr, STOPS: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    if slot < 0:
        return
    given_temperature = tl.load(temperature_ptr + slot)
    greedy = given_temperature < GREEDY
    temperature = tl.where(greedy, 1.0, given_temperature).to(tl.float32)
    position = tl.load(position_ptr + slot)
    ids = tile_ids(tile, TILE)
    inside = ids < V
    raw = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=-INF).to(tl.float32)
    raw_max = tl.max(tl.max(raw, 1), 0)
    base = tl.where(raw_max == -INF, 0.0, raw_max)
    shifted = (raw - base) * LOG2_E
    inverse = 1.0 / temperature
    raw_weights = fast_exp2(shifted)
    raw_sum = _total(raw_weights)
    weights = raw_weights
    temperature_sum = raw_sum
    if temperature != 1.0:
        weights = fast_exp2(shifted * inverse)
        temperature_sum = _total(weights)
    values, values_max, values_sum = raw, raw_max, temperature_sum
    best = raw_max
    if EDITS:
        edited, penalised, masked = has_edits(
            slot, position, repetition_ptr, frequency_ptr, presence_ptr, bias_ids_ptr, stop_ids_ptr, min_until_ptr,
            BIAS, STOPS,
        )  # fmt: skip
        if edited:
            values = _edit(
                raw, ids, inside, first_id, slot, V, penalised, masked, repetition_ptr, frequency_ptr, presence_ptr,
                counts_ptr, bias_ids_ptr, bias_ptr, stop_ids_ptr, BIAS, STOPS,
            )  # fmt: skip
            tl.store(edited_ptr + row * V + ids, values, mask=inside)
            best = tl.max(tl.max(values, 1), 0)
            if not greedy:
                values_max = best
                base = tl.where(best == -INF, 0.0, best)
                shifted = (values - base) * LOG2_E
                weights = fast_exp2(shifted * inverse)
                values_sum = _total(weights)
    out = stats_ptr + row * (STATS * tiles) + tile
    if ENTROPY:
        terms = tl.where(weights > 0.0, weights * (shifted * inverse * LN_2), 0.0)
        tl.store(out + MOMENT * tiles, _total(terms))
    tl.store(out + RAW_MAX * tiles, raw_max)
    tl.store(out + RAW_SUM * tiles, raw_sum)
    tl.store(out + TEMPERATURE_SUM * tiles, temperature_sum)
    tl.store(out + MAX * tiles, values_max)
    tl.store(out + SUM * tiles, values_sum)
    truncates = (tl.load(top_k_ptr + slot) > 0) | (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    if (not greedy) & (not truncates):
        words = tile_words(tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True), position, first_id, tile, TILE)
        best = bound_of(largest_ratio(weights, words), base, inverse)
    tl.store(out + BEST * tiles, best)
