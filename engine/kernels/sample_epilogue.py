"""Sampling: from a step's logits to tokens and their log-probabilities, without a host in between.

Owns the reference, the last kernel and the launcher. A token is what `engine.sampling.sampler`
defines: argmax of edited logit / T + Gumbel noise in float64, the lower id winning a tie. The scan
leaves an fp32 upper bound per tile of the vocabulary; here tiles are evaluated in float64 in
descending order of their bounds until no other can win, so the token equals the host's unless two
scores differ by less than the two machines' float64 logarithms do.

Two launches, seven where a row may be truncated; all of fixed shape, without host synchronisation,
and reductions are ordered. Shapes: B rows, V vocabulary, T tiles.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# Conditions known when compiling stay apart from those that are not.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.sample_bounds import TILES_EACH as BOUNDED_EACH
from engine.kernels.sample_bounds import sample_bounds_kernel
from engine.kernels.sample_columns import PARTS, SampleColumns, SampleOut, SampleWorkspace, edit_arguments
from engine.kernels.sample_cut import sample_cut_kernel
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_level import (
    CUT,
    DRAWN,
    LAST_TIED,
    MASS,
    RECORD_MOMENT,
    RECORD_WIDTH,
    SCORE,
    STATE,
    TOKEN,
    parts_reaching,
    sample_level_kernel,
)
from engine.kernels.sample_list import TILES_EACH as LISTED_EACH
from engine.kernels.sample_list import sample_list_kernel
from engine.kernels.sample_reference import sample_rows_reference
from engine.kernels.sample_scan import (
    BEST,
    BY_PROCESSED,
    BY_RAW,
    GREEDY,
    KEPT_MOMENT,
    KEPT_SUM,
    MAX,
    MOMENT,
    RAW_MAX,
    RAW_SUM,
    STATS,
    SUM,
    TEMPERATURE_SUM,
    WORD_SCALE,
    definition_of,
    sample_scan_kernel,
    slot_of,
    tile_ids,
    tile_words,
    truncates,
)
from engine.kernels.sample_threshold import is_kept, sample_threshold_kernel

__all__ = ["sample_rows", "sample_rows_reference"]

BEYOND = tl.constexpr(2**31 - 1)
CUT_REGISTERS = 128
"""So that two programs of 8 warps share a processor: 256 rows are then cut at once."""


@triton.jit
def _weighted(stats_ptr, maxima_T, highest, inverse, at, tiles, WHICH: tl.constexpr):
    """float64 sum of a column of sums, each relative to its own tile's maximum, relative to the row's."""
    sums_T = tl.load(stats_ptr + WHICH * tiles + at, mask=at < tiles, other=0.0).to(tl.float64)
    factors_T = tl.exp((maxima_T - highest).to(tl.float64) * inverse)
    return tl.sum(tl.where(sums_T == 0.0, 0.0, sums_T * factors_T), 0)


@triton.jit
def _plain(stats_ptr, at, tiles, WHICH: tl.constexpr):
    """float64 sum of a column that is relative to the row's maximum."""
    return tl.sum(tl.load(stats_ptr + WHICH * tiles + at, mask=at < tiles, other=0.0).to(tl.float64), 0)


@triton.jit
def _moment(stats_ptr, maxima_T, highest, inverse, at, tiles, WHICH: tl.constexpr):
    """float64 first moment of the weights that `WHICH` sums, relative to the row's maximum."""
    sums_T = tl.load(stats_ptr + WHICH * tiles + at, mask=at < tiles, other=0.0).to(tl.float64)
    below_T = tl.where(sums_T > 0.0, (maxima_T - highest).to(tl.float64) * inverse, 0.0)
    moments_T = tl.load(stats_ptr + MOMENT * tiles + at, mask=at < tiles, other=0.0).to(tl.float64)
    return tl.sum((moments_T + sums_T * below_T) * tl.exp(below_T), 0)


