"""What the start measures."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.dspark.config import DSparkConfig
from engine.metrics import EngineCounters
from engine.runner.round_plan import tiers_of_draft_tokens, tiers_of_rows, tiers_of_verify_rows
from engine.runner.round_sweep import RoundSweep

DRAFTS = 7


class Timed(RoundSweep):
    """Notes shapes in the place of running them."""

    def _time(self, shape):
        return shape, 1e-3


def sweep(rows, **fields):
    verify = tiers_of_verify_rows(rows, DRAFTS)
    stepper = SimpleNamespace(
        row_tiers=tiers_of_rows(rows),
        verify_tiers=verify,
        draft_tiers=tiers_of_draft_tokens(rows, DRAFTS),
        tier=lambda count: verify[int(np.searchsorted(verify, count))],
    )
    pages = SimpleNamespace(pool=None, draft_pool=None, page_size=16)
    config = DSparkConfig(drafter="some", **fields)
    return Timed(stepper, None, None, pages, config, DRAFTS, 7, 4096, EngineCounters())


@pytest.mark.parametrize("rows", [1, 6, 48, 256])
def test_every_size_of_batch_is_met_with_few_some_and_all_drafts(rows):
    times = sweep(rows, sweep_seconds=600.0).run(rows)
    shapes = [shape for shape, _ in times]
    assert len(shapes) == len(set(shapes)), "nothing is measured twice"
    largest = tiers_of_verify_rows(rows, DRAFTS)[-1]
    for count in tiers_of_rows(rows):
        own = [shape for shape in shapes if shape.rows == count]
        assert any(not shape.drafting for shape in own)
        tiers = {shape.tier for shape in own if shape.drafting}
        assert min(tiers) <= 2 * count + 1 and max(tiers) >= min(largest, (1 + DRAFTS) * count)
        assert len(tiers) >= min(3, len({min(largest, k * count) for k in (2, 4, 8)}))
    assert [shape.rows for shape in shapes[:4]] == [rows] * 4, "the largest batch first, whose graphs serve others"


def test_a_sweep_ends_when_its_seconds_do():
    assert len(sweep(48, sweep_seconds=1e-9).run(48)) <= 1
