"""Both ends of a decode step in Triton's interpreter against their references."""

from __future__ import annotations

import copy
from dataclasses import fields

import numpy as np
import torch

from engine.kernels.decode_step import advance_rows, gather_rows, gather_rows_reference
from engine.kernels.sample_columns import SampleOut
from engine.memory.device_edits import DeviceEdits
from engine.memory.device_table import BAD, DEFINITIONS, RUNNING, STOPPED, DeviceTable, RowState
from engine.runner.stepper import advance
from engine.sampling.columns import SampleResult
from engine.sampling.params import RowSampling
from engine.types import SamplingParams, Want

PAGE, COLUMNS, RING, STEPS = 4, 4, 4, 7
SLOTS = torch.tensor([4, -1, 0, 5, 2, -1, 1, 3])
FULL = PAGE * COLUMNS
# Slot: tokens computed, new tokens, most new tokens, stop ids.
ROWS = {
    0: (0, 0, 99, ()),
    1: (FULL - STEPS, 6, 99, (900, 901)),
    2: (3, 2, 99, tuple(range(800, 800 + DeviceTable.MAX_STOPS))),
    3: (4, 1, 4, (900,)),
    4: (7, 3, 99, (900,)),
    5: (FULL, 5, 5, ()),
}
ROW = RowSampling(SamplingParams(presence_penalty=1.0), Want(entropy=True), 0, np.array([1]))
VOCAB = 1_000
LAST_STOP = 800 + DeviceTable.MAX_STOPS - 1


def make_table(device: torch.device) -> DeviceTable:
    """Slots 0 to 4 run, 5 has finished with its pages full, 6 was never handed out."""
    table = DeviceTable(7, RING, device)
    table.edits = DeviceEdits(7, VOCAB, 100, device)
    table.admit(
        [
            RowState(
                slot, 50 + slot, computed, new, most, slot, 1.0, 0, 1.0, 0.0, slot % len(DEFINITIONS), stop_ids, ROW
            )
            for slot, (computed, new, most, stop_ids) in ROWS.items()
        ]
    )
    table.finished_S[5] = STOPPED
    return table


def drawn_at(step: int, device: torch.device) -> SampleOut:
    """Slot 2 draws its last stop id at step 1, slot 4 is bad at step 2. Padding is nonsense."""
    noise = torch.Generator().manual_seed(step)
    drawn = SampleOut.empty(len(SLOTS), "cpu", entropy=True)
    drawn.ids_B.copy_(torch.randint(0, 500, (len(SLOTS),), generator=noise))
    for column in (drawn.raw_B, drawn.temperature_B, drawn.processed_B, drawn.entropy_B):
        column.copy_(torch.randn(len(SLOTS), generator=noise))
    drawn.bad_B.copy_((SLOTS < 0) | ((SLOTS == 4) & (step == 2)))
    drawn.ids_B[SLOTS < 0] = 900
    if step == 1:
        drawn.ids_B[SLOTS == 2] = LAST_STOP
    return SampleOut(*(getattr(drawn, column.name).to(device) for column in fields(SampleOut)))


def assert_equal_tables(table: DeviceTable, expected: DeviceTable) -> None:
    for name, column in vars(expected).items():
        if isinstance(column, torch.Tensor):
            assert torch.equal(getattr(table, name), column), name
    assert torch.equal(table.columns.values_CSW, expected.columns.values_CSW)
    assert torch.equal(table.edits.columns.counts_CV, expected.edits.columns.counts_CV)


def check_steps(device: torch.device) -> None:
    """Padding, finished, bad and stopping rows; every ring wraps around."""
    table, slots = make_table(device), SLOTS.to(device)
    reference = copy.deepcopy(table)
    page_tables_BP = torch.randperm(len(slots) * COLUMNS, device=device).to(torch.int32).view(len(slots), COLUMNS) + 1
    for step in range(STEPS):
        names = {"ids": torch.int64, "positions": torch.int64, "seq_lens": torch.int32, "write_slots": torch.int64}
        inputs = {name: torch.full((len(slots),), -9, dtype=dtype, device=device) for name, dtype in names.items()}
        window_BP, window_slots = page_tables_BP.flip(1), torch.full((len(slots),), -9, device=device)
        gather_rows(table, slots, page_tables_BP, PAGE, *inputs.values(), (window_BP.contiguous(), window_slots))
        expected = gather_rows_reference(reference, slots, page_tables_BP, PAGE)
        other = gather_rows_reference(reference, slots, window_BP, PAGE)
        assert torch.equal(window_slots, other["write_slots"])
        for name, column in inputs.items():
            assert torch.equal(column, expected[name]), name
        real, active = slots >= 0, expected["active"]
        reference.position_S[slots[real]] = reference.computed_S[slots[real]] + 1
        reference.active_S[slots[real]] = active[real].to(torch.uint8)
        assert_equal_tables(table, reference)

        drawn = drawn_at(step, device)
        advance_rows(table, slots, drawn, count=True)
        by_definition = torch.stack([getattr(drawn, f"{name}_B") for name in DEFINITIONS])
        logprobs_B = by_definition.gather(0, reference.definition_S[slots.clamp(min=0)].long()[None])[0]
        advance(
            reference,
            slots[active],
            SampleResult(
                drawn.ids_B[active],
                logprobs_B[active],
                drawn.bad_B[active] != 0,
                {name: getattr(drawn, f"{name}_B")[active] for name in DEFINITIONS},
                drawn.entropy_B[active],
            ),
        )
        counted = active & (drawn.bad_B == 0)
        counts = reference.edits.columns
        counts.counts_CV[counts.count_row_S[slots[counted]].long(), drawn.ids_B[counted]] += 2
        assert_equal_tables(table, reference)
    assert table.finished_S.tolist() == [RUNNING, RUNNING, STOPPED, STOPPED, BAD, STOPPED, STOPPED]
    assert table.new_S.tolist() == [STEPS, 6 + STEPS, 4, 4, 5, 5, 0]


def test_steps_equal_their_references() -> None:
    check_steps(torch.device("cpu"))
