"""Sampling parameters by row, for steps that draw several times for one slot.

Owns the gather of a slot's columns into columns that the sampling kernels read by row. Ignores what rows
are: block slots of a drafter, verify rows of the target.

Shapes: R rows, S slots.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.sample_columns import EditColumns, SampleColumns
from engine.memory.device_table import DeviceTable

_ROWS = 64


def empty_columns(rows: int, device: torch.device, edits: EditColumns | None = None) -> SampleColumns:
    """Buffers for `rows` rows, all inactive; with `edits` (by slot) for their numbers too. Counts of tokens
    seen are left out: rows with penalties are nobody's here."""

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


@triton.jit
def _columns_kernel(
    slots_ptr, positions_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, definition_ptr,
    bias_row_ptr, mask_row_ptr, min_until_ptr, temperature_out, top_k_out, top_p_out, min_p_out, seed_out,
    position_out, active_out, definition_out, bias_row_out, mask_row_out, min_until_out, rows,
    EDITS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
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
        tl.store(bias_row_out + at_R, tl.load(bias_row_ptr + slot_R, mask=real_R, other=-1), mask=inside_R)
        tl.store(mask_row_out + at_R, tl.load(mask_row_ptr + slot_R, mask=real_R, other=-1), mask=inside_R)
        tl.store(min_until_out + at_R, tl.load(min_until_ptr + slot_R, mask=real_R, other=0), mask=inside_R)


def gather_columns(
    table: DeviceTable, slots_R: torch.Tensor, positions_R: torch.Tensor, out: SampleColumns
) -> SampleColumns:
    """Fill `out` (`empty_columns`) with the parameters of each row's slot, -1 for none, at its position."""
    rows = slots_R.shape[0]
    by_slot, by_row = (table.edits.columns, out.edits) if out.edits and table.edits else (None, None)
    nothing, early = out.position_S, is_early(out.position_S)
    _columns_kernel[(triton.cdiv(rows, _ROWS),)](
        slots_R,
        positions_R,
        table.temperature_S,
        table.top_k_S,
        table.top_p_S,
        table.min_p_S,
        table.seed_S,
        table.definition_S,
        nothing if by_slot is None else by_slot.bias_row_S,
        nothing if by_slot is None else by_slot.mask_row_S,
        nothing if by_slot is None else by_slot.min_until_S,
        out.temperature_S,
        out.top_k_S,
        out.top_p_S,
        out.min_p_S,
        out.seed_S,
        out.position_S,
        out.active_S,
        out.definition_S,
        nothing if by_row is None else by_row.bias_row_S,
        nothing if by_row is None else by_row.mask_row_S,
        nothing if by_row is None else by_row.min_until_S,
        rows,
        EDITS=by_row is not None,
        ROWS=_ROWS,
        EARLY=early,
        num_warps=2,
        **options(early),
    )
    return out
