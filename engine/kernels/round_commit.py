"""The end of a round: how many drafts are kept, and what that does to each row.

Owns coupled acceptance (drafts are kept while they equal the target's own token), and the taking in of a
round's tokens under either rule: rings, counters, counts, stops, lengths, bad logits. Ignores the draw and the
rejection rule (`engine.kernels.round_judge`).

A row takes tokens one after another, like so many steps of `engine.kernels.decode_step.advance_rows`: what
follows a stop, the row's length or bad logits never existed. What the host wants to know of a round is
left in one record a row.

Shapes: B rows of a round, G drafts, R verify rows, S slots, W ring width, F fields.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Conditions known when compiling stay apart from those that are not.
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.round_rows import VerifyRows
from engine.kernels.sample_columns import EditColumns, SampleOut
from engine.memory.device_table import BAD, RUNNING, STOPPED, DeviceTable

HEAD = 5
"""Fields of a record before its parts of G: window (-1: idle), drafts verified, kept at most, accepted, and tokens
emitted."""
PARTS = 5
"""Drafts as int32; bits of float32 confidence, survival, chance of acceptance (NaN: unknown) and log q."""


def record_width(drafts: int) -> int:
    return HEAD + PARTS * drafts


@dataclass(slots=True)
class Drafted:
    """What a round drafted: ids int64 [B, G]; float32 [B, G] or None where the drafter has none: uncalibrated
    confidence, survival that the budget was spent on, log q. `keep_B` int32 bounds what may be kept."""

    ids_BG: torch.Tensor
    window_B: torch.Tensor
    keep_B: torch.Tensor
    confidence_BG: torch.Tensor | None = None
    survival_BG: torch.Tensor | None = None
    log_q_BG: torch.Tensor | None = None


@dataclass(slots=True)
class Judged:
    """Rejection's verdict: drafts accepted by row int32 [B], each draft's chance by verify row float32 [R].
    The tokens to take are in the drawn ids by then."""

    accepted_B: torch.Tensor
    chance_R: torch.Tensor


def commit_rounds_reference(
    table: DeviceTable,
    rows: VerifyRows,
    drafted: Drafted,
    drawn: SampleOut,
    judged: Judged | None = None,
    edits: EditColumns | None = None,
) -> torch.Tensor:
    """The first fields of each row's record, int32 [B, 5], after taking tokens in; the host steers."""
    count = len(rows.starts_B1) - 1
    record_BF = torch.zeros(count, HEAD, dtype=torch.int32)
    for b in range(count):
        start, size = int(rows.starts_B1[b]), int(rows.starts_B1[b + 1] - rows.starts_B1[b])
        record_BF[b, 0] = drafted.window_B[b]
        if size == 0:
            continue
        whole = 0
        if judged is not None:
            whole = int(judged.accepted_B[b])
        else:
            while (
                whole < size - 1
                and not drawn.bad_B[start + whole]
                and drawn.ids_B[start + whole] == drafted.ids_BG[b, whole]
            ):
                whole += 1
        emitted = 0
        for row in range(start, start + min(whole, int(drafted.keep_B[b])) + 1):
            slot = int(rows.slots_R[row])
            if drawn.bad_B[row]:
                table.finished_S[slot] = BAD
                break
            _take(table, slot, drawn, row)
            if edits is not None and edits.count_row_S[slot] >= 0:
                edits.counts_CV[edits.count_row_S[slot], drawn.ids_B[row]] += 2
            emitted += 1
            if table.finished_S[slot] != RUNNING:
                break
        record_BF[b, 1:] = torch.tensor([size - 1, int(drafted.keep_B[b]), whole, emitted])
    return record_BF


def _take(table: DeviceTable, slot: int, drawn: SampleOut, row: int) -> None:
    token, new = int(drawn.ids_B[row]), int(table.new_S[slot])
    place = new % table.ring
    by_definition = (drawn.processed_B, drawn.temperature_B, drawn.raw_B)
    table.ring_ids_SW[slot, place] = token
    table.ring_logprobs_SW[slot, place] = by_definition[int(table.definition_S[slot])][row]
    if drawn.entropy_B is not None:
        for number, column in enumerate((*by_definition, drawn.entropy_B)):
            table.columns.values_CSW[number, slot, place] = column[row]
    table.last_token_S[slot] = token
    table.computed_S[slot] += 1
    table.new_S[slot] = new + 1
    ends = token in table.stop_ids_SK[slot].tolist() or new + 1 >= int(table.max_new_S[slot])
    table.finished_S[slot] = STOPPED if ends else RUNNING


