"""Steps of the drafter's trainer: what they learn, skip, resume to and share among ranks."""

import math
import multiprocessing

import numpy as np
import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from engine.dspark.block_model import BlockDrafterModel
from engine.errors import InternalError, InvalidRequest
from tests.unit.trainer_bridge.drafter.ranks import run_ranks
from tests.unit.trainer_bridge.drafter.worlds import make_trainer
from trainer_bridge.drafter.config import DraftLossConfig, DraftOptimConfig
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.objective import DraftSums
from trainer_bridge.drafter.trainer import DrafterTrainer


def weights(trainer):
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def test_acceptance_rises(world):
    trainer = world.trainer(steps=40, learning_rate=3e-3)
    items = world.items()
    metrics = [trainer.step(items) for _ in range(40)]
    assert metrics[-1]["drafter/accepted"] > 1.25 * metrics[0]["drafter/accepted"]
    assert metrics[-1]["drafter/loss"] < metrics[0]["drafter/loss"]
    sums = DraftSums(4)
    trainer.evaluate(items, sums)
    assert sums.accept_length() == pytest.approx(1 + float(sums.mean("survival").sum()))
    assert metrics[-1]["drafter/lr"] < 1e-4 < max(m["drafter/lr"] for m in metrics)


def test_only_the_confidence_head_moves_where_asked(world):
    trainer = DrafterTrainer(world.drafter(), world.ends, DraftLossConfig(), DraftOptimConfig(steps=5), 0, "confidence")
    before, items = weights(trainer), world.items()
    losses = [trainer.step(items)["drafter/confidence_gap"] for _ in range(5)]
    after = weights(trainer)
    assert {name for name in before if not torch.equal(before[name], after[name])} <= {
        "confidence_head.weight",
        "confidence_head.bias",
    }
    assert losses[-1] < losses[0]
    with pytest.raises(InvalidRequest, match="confidence"):
        DrafterTrainer(
            world.drafter(), world.ends, DraftLossConfig(confidence=0.0), DraftOptimConfig(), 0, "confidence"
        )


def test_case_j8_a_resumed_run_equals_an_undisturbed_one_to_the_bit(world, tmp_path):
    items = world.items()
    straight = world.trainer()
    for _ in range(8):
        straight.step(items)
    first = world.trainer()
    for _ in range(4):
        first.step(items)
    torch.save(first.state_dict(), tmp_path / "trainer.pt")
    resumed = make_trainer(world.drafter(seed=9), world.ends)
    resumed.load_state_dict(torch.load(tmp_path / "trainer.pt", weights_only=True))
    for _ in range(4):
        metrics = resumed.step(items)
    assert resumed.train_step == 8 and metrics["drafter/lr"] == straight.scheduler.get_last_lr()[0]
    ours, theirs = weights(resumed), weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_case_j8_in_16_bits_the_masters_are_what_is_resumed(world, tmp_path):
    items = world.items()

    def trainer(seed=0):
        source = world.drafter(seed)
        model = BlockDrafterModel(source.spec, torch.bfloat16)
        model.load_state_dict(source.state_dict())
        model.requires_grad_(False)
        ends = type(world.ends)(lambda ids: world.ends.embed(ids), lambda h: world.ends.head(h.float()))
        return make_trainer(model, ends, learning_rate=1e-4)

    one, other = trainer(), trainer()
    for _ in range(3):
        one.step(items)
        other.step(items)
    third = trainer(5)
    third.load_state_dict(other.state_dict())
    one.step(items)
    third.step(items)
    assert one.model.fc.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(one.weights.masters, third.weights.masters, strict=True))
    assert not torch.equal(one.weights.masters[0], one.weights.params[0].float()), "masters hold more than 16 bits"


def poisoned(items):
    bad = FeatureExample(items[0].example, items[0].features_TMD.clone(), items[0].last_TD.clone())
    bad.last_TD[5] = math.inf
    return [bad, *items[1:]]


def test_case_j4_a_step_that_is_not_finite_is_skipped_and_counted(world):
    trainer, items = world.trainer(max_skipped=3), world.items()
    for step in range(6):
        before = weights(trainer)
        metrics = trainer.step(poisoned(items) if step == 3 else items)
        same = all(torch.equal(before[name], value) for name, value in weights(trainer).items())
        assert same == (step == 3) and metrics["drafter/skipped_steps"] == float(step >= 3)
    assert all(bool(value.isfinite().all()) for value in weights(trainer).values())
    with pytest.raises(InternalError, match="3 steps"):
        for _ in range(3):
            trainer.step(poisoned(items))


def test_case_j4_a_rate_that_is_far_too_high_leaves_finite_weights(world):
    trainer, items = world.trainer(learning_rate=1e4, max_skipped=4), world.items()
    try:
        for _ in range(12):
            trainer.step(items)
    except InternalError:
        pass
    assert all(bool(value.isfinite().all()) for value in weights(trainer).values())


def test_case_j4_an_extreme_confidence_has_a_finite_loss():
    logit = torch.tensor(1e4, dtype=torch.bfloat16)
    value = torch.nn.functional.binary_cross_entropy_with_logits(logit.float(), torch.tensor(0.0))
    assert float(value) == pytest.approx(1e4, rel=1e-2)


def test_case_j5_a_term_without_states_is_refused_before_the_first_step(world):
    items = [FeatureExample(item.example, item.features_TMD, None) for item in world.items()]
    trainer = world.trainer()
    with pytest.raises(InvalidRequest, match="final states"):
        trainer.step(items)
    assert trainer.train_step == 0


def test_case_j9_and_j8_two_ranks_take_the_step_that_one_takes(world, tmp_path):
    """Examples of 1, 1, 4 and 4 anchors, shared as (1, 1) (4, 4), as (1, 4) (1, 4), and as all and none."""
    shares = {"even": [[0, 2], [1, 3]], "uneven": [[0, 1], [2, 3]], "all": [[0, 1, 2, 3], []]}
    # Forked from one process that has imported everything, and whose autograd never ran.
    multiprocessing.set_forkserver_preload([run_ranks.__module__])
    start_processes(run_ranks, args=(str(world.folder), str(tmp_path), shares), nprocs=2, start_method="forkserver")
    run_ranks(0, str(world.folder), str(tmp_path), {"alone": [[0, 1, 2, 3]]})
    alone = torch.load(tmp_path / "alone-0.pt")
    for name in shares:
        ranks = [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)]
        for key, value in alone["weights"].items():
            torch.testing.assert_close(ranks[0]["weights"][key], value, atol=1e-6, rtol=1e-5)
            assert torch.equal(ranks[0]["weights"][key], ranks[1]["weights"][key])
        for key, value in alone["metrics"].items():
            assert ranks[0]["metrics"][key] == pytest.approx(value, rel=1e-4), key
    assert np.isfinite(alone["metrics"]["drafter/loss"])
