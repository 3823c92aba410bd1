"""Sampling parameters by row, for steps that draw several times for one slot.

Owns the gather of a slot's columns into columns that the sampling kernels read by row, and of the drafts ahead of
a row, which penalties count. Ignores what rows are: block slots of a drafter, verify rows of the target.

Shapes: R rows, S slots, B rows of a round, G drafts.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.sample_columns import EditColumns, SampleColumns
from engine.memory.device_table import DeviceTable

_ROWS = 64


@dataclass(slots=True)
class Prefixes:
    """The drafts that verify rows stand behind: row r behind the first r - starts_B1[owner_R[r]] of
    drafts_BG[owner_R[r]], int64."""

    owner_R: torch.Tensor
    starts_B1: torch.Tensor
    drafts_BG: torch.Tensor


def empty_columns(rows: int, device: torch.device, edits: EditColumns | None = None, drafts: int = 0) -> SampleColumns:
    """Buffers for `rows` rows, all inactive; with `edits` (by slot) for their numbers too, and for up to `drafts`
    tokens ahead of each."""

    def column(dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
        return torch.full((rows,), fill, dtype=dtype, device=device)

    by_row = None
    if edits is not None:
        by_row = EditColumns(
            repetition_S=column(torch.float32, 1),
            frequency_S=column(torch.float32),
            presence_S=column(torch.float32),
            count_row_S=column(torch.int32, -1),
            counts_CV=edits.counts_CV,
            bias_row_S=column(torch.int32, -1),
            mask_row_S=column(torch.int32, -1),
            bias_MV=edits.bias_MV,
            min_until_S=column(torch.int64),
            ahead_SG=torch.full((rows, drafts), -1, dtype=torch.int32, device=device),
        )
    return SampleColumns(
        temperature_S=column(torch.float64, 1),
        top_k_S=column(torch.int32),
        top_p_S=column(torch.float64, 1),
        min_p_S=column(torch.float64),
        seed_S=column(torch.int64),
        position_S=column(torch.int64),
        active_S=column(torch.uint8),
        edits=by_row,
        definition_S=column(torch.int32),
    )


def drawn_at(columns: SampleColumns, positions_R: torch.Tensor, seeds_R: torch.Tensor) -> SampleColumns:
    """The same rows at other positions with other seeds."""
    return dataclasses.replace(columns, position_S=positions_R, seed_S=seeds_R)


@triton.jit(do_not_specialize=["rows"])
def _columns_kernel(
    slots_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, definition_ptr,
    repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, bias_row_ptr, mask_row_ptr, min_until_ptr, owner_ptr,
    starts_ptr, drafts_ptr, temperature_out, top_k_out, top_p_out, min_p_out, seed_out, position_out, active_out,
    definition_out, repetition_out, frequency_out, presence_out, count_row_out, bias_row_out, mask_row_out,
    min_until_out, ahead_out, rows,
    EDITS: tl.constexpr, G: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    at_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = at_R < rows
    slot_R = tl.load(slots_ptr + at_R, mask=inside_R, other=-1).to(tl.int64)
    real_R = slot_R >= 0
    tl.store(active_out + at_R, real_R.to(tl.uint8), mask=inside_R)
    tl.store(position_out + at_R, tl.load(positions_ptr + at_R, mask=inside_R, other=0), mask=inside_R)
    tl.store(temperature_out + at_R, tl.load(temperature_ptr + slot_R, mask=real_R, other=1.0), mask=inside_R)
    tl.store(top_k_out + at_R, tl.load(top_k_ptr + slot_R, mask=real_R, other=0), mask=inside_R)
    tl.store(top_p_out + at_R, tl.load(top_p_ptr + slot_R, mask=real_R, other=1.0), mask=inside_R)
    tl.store(min_p_out + at_R, tl.load(min_p_ptr + slot_R, mask=real_R, other=0.0), mask=inside_R)
    tl.store(seed_out + at_R, tl.load(seed_ptr + slot_R, mask=real_R, other=0), mask=inside_R)
    tl.store(definition_out + at_R, tl.load(definition_ptr + slot_R, mask=real_R, other=0), mask=inside_R)
    if EDITS:
        tl.store(repetition_out + at_R, tl.load(repetition_ptr + slot_R, mask=real_R, other=1.0), mask=inside_R)
        tl.store(frequency_out + at_R, tl.load(frequency_ptr + slot_R, mask=real_R, other=0.0), mask=inside_R)
        tl.store(presence_out + at_R, tl.load(presence_ptr + slot_R, mask=real_R, other=0.0), mask=inside_R)
        tl.store(count_row_out + at_R, tl.load(count_row_ptr + slot_R, mask=real_R, other=-1), mask=inside_R)
        tl.store(bias_row_out + at_R, tl.load(bias_row_ptr + slot_R, mask=real_R, other=-1), mask=inside_R)
        tl.store(mask_row_out + at_R, tl.load(mask_row_ptr + slot_R, mask=real_R, other=-1), mask=inside_R)
        tl.store(min_until_out + at_R, tl.load(min_until_ptr + slot_R, mask=real_R, other=0), mask=inside_R)
        if BEHIND:
            owner_R = tl.load(owner_ptr + at_R, mask=real_R, other=0).to(tl.int64)
            k_R = at_R - tl.load(starts_ptr + owner_R, mask=real_R, other=0)
        for g in tl.static_range(G):
            ahead_R = tl.full((ROWS,), -1, tl.int64)
            if BEHIND:
                ahead_R = tl.load(drafts_ptr + owner_R * G + g, mask=real_R & (g < k_R), other=-1)
            tl.store(ahead_out + at_R * G + g, ahead_R.to(tl.int32), mask=inside_R)


def gather_columns(
    table: DeviceTable,
    slots_R: torch.Tensor,
    positions_R: torch.Tensor,
    out: SampleColumns,
    behind: Prefixes | None = None,
) -> SampleColumns:
    """Fill `out` (`empty_columns`) with the parameters of each row's slot, -1 for none, at its position, and with
    what stands ahead of it where it is `behind` drafts."""
    rows, drafts = slots_R.shape[0], 0
    by_slot, by_row = (table.edits.columns, out.edits) if out.edits and table.edits else (None, None)
    nothing, early = out.position_S, is_early(out.position_S)
    if by_row is not None and by_row.ahead_SG is not None:
        drafts = by_row.ahead_SG.shape[1]
    assert behind is None or not drafts or behind.drafts_BG.shape[1] == drafts, "room for every draft"
    _columns_kernel[(triton.cdiv(rows, _ROWS),)](
        slots_R,
        positions_R,
        table.temperature_S,
        table.top_k_S,
        table.top_p_S,
        table.min_p_S,
        table.seed_S,
        table.definition_S,
        nothing if by_slot is None else by_slot.repetition_S,
        nothing if by_slot is None else by_slot.frequency_S,
        nothing if by_slot is None else by_slot.presence_S,
        nothing if by_slot is None else by_slot.count_row_S,
        nothing if by_slot is None else by_slot.bias_row_S,
        nothing if by_slot is None else by_slot.mask_row_S,
        nothing if by_slot is None else by_slot.min_until_S,
        nothing if behind is None else behind.owner_R,
        nothing if behind is None else behind.starts_B1,
        nothing if behind is None else behind.drafts_BG,
        out.temperature_S,
        out.top_k_S,
        out.top_p_S,
        out.min_p_S,
        out.seed_S,
        out.position_S,
        out.active_S,
        out.definition_S,
        nothing if by_row is None else by_row.repetition_S,
        nothing if by_row is None else by_row.frequency_S,
        nothing if by_row is None else by_row.presence_S,
        nothing if by_row is None else by_row.count_row_S,
        nothing if by_row is None else by_row.bias_row_S,
        nothing if by_row is None else by_row.mask_row_S,
        nothing if by_row is None else by_row.min_until_S,
        nothing if by_row is None else by_row.ahead_SG,
        rows,
        EDITS=by_row is not None,
        G=drafts,
        BEHIND=behind is not None,
        ROWS=_ROWS,
        EARLY=early,
        num_warps=2,
        **options(early),
    )
    return out
