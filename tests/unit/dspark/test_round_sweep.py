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

    def _time(self, shape, launches=2):
        self.launched.append((shape, launches))
        return shape, 1e-3

    def launched_once(self):
        return [shape for shape, launches in self.launched if launches == 1]


def sweep(rows, **fields):
    verify = tiers_of_verify_rows(rows, DRAFTS)
    stepper = SimpleNamespace(
        row_tiers=tiers_of_rows(rows),
        verify_tiers=verify,
        draft_tiers=tiers_of_draft_tokens(rows, DRAFTS),
        tier=lambda count: verify[int(np.searchsorted(verify, count))],
        row_tier=lambda count: next(tier for tier in tiers_of_rows(rows) if tier >= count),
        windows=(1, 3, DRAFTS),
    )
    pages = SimpleNamespace(pool=None, draft_pool=None, page_size=16)
    config = DSparkConfig(drafter="some", **fields)
    timed = Timed(stepper, None, None, pages, config, DRAFTS, 7, 4096, EngineCounters())
    timed.launched = []
    return timed


@pytest.mark.parametrize("rows", [1, 6, 48, 256])
def test_every_size_of_batch_is_met_with_few_some_and_all_drafts(rows):
    times = sweep(rows).run(rows, 600.0)
    shapes = [shape for shape, _ in times]
    assert len(shapes) == len(set(shapes)), "nothing is measured twice"
    largest = tiers_of_verify_rows(rows, DRAFTS)[-1]
    for count in tiers_of_rows(rows):
        own = [shape for shape in shapes if shape.rows == count]
        assert any(not shape.drafting for shape in own)
        tiers = {shape.tier for shape in own if shape.drafting}
        assert min(tiers) <= 2 * count + 1 and max(tiers) >= min(largest, (1 + DRAFTS) * count)
        assert len(tiers) >= min(3, len({min(largest, k * count) for k in (2, 4, 8)}))
        evens = {shape.tier // count - 1 for shape in own if shape.even}
        assert evens == {window for window in (1, 3, DRAFTS) if (1 + window) * count <= largest}
    assert [shape.rows for shape in shapes[:4]] == [rows] * 4, "the largest batch first, whose graphs serve others"


def test_what_no_seconds_are_left_for_has_graphs_all_the_same():
    timed, untimed = sweep(48), sweep(48)
    shapes = {(s.rows, s.tier, s.share, s.even) for s, _ in timed.run(48, 600.0) if s.drafting}
    assert untimed.run(48, 0.0) == []
    made = [(s.rows, s.tier, s.share, s.even) for s in untimed.launched_once()]
    assert len(made) == len(set(made)) and set(made) == shapes and len(untimed.launched) == len(made)