@triton.jit
def _commit_kernel(
    starts_ptr, slots_ptr, drafts_ptr, window_ptr, keep_ptr, confidence_ptr, survival_ptr, log_q_ptr, accepted_ptr,
    chance_ptr, ids_ptr, raw_ptr, temperature_ptr, processed_ptr, entropy_ptr, bad_ptr, definition_ptr, finished_ptr,
    last_token_ptr, computed_ptr, new_ptr, max_new_ptr, stop_ids_ptr, ring_ids_ptr, ring_logprobs_ptr, values_ptr,
    values_stride, count_row_ptr, counts_ptr, V, record_ptr,
    DRAFTS: tl.constexpr, WIDE: tl.constexpr, K: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr,
    EDITS: tl.constexpr, JUDGED: tl.constexpr, CONFIDENCE: tl.constexpr, SURVIVAL: tl.constexpr, LOG_Q: tl.constexpr,
    HEAD: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    size = tl.load(starts_ptr + row + 1) - start
    record_ptr += row.to(tl.int64) * (HEAD + PARTS * DRAFTS)
    k_W = tl.arange(0, WIDE)
    inside_W = k_W < DRAFTS
    at_W = row.to(tl.int64) * DRAFTS + k_W
    drafts_W = tl.load(drafts_ptr + at_W, mask=inside_W, other=-1)
    unknown_W = tl.full((WIDE,), float("nan"), tl.float32)
    confidence_W, survival_W, log_q_W, chance_W = unknown_W, unknown_W, unknown_W, unknown_W
    if CONFIDENCE:
        confidence_W = tl.load(confidence_ptr + at_W, mask=inside_W, other=0.0)
    if SURVIVAL:
        survival_W = tl.load(survival_ptr + at_W, mask=inside_W, other=0.0)
    if LOG_Q:
        log_q_W = tl.load(log_q_ptr + at_W, mask=inside_W, other=0.0)
    verified_W = k_W < size - 1
    if JUDGED:
        chance_W = tl.load(chance_ptr + start + k_W, mask=verified_W, other=float("nan"))
        whole = tl.load(accepted_ptr + row)
    else:
        drawn_W = tl.load(ids_ptr + start + k_W, mask=verified_W, other=-2)
        bad_W = tl.load(bad_ptr + start + k_W, mask=verified_W, other=1)
        equal_W = verified_W & (drawn_W == drafts_W) & (bad_W == 0)
        whole = tl.min(tl.where(equal_W, WIDE, k_W), 0)
    whole = tl.minimum(whole, tl.maximum(size - 1, 0))
    fields_ptr = record_ptr + HEAD + k_W
    tl.store(fields_ptr, drafts_W.to(tl.int32), mask=inside_W)
    tl.store(fields_ptr + DRAFTS, confidence_W.to(tl.int32, bitcast=True), mask=inside_W)
    tl.store(fields_ptr + 2 * DRAFTS, survival_W.to(tl.int32, bitcast=True), mask=inside_W)
    tl.store(fields_ptr + 3 * DRAFTS, chance_W.to(tl.int32, bitcast=True), mask=inside_W)
    tl.store(fields_ptr + 4 * DRAFTS, log_q_W.to(tl.int32, bitcast=True), mask=inside_W)
    emitted = size * 0
    if size > 0:
        slot = tl.load(slots_ptr + start).to(tl.int64)
        definition = tl.load(definition_ptr + slot)
        new, most = tl.load(new_ptr + slot), tl.load(max_new_ptr + slot)
        stops_K = tl.load(stop_ids_ptr + slot * K + tl.arange(0, K))
        last = tl.minimum(whole, tl.load(keep_ptr + row).to(tl.int32))
        finished = size * 0
        token = tl.load(last_token_ptr + slot)
        while (emitted <= last) & (finished == 0):
            at = start + emitted
            if tl.load(bad_ptr + at) != 0:
                finished = size * 0 + 2
            else:
                token = tl.load(ids_ptr + at)
                logprob = tl.load(processed_ptr + at)
                logprob = tl.where(definition == 1, tl.load(temperature_ptr + at), logprob)
                logprob = tl.where(definition == 2, tl.load(raw_ptr + at), logprob)
                place = slot * W + (new + emitted) % W
                tl.store(ring_ids_ptr + place, token.to(tl.int32))
                tl.store(ring_logprobs_ptr + place, logprob)
                if COLUMNS:
                    tl.store(values_ptr + place, tl.load(processed_ptr + at))
                    tl.store(values_ptr + place + values_stride, tl.load(temperature_ptr + at))
                    tl.store(values_ptr + place + 2 * values_stride, tl.load(raw_ptr + at))
                    tl.store(values_ptr + place + 3 * values_stride, tl.load(entropy_ptr + at))
                emitted += 1
                hit = tl.max((stops_K == token.to(tl.int32)).to(tl.int32), 0)
                finished = ((hit > 0) | (new + emitted >= most)).to(tl.int32)
        if EDITS:
            count_row = tl.load(count_row_ptr + slot).to(tl.int64)
            taken_W = k_W < emitted
            ids_W = tl.load(ids_ptr + start + k_W, mask=taken_W & (count_row >= 0), other=-1)
            same_WW = (ids_W[:, None] == ids_W[None, :]) & taken_W[None, :]
            times_W = tl.sum(same_WW.to(tl.int32), 1)
            # Each id once, for all its times.
            earlier_W = tl.sum((same_WW & (k_W[None, :] < k_W[:, None])).to(tl.int32), 1)
            once_W = taken_W & (earlier_W == 0) & (count_row >= 0)
            counts_W_ptr = counts_ptr + tl.maximum(count_row, 0) * V + ids_W
            counts_W = tl.load(counts_W_ptr, mask=once_W, other=0)
            tl.store(counts_W_ptr, counts_W + (2 * times_W).to(counts_W.dtype), mask=once_W)
        tl.store(last_token_ptr + slot, token)
        tl.store(computed_ptr + slot, tl.load(computed_ptr + slot) + emitted)
        tl.store(new_ptr + slot, new + emitted)
        tl.store(finished_ptr + slot, finished)
    tl.store(record_ptr, tl.load(window_ptr + row))
    tl.store(record_ptr + 1, tl.maximum(size - 1, 0))
    tl.store(record_ptr + 2, tl.where(size > 0, tl.load(keep_ptr + row).to(tl.int32), 0))
    tl.store(record_ptr + 3, tl.where(size > 0, whole, 0))
    tl.store(record_ptr + 4, emitted)


def commit_rounds(
    table: DeviceTable,
    rows: VerifyRows,
    drafted: Drafted,
    drawn: SampleOut,
    record_BF: torch.Tensor,
    judged: Judged | None = None,
    edits: EditColumns | None = None,
) -> None:
    """Take a round's tokens into the table. Without `judged` the rule is the coupled one: `drawn` are the
    target's own tokens, and those up to the first that differs from its draft are taken.

    `record_BF` int32 is `record_width` wide. With `drawn.entropy_B` the ring columns of every definition are
    filled; with `edits` (by slot), tokens of rows with penalties are counted."""
    count, drafts = drafted.ids_BG.shape
    values_CSW, columns = table.columns.values_CSW, drawn.entropy_B is not None
    assert record_BF.shape == (count, record_width(drafts)) and record_BF.is_contiguous(), "a record a row"
    assert not columns or values_CSW.shape[1], "no row has asked for columns"
    nothing = drawn.processed_B

    def given(part: torch.Tensor | None) -> torch.Tensor:
        assert part is None or (part.is_contiguous() and part.dtype == torch.float32), "parts are contiguous float32"
        return nothing if part is None else part

    early = is_early(record_BF)
    _commit_kernel[(count,)](
        rows.starts_B1,
        rows.slots_R,
        drafted.ids_BG,
        drafted.window_B,
        drafted.keep_B,
        given(drafted.confidence_BG),
        given(drafted.survival_BG),
        given(drafted.log_q_BG),
        rows.starts_B1 if judged is None else judged.accepted_B,
        nothing if judged is None else judged.chance_R,
        drawn.ids_B,
        drawn.raw_B,
        drawn.temperature_B,
        drawn.processed_B,
        nothing if drawn.entropy_B is None else drawn.entropy_B,
        drawn.bad_B,
        table.definition_S,
        table.finished_S,
        table.last_token_S,
        table.computed_S,
        table.new_S,
        table.max_new_S,
        table.stop_ids_SK,
        table.ring_ids_SW,
        table.ring_logprobs_SW,
        values_CSW if columns else nothing,
        values_CSW.stride(0),
        table.definition_S if edits is None else edits.count_row_S,
        table.definition_S if edits is None else edits.counts_CV,
        0 if edits is None else edits.counts_CV.shape[1],
        record_BF,
        DRAFTS=drafts,
        WIDE=power_of_two(drafts + 1),
        K=DeviceTable.MAX_STOPS,
        W=table.ring,
        COLUMNS=columns,
        EDITS=edits is not None,
        JUDGED=judged is not None,
        CONFIDENCE=drafted.confidence_BG is not None,
        SURVIVAL=drafted.survival_BG is not None,
        LOG_Q=drafted.log_q_BG is not None,
        HEAD=HEAD,
        PARTS=PARTS,
        EARLY=early,
        num_warps=1,
        **options(early),
    )
