"""Sampling: from a step's logits to tokens and their log-probabilities, without a host in between.

Owns the reference, the last kernel and the launcher. A token is what `engine.sampling.sampler`
defines: argmax of edited logit / T + Gumbel noise in float64, the lower id winning a tie. The scan
leaves an fp32 upper bound per tile of the vocabulary; here tiles are evaluated in float64 in
descending order of their bounds until no other can win, so the token equals the host's unless two
scores differ by less than the two machines' float64 logarithms do.

Two launches, three where a row may be truncated; all of fixed shape, without host synchronisation,
and reductions are ordered. Shapes: B rows, V vocabulary, T tiles.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_reference import sample_rows_reference
from engine.kernels.sample_scan import (
    BEST,
    GREEDY,
    INF,
    MAX,
    MOMENT,
    RAW_MAX,
    RAW_SUM,
    STATS,
    SUM,
    TEMPERATURE_SUM,
    WORD_SCALE,
    has_edits,
    sample_scan_kernel,
    slot_of,
    tile_ids,
    tile_words,
)
from engine.kernels.sample_threshold import is_kept, row_values, sample_threshold_kernel

__all__ = ["sample_rows", "sample_rows_reference"]

BEYOND = tl.constexpr(2**31 - 1)


@triton.jit
def _weighted(stats_ptr, maxima_T, highest, inverse, at, tiles, WHICH: tl.constexpr):
    """float64 sum of a column of sums, each relative to its own tile's maximum, relative to the row's."""
    sums_T = tl.load(stats_ptr + WHICH * tiles + at, mask=at < tiles, other=0.0).to(tl.float64)
    factors_T = tl.exp((maxima_T - highest).to(tl.float64) * inverse)
    return tl.sum(tl.where(sums_T == 0.0, 0.0, sums_T * factors_T), 0)


@triton.jit
def sample_pick_kernel(
    logits_ptr, edited_ptr, stats_ptr, record_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, seed_ptr, position_ptr, repetition_ptr, frequency_ptr, presence_ptr, counts_ptr, bias_ids_ptr,
    stop_ids_ptr, min_until_ptr, ids_ptr, raw_ptr, scaled_ptr, processed_ptr, lse_ptr, score_ptr, bad_ptr,
    entropy_ptr, first_id, logits_stride, V, tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr, BIAS: tl.constexpr,
    STOPS: tl.constexpr, ENTROPY: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    greedy = temperature < GREEDY
    temperature = tl.where(greedy, 1.0, temperature)
    inverse = 1.0 / temperature
    truncates = (tl.load(top_k_ptr + slot) > 0) | (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    truncates = truncates & (greedy == 0)
    position = tl.load(position_ptr + slot)
    seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
    edited = row < 0
    penalised = row < 0
    if EDITS:
        edited, penalised, _masked = has_edits(
            slot, position, repetition_ptr, frequency_ptr, presence_ptr, bias_ids_ptr, stop_ids_ptr, min_until_ptr,
            BIAS, STOPS,
        )  # fmt: skip
    stats_ptr += row * (STATS * tiles)
    at = tl.arange(0, TILES)
    raw_maxima_T = tl.load(stats_ptr + RAW_MAX * tiles + at, mask=at < tiles, other=-INF)
    maxima_T = tl.load(stats_ptr + MAX * tiles + at, mask=at < tiles, other=-INF)
    bounds_T = tl.load(stats_ptr + BEST * tiles + at, mask=at < tiles, other=-INF)
    raw_highest, highest = tl.max(raw_maxima_T, 0), tl.max(maxima_T, 0)
    raw_total = _weighted(stats_ptr, raw_maxima_T, raw_highest, 1.0, at, tiles, RAW_SUM)
    scaled_total = _weighted(stats_ptr, raw_maxima_T, raw_highest, inverse, at, tiles, TEMPERATURE_SUM)
    total = _weighted(stats_ptr, maxima_T, highest, inverse, at, tiles, SUM)
    good = (raw_total < INF) & (raw_highest > -INF) & (total < INF) & (highest > -INF) & (tl.max(bounds_T, 0) > -INF)
    good = good & (tl.max(bounds_T, 0) < INF)

    lowest = temperature * 0.0 - INF
    threshold, last_tied = lowest, V
    if truncates & good:
        threshold = tl.load(record_ptr + row * 4)
        last_tied = tl.load(record_ptr + row * 4 + 1).to(tl.int32)
    best, token = lowest, 0
    bound = tl.where(good, tl.max(bounds_T, 0), -INF)
    while (bound > -INF) & (bound + (tl.abs(bound) + 32.0) * 1e-6 >= best):
        tile = tl.min(tl.where(bounds_T == bound, at, TILES), 0)
        ids = tile_ids(tile, TILE)
        values = row_values(logits_ptr, edited_ptr, row, logits_stride, V, ids, edited, EDITS)
        scores = values.to(tl.float64)
        if not greedy:
            words = tile_words(seed, position, first_id, tile, TILE)
            rest = (words.to(tl.float64) + 0.5) * -WORD_SCALE + 1.0
            scores = scores / temperature - tl.log(-tl.log(rest))
            if truncates:
                scores = tl.where(is_kept(values, ids, threshold, last_tied), scores, -INF)
        tile_best = tl.max(tl.max(scores, 1), 0)
        first = tl.min(tl.min(tl.where(scores == tile_best, ids, BEYOND), 1), 0)
        if (tile_best > best) | ((tile_best == best) & (first < token)):
            best, token = tile_best, first
        bounds_T = tl.where(at == tile, -INF, bounds_T)
        bound = tl.max(bounds_T, 0)

    nan = float("nan")
    raw = tl.load(logits_ptr + row * logits_stride + token).to(tl.float64)
    value = raw
    if edited:
        value = tl.load(edited_ptr + row * V + token).to(tl.float64)
    raw_lse = raw_highest.to(tl.float64) + tl.log(raw_total)
    logprob = raw - raw_lse
    scaled, processed = logprob, logprob
    moment = raw_lse * 0.0
    if ENTROPY:
        sums_T = tl.load(stats_ptr + SUM * tiles + at, mask=at < tiles, other=0.0).to(tl.float64)
        below_T = tl.where(sums_T > 0.0, (maxima_T - highest).to(tl.float64) * inverse, 0.0)
        moments_T = tl.load(stats_ptr + MOMENT * tiles + at, mask=at < tiles, other=0.0).to(tl.float64)
        moment = tl.sum((moments_T + sums_T * below_T) * tl.exp(below_T), 0)
    if not greedy:
        scaled = (raw - raw_highest) * inverse - tl.log(scaled_total)
        if truncates & good:
            total = tl.load(record_ptr + row * 4 + 2)
            moment = tl.load(record_ptr + row * 4 + 3)
        processed = (value - highest) * inverse - tl.log(total)
    tl.store(ids_ptr + row, tl.where(good, token + first_id, 0).to(tl.int64))
    tl.store(raw_ptr + row, tl.where(good, logprob, nan).to(tl.float32))
    tl.store(scaled_ptr + row, tl.where(good, scaled, nan).to(tl.float32))
    tl.store(processed_ptr + row, tl.where(good, processed, nan).to(tl.float32))
    tl.store(lse_ptr + row, tl.where(good, raw_lse, nan).to(tl.float32))
    tl.store(score_ptr + row, tl.where(good, best, nan))
    tl.store(bad_ptr + row, (good == 0).to(tl.uint8))
    if ENTROPY:
        tl.store(entropy_ptr + row, tl.where(good, tl.log(total) - moment / total, nan).to(tl.float32))
    if COUNT:
        seen = tl.load(counts_ptr + slot * V + token)
        tl.store(counts_ptr + slot * V + token, seen + 2, mask=penalised & good)


def sample_rows(
    logits_BV: torch.Tensor,
    columns: SampleColumns,
    out: SampleOut,
    workspace: SampleWorkspace,
    truncated: bool = True,
    count: bool = False,
    warps: tuple[int, int, int] | None = None,
) -> SampleOut:
    """Draw one id per row of `logits_BV` (bf16, fp16 or fp32; rows contiguous), into `out`.

    `truncated=False` promises that no active row has top-k, top-p or min-p, and saves a launch.
    `count` adds drawn ids to the counts of rows with penalties. Allocates nothing. `warps` are those
    of the three kernels.
    """
    rows, vocab = logits_BV.shape
    tiles = workspace.stats_BNT.shape[2]
    edits = columns.edits
    assert logits_BV.stride(1) == 1, "rows of logits must be contiguous"
    assert rows <= workspace.stats_BNT.shape[0], f"{rows} rows, workspace for {workspace.stats_BNT.shape[0]}"
    assert triton.cdiv(vocab, workspace.tile) == tiles, f"vocabulary {vocab} does not fit the workspace's {tiles} tiles"
    assert edits is None or workspace.edited_BV is not None, "edits need a workspace with room for them"
    assert edits is None or edits.bias_ids_SN.shape[1] * edits.stop_ids_SN.shape[1] > 0, "lists need one column"
    assert columns.first_id % 8 == 0, f"first id {columns.first_id} is not a multiple of 8"
    if rows == 0:
        return out
    nothing = columns.temperature_S
    edited = workspace.edited_BV if workspace.edited_BV is not None else workspace.stats_BNT
    slots = columns.slots_B if columns.slots_B is not None else nothing
    drawing = (columns.temperature_S, columns.top_k_S, columns.top_p_S, columns.min_p_S, columns.seed_S)
    head = (slots, columns.active_S, *drawing, columns.position_S)
    penalties = (nothing,) * 3 if edits is None else (edits.repetition_S, edits.frequency_S, edits.presence_S)
    counts = nothing if edits is None else edits.counts_SV
    bias_ids, bias = (nothing, nothing) if edits is None else (edits.bias_ids_SN, edits.bias_SN)
    stops = (nothing, nothing) if edits is None else (edits.stop_ids_SN, edits.min_until_S)
    shape = (columns.first_id, logits_BV.stride(0), vocab, tiles)
    modes = dict(
        TILE=workspace.tile,
        HAS_SLOTS=columns.slots_B is not None,
        EDITS=edits is not None,
        BIAS=0 if edits is None else edits.bias_ids_SN.shape[1],
        STOPS=0 if edits is None else edits.stop_ids_SN.shape[1],
    )
    entropy = out.entropy_B is not None
    scan_warps, threshold_warps, pick_warps = warps or (max(1, workspace.tile // 512), 8, 8)
    sample_scan_kernel[(tiles, rows)](
        logits_BV, edited, workspace.stats_BNT, *head, *penalties, counts, bias_ids, bias, *stops, *shape,
        **modes, ENTROPY=entropy, num_warps=scan_warps, enable_fp_fusion=False,
    )  # fmt: skip
    modes["TILES"] = triton.next_power_of_2(tiles)
    if truncated:
        sample_threshold_kernel[(rows,)](
            logits_BV, edited, workspace.stats_BNT, workspace.record_B4, *head, *penalties, bias_ids, *stops, *shape,
            **modes, CHUNK=min(workspace.tile, 128 * threshold_warps), num_warps=threshold_warps,
        )  # fmt: skip
    columns_out = (out.ids_B, out.raw_B, out.temperature_B, out.processed_B, out.lse_B, out.score_B, out.bad_B)
    sample_pick_kernel[(rows,)](
        logits_BV, edited, workspace.stats_BNT, workspace.record_B4, *head, *penalties, counts, bias_ids, *stops,
        *columns_out, out.entropy_B if entropy else nothing, *shape,
        **modes, ENTROPY=entropy, COUNT=count and edits is not None, num_warps=pick_warps,
    )  # fmt: skip
    return out
