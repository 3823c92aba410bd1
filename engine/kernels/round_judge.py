"""Rejection rounds on the device: which drafts pass, and what stands for the first that does not.

Owns the rule of `engine.dspark.acceptance.verify_rejection` from scalars: log p and log q of each draft,
a uniform number, and one row of (p - q)+ for each row of the round. No distribution is stored but that
one. Noise is keyed as `engine.dspark.round_noise` keys it. Ignores how p and q were drawn from (both by
`engine.kernels.sample_epilogue`) and what is done with the tokens (`engine.kernels.round_commit`).

The logarithm of what normalises a row is had from the token drawn there: value / T - its log-probability.

Shapes: B rows, R verify rows, G drafts, V vocabulary.
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

from engine.kernels.attention_tile import power_of_two
from engine.kernels.philox import round_word
from engine.kernels.round_rows import VerifyRows
from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace, edit_arguments
from engine.kernels.sample_edits import INF, edits_of, row_values
from engine.kernels.sample_level import CUT, LAST_TIED, RECORD_WIDTH
from engine.kernels.sample_scan import GREEDY, WORD_SCALE, truncates
from engine.kernels.sample_threshold import is_kept
from engine.memory.device_table import DeviceTable
from engine.sampling.seeds import USE_ACCEPT, USE_DRAFT, USE_EMIT

_DRAFT = tl.constexpr(USE_DRAFT << 32)
_ACCEPT = tl.constexpr(USE_ACCEPT << 32)
_EMIT = tl.constexpr(USE_EMIT << 32)
SPARE = tl.constexpr(1e-9)
"""Share of p that is left in a residual, so that one without mass, where p and q are equal but for rounding,
draws from p."""
TILE = 2048


@dataclass(slots=True)
class DraftDraw:
    """What drafts were drawn from: `logits_BGV` with `columns` by row of the round, log q of each draft, and
    where the rows of each slot were cut, float64 [G, B, 2] (None: nobody truncates)."""

    logits_BGV: torch.Tensor
    log_q_BG: torch.Tensor
    cuts_GB2: torch.Tensor | None


@dataclass(slots=True)
class JudgeBuffers:
    """Scratch and results of a tier: `Judged`'s parts, and the token after those kept. `residual_BV` is the one
    buffer over the vocabulary."""

    log_p_R: torch.Tensor
    chance_R: torch.Tensor
    accepted_B: torch.Tensor
    emit_row_B: torch.Tensor
    refused_B: torch.Tensor
    columns: SampleColumns
    emitted: SampleOut
    residual_BV: torch.Tensor

    @staticmethod
    def empty(rows: int, verify: int, columns: SampleColumns, residual_BV: torch.Tensor) -> JudgeBuffers:
        device = residual_BV.device

        def column(count: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        return JudgeBuffers(
            column(verify, torch.float32),
            column(verify, torch.float32),
            column(rows, torch.int32),
            column(rows, torch.int32),
            column(rows, torch.int32),
            columns,
            SampleOut.empty(rows, device),
            residual_BV[:rows],
        )


@triton.jit(do_not_specialize=["rows"])
def _seeds_kernel(slots_ptr, anchors_ptr, seed_ptr, sample_id_ptr, out_ptr, rows, WIDE: tl.constexpr, G: tl.constexpr):
    row = tl.program_id(0)
    slot = tl.maximum(tl.load(slots_ptr + row).to(tl.int64), 0)
    seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
    sample_id = tl.load(sample_id_ptr + slot).to(tl.uint64, bitcast=True)
    k_W = tl.arange(0, WIDE)
    words_W = round_word(seed, tl.load(anchors_ptr + row), k_W.to(tl.uint64) + _DRAFT, sample_id)
    tl.store(out_ptr + k_W * rows + row, words_W.to(tl.int64, bitcast=True), mask=k_W < G)


def draft_seeds(table: DeviceTable, slots_B: torch.Tensor, anchors_B: torch.Tensor, out_GB: torch.Tensor) -> None:
    """int64 bits of the seeds that a round's drafts are drawn with."""
    drafts, rows = out_GB.shape
    _seeds_kernel[(rows,)](
        slots_B, anchors_B, table.seed_S, table.sample_id_S, out_GB, rows,
        WIDE=power_of_two(drafts), G=drafts, num_warps=1,
    )  # fmt: skip


