"""The most likely alternatives of each row, after it was drawn.

Owns the choice of the k highest ids under the row's own definition of a log-probability, ties to the
lower id, and writing them into the ring. Where fewer ids have any probability the lowest of the others
follow with -inf. In no order: who reads them sorts. Rows that want none leave at once.
`engine.sampling.logprobs.highest` is the reference.

Shapes: I ids of a tile, R rows with alternatives, W ring width, K the most alternatives.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# Conditions known when compiling stay apart from those that are not.
# ruff: noqa: SIM102
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.round_places import Places
from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace, edit_arguments
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_level import CUT, LAST_TIED, RECORD_WIDTH
from engine.kernels.sample_scan import (
    BY_PROCESSED,
    BY_RAW,
    GREEDY,
    MAX,
    RAW_MAX,
    STATS,
    definition_of,
    slot_of,
    truncates,
)
from engine.kernels.sample_threshold import is_kept, last_tied_of, search, tally_around
from engine.memory.device_table import DeviceTable

LEAST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite value."""


@triton.jit
def _emit(taken_I, ids_I, values_I, found, ids_ptr, values_ptr):
    """Append what is taken behind the first `found`."""
    place_I = found + tl.cumsum(taken_I.to(tl.int32), 0) - 1
    tl.store(ids_ptr + place_I, ids_I, mask=taken_I)
    tl.store(values_ptr + place_I, values_I, mask=taken_I)
    return found + tl.sum(taken_I.to(tl.int32), 0)