@triton.jit
def sample_pick_kernel(
    logits_ptr, stats_ptr, record_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    seed_ptr, position_ptr, definition_ptr, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr,
    bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width,
    ids_ptr, raw_ptr, scaled_ptr, processed_ptr, lse_ptr,
    score_ptr, bad_ptr, entropy_ptr, first_id, logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr, DEFINED: tl.constexpr,
    EVERY: tl.constexpr, ENTROPY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    greedy = temperature < GREEDY
    temperature = tl.where(greedy, 1.0, temperature)
    inverse = 1.0 / temperature
    truncated = truncates(slot, greedy, top_k_ptr, top_p_ptr, min_p_ptr)
    position = tl.load(position_ptr + slot)
    definition = definition_of(slot, greedy, definition_ptr, DEFINED)
    seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
    edits = edits_of(
        slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
        mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
    )  # fmt: skip
    logits_at = row * logits_stride
    stats_ptr += row * (STATS * tiles)
    record_ptr += row * RECORD_WIDTH
    at = tl.arange(0, TILES)
    raw_maxima_T = tl.load(stats_ptr + RAW_MAX * tiles + at, mask=at < tiles, other=-INF)
    maxima_T = tl.load(stats_ptr + MAX * tiles + at, mask=at < tiles, other=-INF)
    bounds_T = tl.load(stats_ptr + BEST * tiles + at, mask=at < tiles, other=-INF)
    raw_highest, highest = tl.max(raw_maxima_T, 0), tl.max(maxima_T, 0)
    raw_total = _weighted(stats_ptr, raw_maxima_T, raw_highest, 1.0, at, tiles, RAW_SUM)
    scaled_total = _weighted(stats_ptr, raw_maxima_T, raw_highest, inverse, at, tiles, TEMPERATURE_SUM)
    total = _weighted(stats_ptr, maxima_T, highest, inverse, at, tiles, SUM)
    good = (scaled_total < INF) & (raw_highest > -INF) & (total < INF) & (highest > -INF)
    good = good & (tl.max(bounds_T, 0) > -INF) & (tl.max(bounds_T, 0) < INF)

    lowest = temperature * 0.0 - INF
    threshold, last_tied = lowest, V
    best, token = lowest, 0
    kept_total, kept_moment = total, total * 0.0
    bound = tl.where(good, tl.max(bounds_T, 0), -INF)
    if truncated & good:
        threshold = tl.load(record_ptr + CUT)
        last_tied = tl.load(record_ptr + LAST_TIED).to(tl.int32)
        if tl.load(record_ptr + STATE) == DRAWN:
            best, token = tl.load(record_ptr + SCORE), tl.load(record_ptr + TOKEN).to(tl.int32)
            bound = -INF
            kept_total, kept_moment = tl.load(record_ptr + MASS), tl.load(record_ptr + RECORD_MOMENT)
        else:
            kept_total = _plain(stats_ptr, at, tiles, KEPT_SUM)
            kept_moment = _plain(stats_ptr, at, tiles, KEPT_MOMENT)
    while (bound > -INF) & (bound + (tl.abs(bound) + 32.0) * 1e-6 >= best):
        tile = tl.min(tl.where(bounds_T == bound, at, TILES), 0)
        ids = tile_ids(tile, TILE)
        values = row_values(logits_ptr, logits_at, V, ids, edits, EDITS)
        scores = values.to(tl.float64)
        if not greedy:
            words = tile_words(seed, position, first_id, tile, TILE)
            rest = (words.to(tl.float64) + 0.5) * -WORD_SCALE + 1.0
            scores = scores / temperature - tl.log(-tl.log(rest))
            if truncated:
                scores = tl.where(is_kept(values, ids, threshold, last_tied), scores, -INF)
        tile_best = tl.max(tl.max(scores, 1), 0)
        first = tl.min(tl.min(tl.where(scores == tile_best, ids, BEYOND), 1), 0)
        if (tile_best > best) | ((tile_best == best) & (first < token)):
            best, token = tile_best, first
        bounds_T = tl.where(at == tile, -INF, bounds_T)
        bound = tl.max(bounds_T, 0)

    nan = float("nan")
    raw = tl.load(logits_ptr + logits_at + token).to(tl.float64)
    value = raw
    if EDITS:
        if edits[0]:
            value = row_values(logits_ptr, logits_at, V, token, edits, EDITS).to(tl.float64)
    raw_lse = raw_highest.to(tl.float64) + tl.log(raw_total)
    logprob = raw - raw_lse
    scaled, processed = logprob, logprob
    if not greedy:
        scaled = (raw - raw_highest) * inverse - tl.log(scaled_total)
        processed = (value - highest) * inverse - tl.log(kept_total)
    if not EVERY:
        if (definition != BY_RAW) & (temperature != 1.0):
            logprob, raw_lse = logprob * nan, raw_lse * nan
    tl.store(ids_ptr + row, tl.where(good, token + first_id, 0).to(tl.int64))
    tl.store(raw_ptr + row, tl.where(good, logprob, nan).to(tl.float32))
    tl.store(scaled_ptr + row, tl.where(good, scaled, nan).to(tl.float32))
    tl.store(processed_ptr + row, tl.where(good, processed, nan).to(tl.float32))
    tl.store(lse_ptr + row, tl.where(good, raw_lse, nan).to(tl.float32))
    tl.store(score_ptr + row, tl.where(good, best, nan))
    tl.store(bad_ptr + row, (good == 0).to(tl.uint8))
    if ENTROPY:
        sum_of, moment = raw_total, _moment(stats_ptr, raw_maxima_T, raw_highest, 1.0, at, tiles, RAW_SUM)
        if definition != BY_RAW:
            sum_of = scaled_total
            moment = _moment(stats_ptr, raw_maxima_T, raw_highest, inverse, at, tiles, TEMPERATURE_SUM)
            if definition == BY_PROCESSED:
                sum_of, moment = total, _moment(stats_ptr, maxima_T, highest, inverse, at, tiles, SUM)
                if truncated & good:
                    sum_of, moment = kept_total, kept_moment
        tl.store(entropy_ptr + row, tl.where(good, tl.log(sum_of) - moment / sum_of, nan).to(tl.float32))


@dataclass(frozen=True, slots=True)
class Warps:
    """Warps of each kernel's programs; 0 leaves the choice to the tile's size."""

    scan: int = 0
    level: int = 8
    list: int = 1
    cut: int = 8
    threshold: int = 16
    bounds: int = 0
    pick: int = 8


def sample_rows(
    logits_BV: torch.Tensor,
    columns: SampleColumns,
    out: SampleOut,
    workspace: SampleWorkspace,
    truncated: bool = True,
    every: bool = True,
    warps: Warps | None = None,
) -> SampleOut:
    """Draw one id per row of `logits_BV` (bf16, fp16 or fp32; rows contiguous), into `out`.

    `truncated=False` promises that no active row has top-k, top-p or min-p, and saves five launches.
    `every=False` leaves NaN in `raw_B` and
    `lse_B` where temperature and definition do not call for them, and saves an exponential an id.
    Allocates nothing. `warps` are those of the kernels; a row's sums have the order that the scan's
    give them, whatever else is drawn beside it.
    """
    rows, vocab = logits_BV.shape
    tiles, tile = workspace.stats_BNT.shape[2], workspace.tile
    edits = columns.edits
    entropy = out.entropy_B is not None
    assert logits_BV.stride(1) == 1, "rows of logits must be contiguous"
    assert rows <= workspace.stats_BNT.shape[0], f"{rows} rows, workspace for {workspace.stats_BNT.shape[0]}"
    assert triton.cdiv(vocab, tile) == tiles, f"vocabulary {vocab} does not fit the workspace's {tiles} tiles"
    assert columns.first_id % 8 == 0, f"first id {columns.first_id} is not a multiple of 8"
    assert every or columns.definition_S is not None, "which definition to compute?"
    if rows == 0:
        return out
    nothing = columns.temperature_S
    slots = columns.slots_B if columns.slots_B is not None else nothing
    definition = columns.definition_S if columns.definition_S is not None else nothing
    drawing = (columns.temperature_S, columns.top_k_S, columns.top_p_S, columns.min_p_S, columns.seed_S)
    head = (slots, columns.active_S, *drawing, columns.position_S)
    changes = edit_arguments(edits, nothing)
    shape = (columns.first_id, logits_BV.stride(0), vocab, tiles)
    stats, record = workspace.stats_BNT, workspace.record_BR
    modes = dict(TILE=tile, HAS_SLOTS=columns.slots_B is not None, EDITS=edits is not None, enable_fp_fusion=False)
    wants = dict(DEFINED=columns.definition_S is not None, EVERY=every or entropy, ENTROPY=entropy)
    warps, early = warps or Warps(), is_early(logits_BV)
    overlap = dict(EARLY=early, **options(early))
    sample_scan_kernel[(tiles, rows)](
        logits_BV, stats, workspace.maxima_BT, *head, definition, *changes, *shape, **modes, **wants, **overlap,
        num_warps=warps.scan or max(1, tile // 1024),
    )  # fmt: skip
    modes["TILES"] = triton.next_power_of_2(tiles)
    if truncated:
        _cut_rows(logits_BV, workspace, (*head, *changes), shape, modes, warps)
    columns_out = (out.ids_B, out.raw_B, out.temperature_B, out.processed_B, out.lse_B, out.score_B, out.bad_B)
    sample_pick_kernel[(rows,)](
        logits_BV, stats, record, *head, definition, *changes,
        *columns_out, out.entropy_B if entropy else nothing, *shape,
        **modes, **wants, **overlap, num_warps=warps.pick,
    )  # fmt: skip
    return out


def _cut_rows(
    logits_BV: torch.Tensor, workspace: SampleWorkspace, given: tuple, shape: tuple, modes: dict, warps: Warps
) -> None:
    """Which ids the truncated rows keep, and the tokens of those that keep few."""
    rows, tiles, tile = logits_BV.shape[0], workspace.stats_BNT.shape[2], workspace.tile
    stats, record, found = workspace.stats_BNT, workspace.record_BR, workspace.found_B
    lists, long = (workspace.list_ids_BL, workspace.list_values_BL), workspace.list_ids_BL.shape[1]
    rest = {name: value for name, value in modes.items() if name != "TILE"}
    sample_level_kernel[(rows,)](
        logits_BV, stats, workspace.maxima_BT, record, found, *given, *shape, **rest, LONG=long,
        REACHING=parts_reaching(tiles * PARTS, workspace.short // 2), num_warps=warps.level,
    )  # fmt: skip
    sample_list_kernel[(triton.cdiv(tiles, LISTED_EACH), rows)](
        logits_BV, stats, workspace.maxima_BT, record, found, *lists, *given, *shape, **modes, LONG=long,
        num_warps=warps.list,
    )  # fmt: skip
    slots, _active, temperature, top_k, top_p, min_p, seed, position, *_ = given
    first_id, _stride, vocab, _tiles = shape
    sample_cut_kernel[(rows,)](
        stats, record, found, *lists, slots, temperature, top_k, top_p, min_p, seed, position, first_id, vocab, tiles,
        TILES=modes["TILES"], SHORT=workspace.short, LONG=long, HAS_SLOTS=modes["HAS_SLOTS"], num_warps=warps.cut,
        maxnreg=CUT_REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    sample_threshold_kernel[(rows,)](
        logits_BV, stats, record, found, *lists, *given, *shape, **modes, CHUNK=min(tile, 128 * warps.threshold),
        SHORT=workspace.short, LONG=long, num_warps=warps.threshold,
    )  # fmt: skip
    sample_bounds_kernel[(triton.cdiv(tiles, BOUNDED_EACH), rows)](
        logits_BV, stats, record, *given, *shape, **modes, num_warps=warps.bounds or max(1, tile // 1024)
    )  # fmt: skip
