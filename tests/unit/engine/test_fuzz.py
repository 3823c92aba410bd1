"""Random schedules: whatever happens around a sample, its tokens are those of an undisturbed run, and
no page is lost at any time."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import Conflict
from tests.support import make_engine, update
from tests.unit.engine.schedules import Judge, Schedule, fuzz


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_random_schedules(t_full, t_full_w1, loop):
    tally = fuzz([t_full, t_full_w1], range(10), loop)
    assert tally.samples > 60


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("loop", "count"), [("serial", 500), ("overlapped", 2000)])
def test_many_random_schedules(t_full, t_full_w1, loop, count):
    tally = fuzz([t_full, t_full_w1], range(1000, 1000 + count), loop)
    print(tally)
    assert tally.schedules == count and tally.samples > 10 * count
    assert tally.near_ties < 1e-4 * tally.samples, "ties are rare"


def test_the_judge_notices_other_weights(t_full, t_full_w1):
    schedule = Schedule([t_full, t_full], 1, "serial")
    schedule.run(40)
    assert sum(len(sample.ids) for _, group in schedule.done for sample in group.samples) > 20
    with pytest.raises(AssertionError):
        Judge([t_full_w1, t_full_w1]).check(schedule.done)


def test_the_judge_notices_one_other_token(t_full):
    schedule = Schedule([t_full, t_full], 1, "serial")
    schedule.run(40)
    judge = Judge([t_full, t_full])
    assert judge.check(schedule.done) > 10 and judge.near_ties == 0
    request, sample = next(
        (request, sample)
        for request, group in schedule.done
        for sample in group.samples
        if len(sample.ids) > 3 and not any(span.mixed_kv for span in sample.spans)
    )
    sample.ids = np.append((sample.ids[:1] + 1) % 512, sample.ids[1:]).astype(np.uint32)
    with pytest.raises(AssertionError, match=rf"{request.group_id}\[{sample.index}\], token 0"):
        judge.check(schedule.done)


def test_updates_are_refused_while_one_is_open(t_full):
    engine = make_engine(t_full)
    update(engine, t_full, 1)
    with pytest.raises(Conflict):
        update(engine, t_full, 1)
