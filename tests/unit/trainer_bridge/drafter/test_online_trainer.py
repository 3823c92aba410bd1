"""A drafter trained from an engine's own rollouts. Case B5."""

import numpy as np
import pytest
import torch

from engine.build import load_parts
from engine.engine import Engine
from engine.errors import Unsupported
from tests.support import ask, make_config, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random
from trainer_bridge.drafter.config import DraftOptimConfig, DriftConfig, OnlineConfig
from trainer_bridge.drafter.features import FeatureScorer
from trainer_bridge.drafter.online_trainer import OnlineTrainer
from trainer_bridge.drafter.recorder import RolloutRecorder

OPTIM = DraftOptimConfig(steps=1000, warmup=0.0, learning_rate=5e-3, anchors=8)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("drafters") / "d0", intermediate_size=64, num_hidden_layers=1)


def engine_of(folder, drafter, **fields):
    settings = dspark(drafter, keep_states=True, **fields.pop("dspark", {}))
    parts = load_parts(folder, make_config(dspark=settings, **fields))
    return Engine(parts), parts


def play(engine, turn=0, n=2, **sampling):
    """Groups that share a prefix with each other, so that some states come from the cache."""
    asked = [ask(f"{turn}-{i}", [*prompt(9), 40 + i], n=n, **({"max_new": 14} | sampling)) for i in range(3)]
    return engine.generate(asked)


