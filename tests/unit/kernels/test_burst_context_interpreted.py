"""A drafter's context of bursts of captured steps, interpreted, against commits of each step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.keep_features import TOGETHER, KeptTokens, keep_features, keep_features_reference
from engine.memory.device_table import RowState
from engine.runner.step_plan import StepPlan
from engine.runner.stepper import StepModes
from engine.sampling.params import RowSampling
from engine.types import SamplingParams, Want
from tests.support import make_engine
from tests.unit.dspark.served import dspark, save_random
from tests.unit.kernels.test_fused_ops_interpreted import noise

PAGE, BURST, UNTOUCHED = 4, 3, 7.0


@pytest.mark.parametrize(("layers", "width", "rows"), [(1, 24, 1), (TOGETHER + 2, 1100, 3)])
@pytest.mark.parametrize("places", [1, 4])
def test_tokens_lie_where_nobody_elses_do(layers, width, rows, places):
    """Of as many steps as there are places. Idle rows, at position 0, leave alone what they put aside before."""
    actual, expected = (KeptTokens.empty(4 * 5, layers, width, torch.float32, "cpu") for _ in range(2))
    start_B = torch.tensor([6, 3, 1])[:rows]
    for kept in (actual, expected):
        kept.places_1.fill_(places)
    for step in range(places):
        idle_B = torch.tensor([step > 1, False, True])[:rows]
        features = [noise(rows, width, seed=10 * step + layer) for layer in range(layers)]
        slots_B = torch.where(idle_B, -1, 100 * start_B + step).int()
        ids_B, positions_B = torch.where(idle_B, -1, 7 + step), torch.where(idle_B, 0, start_B + step)
        for kept, keep in ((actual, keep_features), (expected, keep_features_reference)):
            keep(kept, features, ids_B, positions_B, slots_B)
    for name in ("features_TMD", "ids_T", "positions_T", "slots_T"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    live = min(2, places) + (places if rows > 1 else 0)
    assert int((actual.slots_T >= 0).sum()) == live and not (actual.slots_T[places * rows :] >= 0).any()


def row(slot: int, context: int, most: int) -> RowState:
    sampling = RowSampling(SamplingParams(), Want(), slot, np.array([1]))
    return RowState(
        slot=slot,
        last_token=3 + slot,
        computed=context - 1,
        new=0,
        max_new=most,
        seed=slot,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        definition=0,
        stop_ids=(),
        row=sampling,
    )


def committed(engine, steps: list[int], kernels: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What lies under the drafter's pages, scratch excepted, after bursts of so many steps, and after another one of
    other rows in the same tier, which have some of those pages now: all was wiped out in between."""
    loop, parts = engine._loop, engine._parts
    pool, table = parts.pages.draft_pool, loop._table
    if kernels:
        parts.speculation.drafter.use_kernels()
    parts.pages.pool.fill(0.0)
    left = []
    first = [row(0, 6, 2), row(1, 9, 99), row(2, 4, 4), row(3, 5, 99)]
    second = [row(3, 3, 99), row(1, 8, 1), row(0, 2, 3)]
    for rows, pages in (
        (first, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]),
        (second, [[5, 1, 9, 13], [14, 17, 18, 19], [20, 21, 22, 23]]),
    ):
        pool.fill(UNTOUCHED)
        table.admit(rows)
        for count in steps:
            plan = StepPlan([each.slot for each in rows], count, StepModes(), np.array(pages, dtype=np.int32), [])
            loop._stepper.launch(plan)
        table.finished_S[[each.slot for each in rows]] = 1
        table.release([each.slot for each in rows])
        left.append([part[1:].clone() for part in pool.pages()])
    return left[0], left[1]


@pytest.mark.parametrize("kernels", [False, True])
def test_bursts_leave_the_context_that_their_steps_would(t_full, tmp_path, kernels):
    """Whole bursts, one that is too long, a step alone; rows end in the middle. Kept states are the same bits."""
    drafter = save_random(tmp_path / "d0")

    def made():
        return make_engine(
            t_full,
            page_size=PAGE,
            burst=BURST,
            attention="triton",
            loop="overlapped",
            max_running=4,
            dspark=dspark(drafter, keep_states=True),
        )

    each = made()
    context = each._loop._stepper._context
    context.keep, context.commit = each._parts.speculation.absorb, lambda tier: None
    expected = committed(each, [1] * 6, kernels)
    for steps in ([1] * 6, [5, 1], [3, 3]):
        engine = made()
        for wanted, left in zip(expected, committed(engine, steps, kernels), strict=True):
            for one, other in zip(wanted, left, strict=True):
                assert torch.equal(one == UNTOUCHED, other == UNTOUCHED)
                torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
            assert torch.equal(wanted[-1], left[-1])
        assert not (engine._loop._stepper._context._kept.slots_T >= 0).any()
    written = [int((part[-1] != UNTOUCHED).any(-1).sum()) for part in expected]
    assert written == [2 + 6 + 4 + 6, 6 + 1 + 3]
