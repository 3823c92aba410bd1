"""Counters of speculation, and bounds of what whole windows would have yielded."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from engine.dspark.block_estimate import BlockEstimate
from engine.dspark.config import DSparkConfig
from engine.dspark.cost_model import CostModel
from engine.dspark.outcomes import Outcomes
from engine.dspark.record import Record
from engine.dspark.scaling import SurvivalScaling
from engine.dspark.stats import DraftStats


def test_case_l3_counters_follow_one_definition():
    stats = DraftStats(4)
    live = []
    for accepted in (4, 2, 0, 1):
        stats.observe([4], [4], [accepted], [accepted + 1])
        live.append(stats.accept_length)
    assert (stats.proposed, stats.accepted, stats.steps, stats.emitted) == (16, 7, 4, 11)
    assert stats.accept_length == 2.75 and live == [5.0, 4.0, 9 / 3, 2.75]
    assert stats.accepted_at.tolist() == [3, 2, 1, 1]
    assert stats.verify_rows == 20
    assert stats.windows.tolist() == [0, 0, 0, 0, 4] and stats.lengths.tolist() == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("block", [4, 7])
@pytest.mark.parametrize("max_new", range(1, 10))
def test_case_d3_tokens_that_a_cap_drops_count_nowhere(block, max_new):
    stats, left = DraftStats(block), max_new
    while left:
        emitted = min(block + 1, left)
        stats.observe([block], [block], [block], [emitted])
        left -= emitted
    assert stats.emitted == max_new
    assert stats.accepted <= min(stats.emitted, stats.proposed)
    assert stats.accepted_at.sum() == stats.accepted


def test_sums_of_requests_are_the_sum():
    parts = [DraftStats(3) for _ in range(3)]
    whole = DraftStats(3)
    rng = np.random.default_rng(0)
    for part in parts:
        verified = rng.integers(0, 4, 10)
        accepted = rng.integers(0, verified + 1)
        part.observe([3] * 10, verified, accepted, accepted + 1)
        for row in range(10):
            whole.observe([3], verified[[row]], accepted[[row]], accepted[[row]] + 1)
    total = DraftStats(3)
    for part in parts:
        total.add(part)
    assert all(
        np.array_equal(getattr(total, name), getattr(whole, name))
        for name in ("steps", "proposed", "accepted", "emitted", "accepted_at", "windows", "lengths")
    )
    assert math.isnan(DraftStats(3).accept_length)


def estimate_of(drafts, log_q, verified, accepted, tokens, logprobs, later, stopped=None):
    estimate = BlockEstimate()
    estimate.step("r", drafts, log_q, verified, accepted, tokens, logprobs)
    for token, logprob in later:
        estimate.plain("r", [token], [logprob])
    if stopped is not None:
        estimate.end("r", stopped)
    return estimate.sums


def test_whole_windows_and_rejections_are_exact():
    for verified, accepted in ((3, 3), (3, 1), (2, 0)):
        sums = estimate_of(
            [5, 6, 7], [-1.0] * 3, verified, accepted, list(range(accepted + 1)), [-1.0] * (accepted + 1), []
        )
        assert (sums.exact, sums.lower, sums.upper) == (1, accepted + 1, accepted + 1)


def test_trimmed_drafts_that_are_met_again_close_the_interval():
    log = math.log
    # One of four drafts verified and kept; the bonus and the next two tokens are the very drafts.
    sums = estimate_of([5, 6, 7, 8], [log(0.5)] * 4, 1, 1, [5, 6], [log(0.9), log(0.4)], [(7, log(0.7)), (8, log(0.1))])
    chances = [0.8, 1.0, 0.2]
    expected = 2 + sum(np.cumprod(chances))
    assert sums.lower == pytest.approx(expected) and sums.upper == pytest.approx(expected)
    assert sums.steps == 1 and sums.emitted == 2


def test_a_token_that_differs_leaves_an_interval():
    log = math.log
    sums = estimate_of([5, 6, 7, 8], [log(0.5)] * 4, 1, 1, [5, 6], [log(0.9), log(0.4)], [(9, log(0.7))])
    assert sums.lower == pytest.approx(2.8) and sums.upper == pytest.approx(2.8 + 0.8 * 2)


@pytest.mark.parametrize(("stopped", "upper"), [(True, 2.8), (False, 2.8 + 0.8 * 2)])
def test_a_request_that_ends_early(stopped, upper):
    log = math.log
    sums = estimate_of([5, 6, 7, 8], [log(0.5)] * 4, 1, 1, [5, 6], [log(0.9), log(0.4)], [], stopped)
    assert sums.lower == pytest.approx(2.8) and sums.upper == pytest.approx(upper)


def test_bounds_hold_on_average_over_all_that_can_happen():
    """Enumerated: two drafts, one verified; the mean of whole windows lies within the mean bounds."""
    p, q = np.array([0.6, 0.4]), np.array([0.3, 0.7])
    whole = lower = upper = 0.0
    for x1, x2 in itertools.product(range(2), repeat=2):
        a1, a2 = min(1.0, p[x1] / q[x1]), min(1.0, p[x2] / q[x2])
        weight = q[x1] * q[x2]
        whole += weight * (1 + a1 + a1 * a2)
        rejected = estimate_of([x1, x2], np.log(q[[x1, x2]]), 1, 0, [1 - x1], [0.0], [])
        lower += weight * (1 - a1) * rejected.lower
        upper += weight * (1 - a1) * rejected.upper
        for bonus in range(2):
            sums = estimate_of([x1, x2], np.log(q[[x1, x2]]), 1, 1, [x1, bonus], np.log(p[[x1, bonus]]), [])
            lower += weight * a1 * p[bonus] * sums.lower
            upper += weight * a1 * p[bonus] * sums.upper
    assert lower <= whole <= upper and upper - lower < 0.7


def test_what_a_probe_taught_is_known_to_the_next_plan():
    """Outcomes of many requests are summed up some steps at a time, but for those that decide what comes next."""
    traits = SimpleNamespace(max_drafts=4, has_confidence=True)
    record = Record(DSparkConfig(mode="compact"), traits, CostModel([1], [1]), SurvivalScaling(4))
    added = []
    record._add = lambda outcomes, steps: added.append(outcomes)
    record._wait(watched(64, 1, 100, price=0.5), urgent=False)
    assert not added
    record._wait(watched(64, 1, 100, price=0.5), urgent=True)
    assert [len(outcomes.sample_N) for outcomes in added] == [128]
    record._wait(watched(8, 1, 100, price=0.5), urgent=False)
    assert len(added) == 2, "few rows are summed up at once"


class Named(SimpleNamespace):
    __hash__ = object.__hash__


def watched(rows, accepted, length, price, promised=0.9, drafts=4):
    """What became of `rows` requests of one kind that were promised as much of each draft."""
    request = SimpleNamespace(domain="math", sampling=SimpleNamespace(temperature=0.0), n=1)
    group = Named(request=request, lease=None, arrival=0)
    samples = [SimpleNamespace(group=group, order=row) for row in range(rows)]
    survival_NG = np.tile(promised ** np.arange(1.0, drafts + 1), (rows, 1))
    chances_NG = np.where(np.arange(drafts) <= accepted, np.arange(drafts) < accepted, np.nan).astype(float)
    whole = np.full(rows, drafts)
    return Outcomes(
        made_N=whole,
        verified_N=whole,
        keep_N=whole,
        accepted_N=np.full(rows, accepted),
        emitted_N=np.full(rows, 1 + accepted),
        anchors_N=np.full(rows, length),
        price_N=np.full(rows, price),
        survival_NG=survival_NG,
        chances_NG=np.tile(chances_NG, (rows, 1)),
        confidence_NG=None,
        sample_N=np.arange(rows),
        samples=samples,
        step=0,
        steps=1,
    )


def test_promises_that_are_known_to_be_too_high_sound_no_alarm_and_sudden_losses_do():
    traits = SimpleNamespace(max_drafts=4, has_confidence=False)
    record = Record(DSparkConfig(mode="compact"), traits, CostModel([1], [1]), SurvivalScaling(4))
    for _ in range(40):
        # Three of four were promised, and one is kept: less than the price, but what planners reckon with.
        record._add(watched(32, 1, 100, price=0.5), 1)
    assert not record.switch.barred(0) and record.switch.allows(0, 32)
    while not record.switch.barred(0):
        record._add(watched(4, 0, 1000, price=0.5), 1)
    assert record.switch.barred(0) == {10}, "that length alone"
    assert record.switch.allows(0, 32)