@triton.jit
def sample_top_kernel(
    logits_ptr, stats_ptr, record_ptr, slots_ptr, active_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    position_ptr, definition_ptr, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
    mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width,
    drawn_ptr, raw_ptr, scaled_ptr, processed_ptr, bad_ptr, new_ptr,
    top_row_ptr, top_count_ptr, top_ids_ptr, top_logprobs_ptr, holder_ptr, before_ptr, first_id, logits_stride, V,
    tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, CHUNK: tl.constexpr, HAS_SLOTS: tl.constexpr, EDITS: tl.constexpr,
    W: tl.constexpr, K: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = slot_of(row, slots_ptr, active_ptr, HAS_SLOTS)
    if slot < 0:
        return
    # Whose ring the alternatives go to.
    holder, number = slot, slot * 0
    if PLACED:
        holder, number = tl.load(holder_ptr + row).to(tl.int64), tl.load(before_ptr + row).to(tl.int64)
    if holder < 0:
        return
    number += tl.load(new_ptr + holder)
    wanted = tl.load(top_count_ptr + holder)
    if (wanted <= 0) | (tl.load(bad_ptr + row) != 0):
        return
    given = tl.load(temperature_ptr + slot)
    greedy = given < GREEDY
    definition = definition_of(slot, greedy, definition_ptr, True)
    processed = definition == BY_PROCESSED
    edits = edits_of(
        slot, tl.load(position_ptr + slot), V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr,
        bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
    )  # fmt: skip
    if EDITS:
        # Other definitions are of the model's own logits.
        edits = (
            edits[0] & processed, edits[1], edits[2], edits[3], edits[4], edits[5], edits[6], edits[7], edits[8],
            edits[9], edits[10],
        )  # fmt: skip
    at = row * logits_stride
    stats_ptr += row * (STATS * tiles)
    maxima_ptr = stats_ptr + tl.where(processed, MAX, RAW_MAX) * tiles
    at_T = tl.arange(0, TILES)
    maxima_T = tl.load(maxima_ptr + at_T, mask=at_T < tiles, other=-INF)
    highest = tl.max(maxima_T, 0)
    lowest = tl.zeros_like(highest) + LEAST
    if wanted <= tiles:
        ranked_T = tl.sort(maxima_T, descending=True)
        lowest = tl.maximum(lowest, tl.max(tl.where(at_T == wanted - 1, ranked_T, -INF), 0))
    edge = search(
        logits_ptr, maxima_ptr, at, V, tiles, edits, lowest, highest, 0.0, wanted, given * 0.0, TILE, CHUNK, EDITS
    )
    above, _mass, tied = tally_around(logits_ptr, maxima_ptr, at, V, tiles, edits, edge, highest, 0.0, TILE, EDITS)
    last = V
    if above + tied > wanted:
        last = last_tied_of(logits_ptr, maxima_ptr, at, V, tiles, edits, edge, wanted - above, TILE, EDITS)
    cut, last_kept = given * 0.0 - INF, V
    if processed & truncates(slot, greedy, top_k_ptr, top_p_ptr, min_p_ptr):
        cut = tl.load(record_ptr + row * RECORD_WIDTH + CUT)
        last_kept = tl.load(record_ptr + row * RECORD_WIDTH + LAST_TIED).to(tl.int32)

    token = (tl.load(drawn_ptr + row) - first_id).to(tl.int32)
    of_token = tl.load(logits_ptr + at + token).to(tl.float32)
    if EDITS:
        if edits[0]:
            of_token = row_values(logits_ptr, at, V, token, edits, EDITS)
    logprob = tl.load(processed_ptr + row)
    inverse = tl.where(definition == BY_RAW, 1.0, 1.0 / tl.where(greedy, 1.0, given))
    if definition == BY_RAW:
        logprob = tl.load(raw_ptr + row)
    elif not processed:
        logprob = tl.load(scaled_ptr + row)
    line = tl.load(top_row_ptr + holder).to(tl.int64) * W + number % W
    ids_ptr, values_ptr = top_ids_ptr + line * K, top_logprobs_ptr + line * K
    found, least = 0, tl.maximum(edge.to(tl.float64), cut)
    for tile in range(tiles):
        if tl.load(maxima_ptr + tile).to(tl.float64) >= least:
            ids_I = tile * TILE + tl.arange(0, TILE)
            values_I = row_values(logits_ptr, at, V, ids_I, edits, EDITS)
            taken_I = is_kept(values_I, ids_I, edge.to(tl.float64), last) & is_kept(values_I, ids_I, cut, last_kept)
            taken_I = taken_I & (values_I > -INF)
            logprobs_I = (logprob + (values_I.to(tl.float64) - of_token) * inverse).to(tl.float32)
            found = _emit(taken_I, first_id + ids_I, logprobs_I, found, ids_ptr, values_ptr)
    tile = 0
    while (found < wanted) & (tile < tiles):
        ids_I = tile * TILE + tl.arange(0, TILE)
        values_I = row_values(logits_ptr, at, V, ids_I, edits, EDITS)
        kept_I = is_kept(values_I, ids_I, cut, last_kept) & (values_I > -INF)
        rest_I = (ids_I < V) & (kept_I == 0)
        rest_I = rest_I & (tl.cumsum(rest_I.to(tl.int32), 0) <= wanted - found)
        found = _emit(rest_I, first_id + ids_I, tl.full((TILE,), -INF, tl.float32), found, ids_ptr, values_ptr)
        tile += 1


def sample_top(
    logits_BV: torch.Tensor,
    table: DeviceTable,
    columns: SampleColumns,
    drawn: SampleOut,
    workspace: SampleWorkspace,
    warps: int = 8,
    places: Places | None = None,
) -> None:
    """Leave the alternatives of the rows that want any in the table's ring, beside the token that
    `advance_rows` will put there. Follows `sample_rows` of the same logits and workspace. Where rows are not slots
    but verify, `places` tells whose they are, and how many tokens of the step come before."""
    rows, vocab = logits_BV.shape
    tiles, tile = workspace.stats_BNT.shape[2], workspace.tile
    edits, rings = columns.edits, table.columns
    assert columns.definition_S is not None, "alternatives are those of a definition"
    nothing = columns.temperature_S
    slots = columns.slots_B if columns.slots_B is not None else nothing
    changes = edit_arguments(edits, nothing)
    _, ring, width = rings.top_ids_RWK.shape
    sample_top_kernel[(rows,)](
        logits_BV, workspace.stats_BNT, workspace.record_BR, slots, columns.active_S,
        columns.temperature_S, columns.top_k_S, columns.top_p_S, columns.min_p_S, columns.position_S,
        columns.definition_S, *changes, drawn.ids_B, drawn.raw_B, drawn.temperature_B, drawn.processed_B, drawn.bad_B,
        table.new_S, rings.top_row_S, rings.top_count_S, rings.top_ids_RWK, rings.top_logprobs_RWK,
        table.new_S if places is None else places.slots_R, table.new_S if places is None else places.before_R,
        columns.first_id, logits_BV.stride(0), vocab, tiles,
        TILE=tile, TILES=triton.next_power_of_2(tiles), CHUNK=min(tile, 128 * warps),
        HAS_SLOTS=columns.slots_B is not None, EDITS=edits is not None, W=ring, K=width,
        PLACED=places is not None,
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
