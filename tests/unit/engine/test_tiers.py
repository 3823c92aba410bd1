"""Batch tiers of captured graphs."""

import bisect
import statistics

import pytest

pytest.importorskip("triton")

from engine.runner.graph_stepper import tiers_up_to


@pytest.mark.parametrize("most", [1, 7, 64, 512])
def test_every_batch_has_a_tier(most):
    tiers = tiers_up_to(most)
    assert tiers == sorted(set(tiers)) and tiers[0] == 1 and tiers[-1] == most


def test_padding_stays_below_eight_percent_at_the_median():
    tiers = tiers_up_to(512)
    padding = [tiers[bisect.bisect_left(tiers, rows)] / rows - 1 for rows in range(17, 513)]
    assert statistics.median(padding) < 0.08
