"""First pass of sampling: statistics and the best bound of every tile of the vocabulary.

Owns reading the logits once and what one tile contributes: maxima, sums of exponentials, and an upper
bound of its best perturbed logit; for truncated rows the maxima of a tile's parts instead of the bound.
Ignores which token wins (`engine.kernels.sample_epilogue`), truncation
(`engine.kernels.sample_level`) and what edits are (`engine.kernels.sample_edits`).

A token's weight exp((l - max) / T) divided by its exponential E = -log(1 - u) orders ids as their
perturbed logits do. The bound replaces 1 / E by something a little larger (`largest_ratio`). Weights
that vanish in fp32 (87 below the maximum) cannot win: noise spans [-3.2, 22.9].

Noise is what this pass spends its time on: ten rounds for eight ids. So everything else is kept off
the units for special functions but one exponential an id.

Shapes: N blocks of 8 ids, P parts of a tile.
"""

# Conditions known when compiling stay apart from those that are not.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.early import await_inputs, release_next
from engine.kernels.fast_math import fast_exp2
from engine.kernels.philox import noise_words
from engine.kernels.sample_columns import PARTS as _PARTS
from engine.kernels.sample_edits import INF, edit, edits_of
from engine.sampling.params import GREEDY_BELOW

RAW_MAX = tl.constexpr(0)
RAW_SUM = tl.constexpr(1)
TEMPERATURE_SUM = tl.constexpr(2)
MAX = tl.constexpr(3)
SUM = tl.constexpr(4)
MOMENT = tl.constexpr(5)
BEST = tl.constexpr(6)
KEPT_SUM = tl.constexpr(7)
KEPT_MOMENT = tl.constexpr(8)
STATS = tl.constexpr(9)
PARTS = tl.constexpr(_PARTS)
GREEDY = tl.constexpr(GREEDY_BELOW)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
WORD_SCALE = tl.constexpr(2.0**-32)
BIT_SCALE = tl.constexpr(2.0**-23)
MANTISSA = tl.constexpr(0.0861)
"""The most that log2(1 + m) exceeds m, 0 <= m < 1."""
BY_PROCESSED, BY_TEMPERATURE, BY_RAW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
def definition_of(slot, greedy, definition_ptr, DEFINED: tl.constexpr):
    """The distribution that a row's entropy and alternatives are of."""
    definition = greedy.to(tl.int32) * BY_RAW
    if DEFINED:
        definition = tl.where(greedy, BY_RAW, tl.load(definition_ptr + slot))
    return definition


@triton.jit
def truncates(slot, greedy, top_k_ptr, top_p_ptr, min_p_ptr):
    cut = (tl.load(top_k_ptr + slot) > 0) | (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    return cut & (greedy == 0)


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
    """The largest weight / E over [N, 8], as bits: never less than it, little more where E is small.

    E is no less than u, and u no less than its 23 leading bits, which become a float without a
    conversion when put behind the exponent of 1. A float's bits are about its logarithm to base 2, in units of
    2^-23, and exceed it by no more than `MANTISSA`; so the difference of two floats' bits is about the
    logarithm of their quotient.
    """
    u = ((words >> 9) + 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return tl.max(tl.max(weights.to(tl.int32, bitcast=True) - u.to(tl.int32, bitcast=True), 1), 0)


@triton.jit
def bound_of(ratio_bits, base, inverse_temperature):
    """fp32 upper bound of perturbed logits whose weights are relative to `base`."""
    return (ratio_bits.to(tl.float32) * BIT_SCALE + MANTISSA) * LN_2 + base * inverse_temperature


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _moment(weights, exponents):
    """Sum of weight times its logarithm, from exponents of two."""
    return _total(tl.where(weights > 0.0, weights * (exponents * LN_2), 0.0))


@triton.jit
def sample_scan_kernel(
    logits_ptr, stats_ptr, maxima_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, position_ptr, definition_ptr, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr,
    bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, first_id, logits_stride, V, tiles,
    TILE: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr, DEFINED: tl.constexpr, EVERY: tl.constexpr,
    ENTROPY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    if slot < 0:
        return
    given_temperature = tl.load(temperature_ptr + slot)
    greedy = given_temperature < GREEDY
    temperature = tl.where(greedy, 1.0, given_temperature).to(tl.float32)
    position = tl.load(position_ptr + slot)
    definition = definition_of(slot, greedy, definition_ptr, DEFINED)
    ids = tile_ids(tile, TILE)
    inside = ids < V
    raw = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=-INF).to(tl.float32)
    raw_max = tl.max(tl.max(raw, 1), 0)
    base = tl.where(raw_max == -INF, 0.0, raw_max)
    inverse = 1.0 / temperature
    scale = LOG2_E * inverse
    exponents = (raw - base) * scale
    weights = fast_exp2(exponents)
    temperature_sum = _total(weights)
    raw_sum, moment = temperature_sum, temperature_sum * 0.0
    if ENTROPY:
        moment = _moment(weights, exponents)
    if temperature != 1.0:
        if EVERY or definition == BY_RAW:
            raw_exponents = (raw - base) * LOG2_E
            raw_weights = fast_exp2(raw_exponents)
            raw_sum = _total(raw_weights)
            if ENTROPY:
                if definition == BY_RAW:
                    moment = _moment(raw_weights, raw_exponents)
    values, values_max, values_sum = raw, raw_max, temperature_sum
    best = raw_max
    if EDITS:
        edits = edits_of(
            slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
            mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
        )  # fmt: skip
        if edits[0]:
            values = edit(raw, ids, inside, edits)
            best = tl.max(tl.max(values, 1), 0)
            if not greedy:
                values_max = best
                base = tl.where(best == -INF, 0.0, best)
                exponents = (values - base) * scale
                weights = fast_exp2(exponents)
                values_sum = _total(weights)
                if ENTROPY:
                    if definition == BY_PROCESSED:
                        moment = _moment(weights, exponents)
    if truncates(slot, greedy, top_k_ptr, top_p_ptr, min_p_ptr):
        parts = tl.max(tl.reshape(tl.max(values, 1), (PARTS, TILE // 8 // PARTS)), 1)
        tl.store(maxima_ptr + (row * tiles + tile) * PARTS + tl.arange(0, PARTS), parts)
    elif not greedy:
        words = tile_words(tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True), position, first_id, tile, TILE)
        bound = bound_of(largest_ratio(weights, words), base, inverse)
        best = tl.where(best == -INF, -INF, bound)
    out = stats_ptr + row * (STATS * tiles) + tile
    if ENTROPY:
        tl.store(out + MOMENT * tiles, moment)
    tl.store(out + RAW_MAX * tiles, raw_max)
    tl.store(out + RAW_SUM * tiles, raw_sum)
    tl.store(out + TEMPERATURE_SUM * tiles, temperature_sum)
    tl.store(out + MAX * tiles, values_max)
    tl.store(out + SUM * tiles, values_sum)
    tl.store(out + BEST * tiles, best)
