"""The two ends of a decode step on the device: what to feed, and what became of it.

Owns the gather of the next inputs from the device table and the taking in of drawn tokens. Ignores
the forward pass and the draw between them. `engine.runner.stepper.advance` is the reference of
`advance_rows`.

Shapes: B rows of a step, S slots, P page-table columns, K stop ids, W ring width, V vocabulary.
"""

# A launch takes options that the kernel does not declare.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.sample_columns import SampleOut
from engine.memory.device_table import DeviceTable


def gather_rows_reference(
    table: DeviceTable, slots_B: torch.Tensor, page_tables_BP: torch.Tensor, page_size: int
) -> dict[str, torch.Tensor]:
    """What `gather_rows` writes per row, as new tensors; padding and finished rows are idle."""
    slots = slots_B.clamp(min=0).long()
    active = (slots_B >= 0) & (table.finished_S[slots] == 0)
    computed = table.computed_S[slots]
    pages = page_tables_BP.gather(1, (computed // page_size).clamp(max=page_tables_BP.shape[1] - 1)[:, None])[:, 0]
    return {
        "ids": torch.where(active, table.last_token_S[slots], -1),
        "positions": torch.where(active, computed, 0),
        "seq_lens": torch.where(active, computed + 1, 0).to(torch.int32),
        "write_slots": torch.where(active, pages.long() * page_size + computed % page_size, -1),
        "active": active,
    }


@triton.jit
def _gather_kernel(
    slots_ptr,
    finished_ptr,
    last_token_ptr,
    computed_ptr,
    page_tables_ptr,
    table_stride,
    ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    write_slots_ptr,
    position_ptr,
    active_ptr,
    window_tables_ptr,
    window_slots_ptr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    real = slot >= 0
    slot = tl.maximum(slot, 0)
    running = real & (tl.load(finished_ptr + slot) == 0)
    computed = tl.load(computed_ptr + slot)
    token = tl.load(last_token_ptr + slot)
    column = row.to(tl.int64) * table_stride + computed // PAGE
    page = tl.load(page_tables_ptr + column, mask=running, other=0)
    tl.store(ids_ptr + row, tl.where(running, token, -1))
    tl.store(positions_ptr + row, tl.where(running, computed, 0))
    tl.store(seq_lens_ptr + row, tl.where(running, computed + 1, 0).to(tl.int32))
    tl.store(write_slots_ptr + row, tl.where(running, page.to(tl.int64) * PAGE + computed % PAGE, -1))
    if WINDOWED:
        page = tl.load(window_tables_ptr + column, mask=running, other=0)
        tl.store(window_slots_ptr + row, tl.where(running, page.to(tl.int64) * PAGE + computed % PAGE, -1))
    if real:
        tl.store(position_ptr + slot, computed + 1)
        tl.store(active_ptr + slot, running.to(tl.uint8))


def gather_rows(
    table: DeviceTable,
    slots_B: torch.Tensor,
    page_tables_BP: torch.Tensor,
    page_size: int,
    ids_B: torch.Tensor,
    positions_B: torch.Tensor,
    seq_lens_B: torch.Tensor,
    write_slots_B: torch.Tensor,
    window: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Fill a step's inputs from the table; -1 in `slots_B` is padding. Also notes per slot where
    the token to draw will stand and whether the row takes part. `window` is a second page table of the same
    columns and the write slots to fill from it."""
    window_tables_BP, window_slots_B = (None, None) if window is None else window
    assert window_tables_BP is None or window_tables_BP.stride() == page_tables_BP.stride()
    _gather_kernel[(slots_B.shape[0],)](
        slots_B,
        table.finished_S,
        table.last_token_S,
        table.computed_S,
        page_tables_BP,
        page_tables_BP.stride(0),
        ids_B,
        positions_B,
        seq_lens_B,
        write_slots_B,
        table.position_S,
        table.active_S,
        window_tables_BP,
        window_slots_B,
        PAGE=page_size,
        WINDOWED=window is not None,
        num_warps=1,
    )


@triton.jit
def _advance_kernel(
    slots_ptr,
    active_ptr,
    drawn_ptr,
    raw_ptr,
    temperature_ptr,
    processed_ptr,
    entropy_ptr,
    bad_ptr,
    definition_ptr,
    finished_ptr,
    last_token_ptr,
    computed_ptr,
    new_ptr,
    max_new_ptr,
    stop_ids_ptr,
    ring_ids_ptr,
    ring_logprobs_ptr,
    values_ptr,
    values_stride,
    count_row_ptr,
    counts_ptr,
    V,
    K: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDITS: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    # Nested, since a kernel evaluates both sides of `and`.
    if slot >= 0:  # noqa: SIM102
        if tl.load(active_ptr + slot) != 0:
            if tl.load(bad_ptr + row) != 0:
                tl.store(finished_ptr + slot, 2)
            else:
                token = tl.load(drawn_ptr + row)
                definition = tl.load(definition_ptr + slot)
                logprob = tl.load(processed_ptr + row)
                logprob = tl.where(definition == 1, tl.load(temperature_ptr + row), logprob)
                logprob = tl.where(definition == 2, tl.load(raw_ptr + row), logprob)
                new = tl.load(new_ptr + slot)
                tl.store(ring_ids_ptr + slot * W + new % W, token.to(tl.int32))
                tl.store(ring_logprobs_ptr + slot * W + new % W, logprob)
                if COLUMNS:
                    at = values_ptr + slot * W + new % W
                    tl.store(at, tl.load(processed_ptr + row))
                    tl.store(at + values_stride, tl.load(temperature_ptr + row))
                    tl.store(at + 2 * values_stride, tl.load(raw_ptr + row))
                    tl.store(at + 3 * values_stride, tl.load(entropy_ptr + row))
                if EDITS:
                    count_row = tl.load(count_row_ptr + slot).to(tl.int64)
                    if count_row >= 0:
                        count_at = counts_ptr + count_row * V + token
                        tl.store(count_at, tl.load(count_at) + 2)
                tl.store(last_token_ptr + slot, token)
                tl.store(computed_ptr + slot, tl.load(computed_ptr + slot) + 1)
                tl.store(new_ptr + slot, new + 1)
                stops_K = tl.load(stop_ids_ptr + slot * K + tl.arange(0, K))
                hit = tl.max((stops_K == token.to(tl.int32)).to(tl.int32), 0)
                ends = (hit > 0) | (new + 1 >= tl.load(max_new_ptr + slot))
                tl.store(finished_ptr + slot, ends.to(tl.int32))


def advance_rows(table: DeviceTable, slots_B: torch.Tensor, drawn: SampleOut, count: bool = False) -> None:
    """Take each active row's drawn token into rings, counters and counts, and decide whether it ends.

    With `drawn.entropy_B` the ring columns of every definition are filled; with `count`, tokens of
    rows with penalties are counted.
    """
    values_CSW = table.columns.values_CSW
    assert not count or table.edits is not None, "the table has no counts"
    edits = table.edits.columns if count and table.edits is not None else None
    assert drawn.entropy_B is None or values_CSW.shape[1], "no row has asked for columns"
    _advance_kernel[(slots_B.shape[0],)](
        slots_B,
        table.active_S,
        drawn.ids_B,
        drawn.raw_B,
        drawn.temperature_B,
        drawn.processed_B,
        drawn.processed_B if drawn.entropy_B is None else drawn.entropy_B,
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
        values_CSW if drawn.entropy_B is not None else drawn.processed_B,
        values_CSW.stride(0),
        table.definition_S if edits is None else edits.count_row_S,
        table.definition_S if edits is None else edits.counts_CV,
        0 if edits is None else edits.counts_CV.shape[1],
        K=DeviceTable.MAX_STOPS,
        W=table.ring,
        COLUMNS=drawn.entropy_B is not None,
        EDITS=edits is not None,
        num_warps=1,
    )
