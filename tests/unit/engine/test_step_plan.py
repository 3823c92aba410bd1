"""Step plans as bytes. That a decoded plan is all a stepper needs: the interpreted device loop's tests."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.batch import SharedPrefix
from engine.errors import InvalidRequest
from engine.runner.step_plan import StepPlan
from engine.runner.stepper import StepModes


def plan(rows: int = 3, columns: int = 4) -> StepPlan:
    pages = np.arange(rows * 10, dtype=np.int32).reshape(rows, 10)[:, :columns]
    windows = np.where(pages % 10 > 1, pages, 0)
    prefixes = [SharedPrefix(0, 2, 3)]
    return StepPlan([7, 0, 5][:rows], 8, StepModes(columns=True), pages, prefixes, window_tables_BP=windows)


def test_a_plan_comes_back_as_it_was() -> None:
    sent = plan()
    data = sent.encode()
    back = StepPlan.decode(data)
    assert (back.slots, back.steps, back.modes, back.prefixes) == (sent.slots, 8, sent.modes, sent.prefixes)
    assert back.page_tables_BP.dtype == np.int32 and np.array_equal(back.page_tables_BP, sent.page_tables_BP)
    assert np.array_equal(back.window_tables_BP, sent.window_tables_BP)
    assert StepPlan.decode(dataclasses.replace(sent, window_tables_BP=None).encode()).window_tables_BP is None
    assert len(data) < 2 * sent.page_tables_BP.nbytes + 150


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1",
        plan().encode()[:-3],
        StepPlan([], 8, StepModes(), np.zeros((0, 4), np.int32), []).encode(),
        StepPlan([1, 2], 8, StepModes(), np.zeros((1, 3), np.int32), []).encode(),
        StepPlan([1], 1, StepModes(), np.zeros((1, 3), np.int32), [], [], np.zeros((1, 2), np.int32)).encode(),
        StepPlan([1], 0, StepModes(), np.zeros((1, 3), np.int32), []).encode(),
        StepPlan([1], 1, StepModes(), np.zeros((1, 3), np.int32), [SharedPrefix(0, 2, 1)]).encode(),
    ],
    ids=["empty", "no message", "cut", "no rows", "half a row", "other window pages", "no steps", "prefix outside"],
)
def test_what_no_plan_encodes_to_is_refused(bad: bytes) -> None:
    with pytest.raises(InvalidRequest, match="step plan"):
        StepPlan.decode(bad)
