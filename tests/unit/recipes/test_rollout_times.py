"""What a rollout's time is made of, and what does not stop it."""

import gc

import pytest

from recipes.grpo.rollouts import Rollout
from recipes.grpo.serving import settled


def test_words_and_verdicts_are_told_apart_from_generation():
    metrics = Rollout(tokens=300, seconds=2.0, generating=1.5).metrics()
    assert metrics["timing_s/gen"] == 1.5 and metrics["timing_s/reward"] == 0.5
    assert metrics["perf/throughput"] == 200.0


def test_what_is_there_is_looked_through_no_more_until_the_run_ends():
    before = gc.get_freeze_count()
    with pytest.raises(RuntimeError), settled():
        assert gc.get_freeze_count() > before
        raise RuntimeError
    assert gc.get_freeze_count() == 0