@triton.jit
def _logprobs(
    logits_ptr, at, V, drawn, token, temperature, greedy, raw_ptr, scaled_ptr, processed_ptr, row, edits,
    EDITS: tl.constexpr,
):  # fmt: skip
    """float64 log-probabilities of a token by definition: raw, temperature, processed (before truncation), and
    its edited logit, from those of the token drawn in its row."""
    inverse = 1.0 / temperature
    own = tl.load(logits_ptr + at + drawn).to(tl.float64)
    other = tl.load(logits_ptr + at + token).to(tl.float64)
    raw = other - own + tl.load(raw_ptr + row).to(tl.float64)
    scaled = (other - own) * inverse + tl.load(scaled_ptr + row).to(tl.float64)
    value = row_values(logits_ptr, at, V, token, edits, EDITS)
    base = row_values(logits_ptr, at, V, drawn, edits, EDITS)
    processed = (value - base).to(tl.float64) * inverse + tl.load(processed_ptr + row).to(tl.float64)
    # Greedy rows report raw log-probabilities, whatever edits do.
    processed = tl.where(greedy, raw, processed)
    return raw, tl.where(greedy, raw, scaled), processed, value


@triton.jit
def _score_kernel(
    logits_ptr, logits_stride, V, owner_ptr, starts_ptr, drafts_ptr, record_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    min_p_ptr, position_ptr, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
    mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width,
    ids_ptr, raw_ptr, scaled_ptr, processed_ptr, bad_ptr, log_p_ptr,
    accepted_ptr, keep_ptr, emit_row_ptr, emitted_ptr,
    G: tl.constexpr, EDITS: tl.constexpr, TRUNCATED: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    owner = tl.load(owner_ptr + row).to(tl.int64)
    if owner < 0:
        return
    start, end = tl.load(starts_ptr + owner), tl.load(starts_ptr + owner + 1)
    k = row.to(tl.int32) - start
    bad = tl.load(bad_ptr + row) != 0
    if SETTLE:
        last = tl.minimum(tl.load(accepted_ptr + owner), tl.load(keep_ptr + owner).to(tl.int32))
        emits = tl.load(emit_row_ptr + owner) == row.to(tl.int32)
        if (k > last) | bad:
            return
        token = tl.load(drafts_ptr + owner * G + k, mask=emits == 0, other=0)
        token = tl.where(emits, tl.load(emitted_ptr + owner), token)
    else:
        tl.store(log_p_ptr + row, -INF)
        if (k >= end - start - 1) | bad:
            return
        token = tl.load(drafts_ptr + owner * G + k)
    given_temperature = tl.load(temperature_ptr + row)
    greedy = given_temperature < GREEDY
    temperature = tl.where(greedy, 1.0, given_temperature)
    edits = edits_of(
        row, tl.load(position_ptr + row), V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr,
        bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
    )  # fmt: skip
    drawn = tl.load(ids_ptr + row)
    raw, scaled, processed, value = _logprobs(
        logits_ptr, row * logits_stride, V, drawn, token, temperature, greedy, raw_ptr, scaled_ptr, processed_ptr, row,
        edits, EDITS,
    )  # fmt: skip
    if SETTLE:
        tl.store(ids_ptr + row, token)
        tl.store(raw_ptr + row, raw.to(tl.float32))
        tl.store(scaled_ptr + row, scaled.to(tl.float32))
        tl.store(processed_ptr + row, processed.to(tl.float32))
    else:
        kept = value > -INF
        if TRUNCATED:
            if truncates(row, greedy, top_k_ptr, top_p_ptr, min_p_ptr):
                cut = tl.load(record_ptr + row * RECORD_WIDTH + CUT)
                last_tied = tl.load(record_ptr + row * RECORD_WIDTH + LAST_TIED).to(tl.int32)
                kept = kept & is_kept(value, token, cut, last_tied)
        # A greedy row keeps what equals its argmax.
        log_p = tl.where(greedy, tl.where(drawn == token, 0.0, -INF), processed.to(tl.float32))
        tl.store(log_p_ptr + row, tl.where(kept, log_p, -INF))


@triton.jit
def _judge_kernel(
    starts_ptr, slots_ptr, anchors_ptr, keep_ptr, log_p_ptr, log_q_ptr, bad_ptr, seed_ptr, sample_id_ptr,
    temperature_ptr, chance_ptr, accepted_ptr, emit_row_ptr, refused_ptr, temperature_out, seed_out, position_out,
    active_out,
    G: tl.constexpr, WIDE: tl.constexpr, HAS_Q: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(starts_ptr + row)
    size = tl.load(starts_ptr + row + 1) - start
    tl.store(accepted_ptr + row, 0)
    tl.store(emit_row_ptr + row, -1)
    tl.store(refused_ptr + row, -1)
    tl.store(active_out + row, (size < 0).to(tl.uint8))
    if size > 0:
        slot = tl.load(slots_ptr + start).to(tl.int64)
        seed = tl.load(seed_ptr + slot).to(tl.uint64, bitcast=True)
        sample_id = tl.load(sample_id_ptr + slot).to(tl.uint64, bitcast=True)
        anchor = tl.load(anchors_ptr + row)
        temperature = tl.load(temperature_ptr + start)
        greedy = temperature < GREEDY
        k_W = tl.arange(0, WIDE)
        verified_W = k_W < size - 1
        log_chance_W = tl.load(log_p_ptr + start + k_W, mask=verified_W, other=-INF).to(tl.float64)
        if HAS_Q:
            log_q_W = tl.load(log_q_ptr + row.to(tl.int64) * G + k_W, mask=verified_W, other=0.0).to(tl.float64)
            log_chance_W = tl.where(greedy, log_chance_W, log_chance_W - log_q_W)
        log_chance_W = tl.where(log_chance_W == log_chance_W, tl.minimum(log_chance_W, 0.0), -INF)
        words_W = round_word(seed, anchor, k_W.to(tl.uint64) + _ACCEPT, sample_id).to(tl.uint32)
        uniform_W = (words_W.to(tl.float64) + 0.5) * WORD_SCALE
        passes_W = verified_W & (tl.log(uniform_W) < log_chance_W)
        whole = tl.min(tl.where(passes_W, WIDE, k_W), 0)
        whole = tl.minimum(whole, size - 1)
        tl.store(chance_ptr + start + k_W, tl.exp(log_chance_W).to(tl.float32), mask=verified_W)
        tl.store(accepted_ptr + row, whole)
        if whole <= tl.load(keep_ptr + row).to(tl.int32):
            word = round_word(seed, anchor, whole.to(tl.uint64) + _EMIT, sample_id)
            tl.store(emit_row_ptr + row, start + whole)
            tl.store(refused_ptr + row, tl.where(whole < size - 1, whole, -1))
            tl.store(temperature_out + row, tl.where(greedy, 0.0, 1.0).to(tl.float64))
            tl.store(seed_out + row, word.to(tl.int64, bitcast=True))
            tl.store(position_out + row, anchor + 1 + whole)
            tl.store(active_out + row, (tl.load(bad_ptr + start + whole) == 0).to(tl.uint8))


@triton.jit(do_not_specialize=["rows"])
def _residual_kernel(
    logits_ptr, logits_stride, q_ptr, q_row_stride, q_slot_stride, V, rows, drafts_ptr, emit_row_ptr, refused_ptr,
    active_ptr, record_ptr, cuts_ptr, log_q_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, position_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr,
    min_until_ptr, ahead_ptr, ahead_width, ids_ptr, processed_ptr, out_ptr, out_stride,
    G: tl.constexpr, EDITS: tl.constexpr, TRUNCATED: tl.constexpr, HAS_Q: tl.constexpr, Q_CUT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    if tl.load(active_ptr + row) == 0:
        return
    verify = tl.load(emit_row_ptr + row).to(tl.int64)
    refused = tl.load(refused_ptr + row)
    given_temperature = tl.load(temperature_ptr + verify)
    greedy = given_temperature < GREEDY
    temperature = tl.where(greedy, 1.0, given_temperature)
    inverse = 1.0 / temperature
    edits = edits_of(
        verify, tl.load(position_ptr + verify), V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr,
        counts_ptr, bias_row_ptr, mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS,
    )  # fmt: skip
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = verify * logits_stride
    values = row_values(logits_ptr, at, V, ids, edits, EDITS)
    out = values
    if not greedy:
        drawn = tl.load(ids_ptr + verify)
        own = row_values(logits_ptr, at, V, drawn, edits, EDITS)
        offset = tl.load(processed_ptr + verify).to(tl.float64)
        log_p = ((values - own).to(tl.float64) * inverse + offset).to(tl.float32)
        if TRUNCATED:
            if truncates(verify, greedy, top_k_ptr, top_p_ptr, min_p_ptr):
                cut = tl.load(record_ptr + verify * RECORD_WIDTH + CUT)
                last_tied = tl.load(record_ptr + verify * RECORD_WIDTH + LAST_TIED).to(tl.int32)
                log_p = tl.where(is_kept(values, ids, cut, last_tied), log_p, -INF)
        out = log_p
        if refused >= 0:
            draft = tl.load(drafts_ptr + row * G + refused)
            p = tl.exp(log_p)
            if HAS_Q:
                q_at = row * q_row_stride + refused * q_slot_stride
                q_values = row_values(q_ptr, q_at, V, ids, edits, EDITS)
                q_own = row_values(q_ptr, q_at, V, draft, edits, EDITS)
                q_offset = tl.load(log_q_ptr + row * G + refused).to(tl.float64)
                log_q = ((q_values - q_own).to(tl.float64) * inverse + q_offset).to(tl.float32)
                if Q_CUT:
                    if truncates(verify, greedy, top_k_ptr, top_p_ptr, min_p_ptr):
                        cut_at = cuts_ptr + (refused.to(tl.int64) * rows + row) * 2
                        q_cut, q_last = tl.load(cut_at), tl.load(cut_at + 1).to(tl.int32)
                        log_q = tl.where(is_kept(q_values, ids, q_cut, q_last), log_q, -INF)
                q = tl.exp(log_q)
            else:
                q = tl.where(ids == draft, 1.0, 0.0)
            out = tl.log(tl.maximum(p - q, 0.0) + SPARE * p)
    tl.store(out_ptr + row * out_stride + ids, out, mask=ids < V)


def judge_rows(
    table: DeviceTable,
    logits_RV: torch.Tensor,
    rows: VerifyRows,
    columns: SampleColumns,
    drawn: SampleOut,
    workspace: SampleWorkspace,
    anchors_B: torch.Tensor,
    drafts_BG: torch.Tensor,
    keep_B: torch.Tensor,
    draft: DraftDraw | None,
    out: JudgeBuffers,
    truncated: bool,
) -> None:
    """Decide about every draft, and leave in `out.residual_BV` what the next token of each row is drawn from, as
    logits of the rows of `out.columns` (at temperature 1, untruncated). `drawn` is the target's own draw."""
    _score(logits_RV, rows, columns, drawn, workspace, drafts_BG, keep_B, out, truncated, settle=False)
    count, drafts = drafts_BG.shape
    has_q = draft is not None
    _judge_kernel[(count,)](
        rows.starts_B1, rows.slots_R, anchors_B, keep_B, out.log_p_R, draft.log_q_BG if draft else out.log_p_R,
        drawn.bad_B, table.seed_S, table.sample_id_S, columns.temperature_S, out.chance_R, out.accepted_B,
        out.emit_row_B, out.refused_B, out.columns.temperature_S, out.columns.seed_S, out.columns.position_S,
        out.columns.active_S, G=drafts, WIDE=power_of_two(drafts + 1), HAS_Q=has_q, num_warps=1,
    )  # fmt: skip
    vocab = logits_RV.shape[1]
    q = draft.logits_BGV if draft else logits_RV
    cuts = draft.cuts_GB2 if draft else None
    edits = edit_arguments(columns.edits, columns.temperature_S)
    _residual_kernel[(triton.cdiv(vocab, TILE), count)](
        logits_RV, logits_RV.stride(0), q, q.stride(0), q.stride(1), vocab, count, drafts_BG, out.emit_row_B,
        out.refused_B, out.columns.active_S, workspace.record_BR, anchors_B if cuts is None else cuts,
        draft.log_q_BG if draft else out.log_p_R, columns.temperature_S, columns.top_k_S, columns.top_p_S,
        columns.min_p_S, columns.position_S, *edits, drawn.ids_B, drawn.processed_B,
        out.residual_BV, out.residual_BV.stride(0),
        G=drafts, EDITS=columns.edits is not None, TRUNCATED=truncated, HAS_Q=has_q, Q_CUT=cuts is not None,
        TILE=TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def settle_rows(
    logits_RV: torch.Tensor,
    rows: VerifyRows,
    columns: SampleColumns,
    drawn: SampleOut,
    workspace: SampleWorkspace,
    drafts_BG: torch.Tensor,
    keep_B: torch.Tensor,
    out: JudgeBuffers,
) -> None:
    """Put the tokens that are taken where the target's own draw was: kept drafts, and `out.emitted` behind
    them, with their log-probabilities under p."""
    _score(logits_RV, rows, columns, drawn, workspace, drafts_BG, keep_B, out, truncated=False, settle=True)


def _score(
    logits_RV: torch.Tensor,
    rows: VerifyRows,
    columns: SampleColumns,
    drawn: SampleOut,
    workspace: SampleWorkspace,
    drafts_BG: torch.Tensor,
    keep_B: torch.Tensor,
    out: JudgeBuffers,
    truncated: bool,
    settle: bool,
) -> None:
    edits = edit_arguments(columns.edits, columns.temperature_S)
    _score_kernel[(logits_RV.shape[0],)](
        logits_RV, logits_RV.stride(0), logits_RV.shape[1], rows.owner_R, rows.starts_B1, drafts_BG,
        workspace.record_BR, columns.temperature_S, columns.top_k_S, columns.top_p_S, columns.min_p_S,
        columns.position_S, *edits, drawn.ids_B, drawn.raw_B, drawn.temperature_B,
        drawn.processed_B, drawn.bad_B, out.log_p_R, out.accepted_B, keep_B, out.emit_row_B, out.emitted.ids_B,
        G=drafts_BG.shape[1], EDITS=columns.edits is not None, TRUNCATED=truncated, SETTLE=settle,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
