"""Drift, the answers to it, and the rounds worth learning from."""

import numpy as np
import pytest
import torch

from engine.errors import InvalidRequest
from tests.unit.trainer_bridge.drafter.worlds import example
from trainer_bridge.drafter.config import DriftConfig
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.online import Cusum, DriftLadder, ReplayBuffer


def test_chance_is_no_drift_and_a_shift_is_found_soon():
    rng = np.random.default_rng(0)
    cusum = Cusum(slack=0.3, threshold=25.0)
    assert not any(cusum.add(2.0, rng.binomial(4, 0.5)) for _ in range(5000))
    rounds = next(n for n in range(1, 1000) if cusum.add(2.0, rng.binomial(4, 0.25)))
    assert 20 < rounds < 100, "one draft a round less is found after about 25 / 0.7 rounds"


def alarm(ladder, version):
    """The first answer that is one."""
    for _ in range(1000):
        response = ladder.observe(version, 4.0, 0.0)
        if response != "none":
            return response
    return "none"


def test_the_ladder_is_climbed_rung_by_rung():
    ladder = DriftLadder(DriftConfig(slack=0.1, threshold=20.0, attempts=2, calm=100))
    assert [alarm(ladder, 1) for _ in range(5)] == ["refit", "refit", "train", "train", "disable"]
    assert ladder.disabled and alarm(ladder, 2) == "none" and ladder.alarms == 5
    ladder.enable()
    assert alarm(ladder, 2) == "refit"


def test_a_drafter_that_is_good_is_trained_and_never_stopped():
    """Promises of three drafts where one and a half are kept are drift without end, and worth drafting."""
    ladder = DriftLadder(DriftConfig(attempts=1, worth=1.0))
    ladder.played([1.0, 2.0] * 100)
    answers = [ladder.observe(1, 3.0, 1.0 + number % 2) for number in range(2000)]
    assert set(answers) == {"none", "refit", "train"} and answers.count("train") > 50
    assert not ladder.disabled
    for _ in range(4):
        ladder.played([0.5] * 200)
    answers = [ladder.observe(1, 3.0, 0.5) for _ in range(200)]
    assert "disable" in answers and ladder.disabled


def test_peace_leads_down_again():
    ladder = DriftLadder(DriftConfig(threshold=20.0, attempts=1, calm=50))
    assert alarm(ladder, 1) == "refit"
    assert all(ladder.observe(1, 1.0, 1.0) == "none" for _ in range(50))
    assert alarm(ladder, 1) == "refit", "not train: 50 quiet rounds went before"
    assert alarm(ladder, 1) == "train"


def test_versions_are_kept_apart():
    ladder = DriftLadder(DriftConfig(slack=0.1, threshold=20.0))
    for _ in range(5):
        assert ladder.observe(1, 4.0, 0.0) == "none"
    assert ladder.observe(2, 4.0, 0.0) == "none", "19.5 of version 1 are forgotten"
    for _ in range(20):
        assert ladder.observe(1, 4.0, 0.0) == "none", "late rounds of an older version do not count"
    assert alarm(ladder, 2) == "refit"


def item(key, version=0, answer=10):
    one = example(key, 4, answer)
    one = type(one)(key, "d", one.ids, one.mask, version)
    return FeatureExample(one, torch.zeros(one.num_tokens, 1, 8), torch.zeros(one.num_tokens, 8))


SIZE = 14 * 16 * 4


def test_anchors_that_were_drafted_badly_are_favoured():
    buffer = ReplayBuffer(10 * SIZE, drafts=4, floor=0.1)
    buffer.add(item("a"), [3, 8], [0, 4])
    (kept,) = buffer.sample(5, np.random.default_rng(0))
    weights = kept.anchor_weights_T
    assert weights[3] == 1.0 and weights[8] == 0.1
    assert weights[5] == pytest.approx(0.55) and weights[:3].sum() == 0.0 and weights[13] == 0.0


def test_badly_drafted_examples_are_drawn_more_often():
    buffer = ReplayBuffer(10 * SIZE, drafts=4)
    buffer.add(item("good"), [3], [4])
    buffer.add(item("bad"), [3], [0])
    rng = np.random.default_rng(0)
    drawn = [buffer.sample(1, rng)[0].example.key for _ in range(200)]
    assert drawn.count("bad") > 170


def test_memory_is_bounded_and_old_policies_go_first():
    buffer = ReplayBuffer(3 * SIZE, drafts=4)
    for key, version, accepted in (("old", 1, 0), ("new-good", 2, 4), ("new-bad", 2, 0), ("newest", 3, 4)):
        buffer.add(item(key, version), [3], [accepted])
    assert {one.example.key for one in buffer.sample(9, np.random.default_rng(0))} == {"new-good", "new-bad", "newest"}
    buffer.add(item("more", 3), [3], [2])
    assert "new-good" not in {one.example.key for one in buffer.sample(9, np.random.default_rng(0))}
    assert buffer.size == 3 * SIZE and buffer.dropped == 2
    buffer.add(item("huge", 3, answer=100), [3], [0])
    assert len(buffer) == 3 and buffer.dropped == 3
    buffer.add(item("more", 4), [3], [0])
    assert len(buffer) == 3 and buffer.size == 3 * SIZE, "a key is replaced, not doubled"


@pytest.mark.parametrize(("anchors", "accepted"), [([1], [0]), ([13], [0]), ([3], [5]), ([3], [0, 1])])
def test_rounds_that_cannot_have_been_are_refused(anchors, accepted):
    buffer = ReplayBuffer(10 * SIZE, drafts=4)
    with pytest.raises(InvalidRequest):
        buffer.add(item("a"), anchors, accepted)
    assert len(buffer) == 0


def test_the_trainer_learns_from_what_the_buffer_draws(world):
    buffer = ReplayBuffer(1 << 20, drafts=4)
    for one in world.items(4):
        first = one.example.mask.argmax() - 1
        buffer.add(one, [int(first)], [0])
    trainer = world.trainer(anchors=3)
    metrics = trainer.step(buffer.sample(2, np.random.default_rng(0)))
    assert metrics["drafter/blocks"] == 6.0