@pytest.mark.parametrize("fields", [dict(), dict(loop="overlapped", dspark=dict(mode="compact", probe_every=4))])
def test_recorded_states_are_those_of_scoring(t_full, drafter, fields):
    """Through prompts, prefix hits, forks, rounds, plain steps and retraction."""
    engine, parts = engine_of(t_full, drafter, kv_tokens=160, prefill_tokens=8, **fields)
    recorder = RolloutRecorder(parts.model)
    engine.drafting.watch(recorder)
    play(engine, n=4, temperature=1.0, seed=3)
    assert engine.counters.hit_tokens > 0
    recorded, _ = recorder.take()
    assert len(recorded) == 12 and recorder.take() == ([], [])
    scorer = FeatureScorer(parts, parts.drafter_model.spec.target_layers)
    scored = scorer.score([one.item.example for one in recorded])
    rounds = 0
    for one, expected in zip(recorded, scored, strict=True):
        torch.testing.assert_close(one.item.features_TMD[:-1], expected.features_TMD[:-1], atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(one.item.last_TD[:-1], expected.last_TD[:-1], atol=2e-4, rtol=1e-4)
        assert one.item.example.mask.sum() == 14 and len(one.anchors) == len(one.accepted)
        assert all(9 <= anchor < one.item.example.num_tokens - 1 for anchor in one.anchors)
        rounds += len(one.anchors)
    assert rounds == engine.draft_counters()["draft_steps"]
    engine.check()


class Overheard(RolloutRecorder):
    """Remembers what it was handed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.handed = []

    def on_sample(self, sample, states_TMD):
        self.handed.append((len(sample.tokens()), states_TMD.clone()))
        super().on_sample(sample, states_TMD)


def test_an_example_is_what_was_handed_over_and_a_row_of_zeros(t_full, drafter):
    """Bit for bit, in memory of its own, of a size with the tokens; the target's head reads its last states."""
    engine, parts = engine_of(t_full, drafter)
    recorder = Overheard(parts.model)
    engine.drafting.watch(recorder)
    # Answers of one token each begin and end with the prompt.
    play(engine, max_new=1)
    play(engine, 1)
    recorded, _ = recorder.take()
    assert len(recorded) == len(recorder.handed) == 12
    held = set()
    for one, (tokens, states_TMD) in zip(recorded, recorder.handed, strict=True):
        item, hidden = one.item, parts.model.spec.hidden
        assert item.example.num_tokens == tokens == len(states_TMD) + 1 and states_TMD.shape[1:] == (2, hidden)
        assert item.features_TMD.shape == (tokens, 1, hidden) and item.last_TD.shape == (tokens, hidden)
        assert item.features_TMD.dtype == item.last_TD.dtype == parts.model.dtype
        assert torch.equal(item.features_TMD[:-1], states_TMD[:, :-1]) and not item.features_TMD[-1].any()
        with torch.no_grad():
            assert torch.equal(item.last_TD[:-1], parts.model.model.norm(states_TMD[:, -1].contiguous()))
        assert not item.last_TD[-1].any()
        assert not item.features_TMD.is_inference() and not item.last_TD.is_inference()
        held |= {item.features_TMD.data_ptr(), item.last_TD.data_ptr()}
    assert len(held) == 24


def test_case_b5_it_learns_and_the_target_is_untouched(t_full, drafter, tmp_path):
    engine, parts = engine_of(t_full, drafter)
    before = engine.digest(), engine.digest("drafter")
    config = OnlineConfig(steps=12, batch=3, every=1, optim=OPTIM)
    online = OnlineTrainer(engine, parts, config)
    reference = [[s.ids.tolist() for s in g.samples] for g in play(make_engine(t_full))]
    lengths = []
    for turn in range(3):
        engine.flush("all")
        last = engine.draft_report()
        groups = play(engine, turn)
        assert [[s.ids.tolist() for s in g.samples] for g in groups] == reference
        lengths.append(engine.draft_report().since(last).figures()["accept_length"])
        metrics = online.after_rollout()
        assert metrics["drafter/version"] == engine.drafter_version == turn + 1
        assert groups[0].samples[0].spans[0].drafter_version == turn and engine.policy.version == 0
    assert engine.digest() == before[0] and engine.digest("drafter") != before[1]
    assert lengths[-1] > lengths[0] + 0.3, lengths
    assert metrics["drafter/replay_examples"] == 18 and np.isfinite(metrics["drafter/loss"])
    online.save(tmp_path)
    again, parts = engine_of(t_full, drafter)
    resumed = OnlineTrainer(again, parts, config)
    assert resumed.restore(tmp_path) and again.digest("drafter") == engine.digest("drafter")
    assert resumed.trainer.train_step == 36 and not resumed.restore(tmp_path / "nothing")


def test_drift_is_answered_by_refit_training_and_stopping(t_full, drafter):
    """Confidences that promise everything: refit where there is enough to fit, else train, then stop."""
    engine, parts = engine_of(t_full, drafter)
    with torch.no_grad():
        parts.drafter_model.confidence_head.bias.add_(20.0)
    drift = DriftConfig(slack=0.1, threshold=5.0, attempts=1, worth=4.0)
    still = DraftOptimConfig(steps=1000, warmup=0.0, learning_rate=0.0, anchors=4)
    config = OnlineConfig(steps=1, batch=2, every=0, retry_after=2, drift=drift, optim=still)
    online = OnlineTrainer(engine, parts, config)
    told = []
    for turn in range(6):
        steps = engine.draft_counters()["draft_steps"]
        play(engine, turn, temperature=1.0, seed=turn)
        metrics = online.after_rollout()
        drafted = engine.draft_counters()["draft_steps"] > steps
        told.append((metrics["drafter/version"], metrics["drafter/stopped"], drafted))
    # Too little to refit: trained instead; trained; stopped; tried again two rollouts later.
    assert told == [(1, 0, True), (2, 0, True), (2, 1, True), (2, 1, False), (3, 0, False), (4, 0, True)]


def test_watching_needs_states(t_full, drafter):
    engine = make_engine(t_full, dspark=dspark(drafter))
    with pytest.raises(Unsupported, match="keep_states"):
        engine.drafting.watch(RolloutRecorder(engine._parts.model))
    with pytest.raises(Unsupported, match="keep_states"):
        make_engine(t_full, dspark=dspark("ngram", keep_states=True))
