"""Drafters written and read back."""

import json
from typing import get_args

import pytest
import torch

from engine.dspark.block_spec import FAMILIES, MAX_BLOCK, drafter_spec_from_config
from engine.dspark.scaling import StoredScaling, SurvivalScaling, scaling_file
from engine.errors import InternalError, InvalidRequest
from engine.models.spec import read_spec
from tests.unit.trainer_bridge.drafter.test_objective import NARROW, shaken
from tests.unit.trainer_bridge.drafter.worlds import MASK, SHAPE, make_trainer
from trainer_bridge.drafter.config import DrafterShape, Family
from trainer_bridge.drafter.export import (
    DrafterCard,
    export_drafter,
    load_drafter,
    require_target,
    resume_checkpoint,
    save_checkpoint,
)
from trainer_bridge.drafter.initial import drafter_config, spaced_layers

CARD = DrafterCard("toy", "a toy", "abc", ["6 random sequences"], ["loss: as published"])
SCALING = StoredScaling(
    temperatures=[1.0, 1.1, 1.2, 1.3], dataset="toy", num_samples=9, ece_before=0.05, ece_after=0.01
)


@pytest.mark.parametrize("shape", [SHAPE, NARROW], ids=["whole", "case_j7_reduced"])
def test_an_export_is_read_back_as_it_was(world, tmp_path, shape):
    model = shaken(world.drafter(shape=shape))
    config = drafter_config(shape, world.folder, read_spec(world.folder), MASK)
    folder = export_drafter(tmp_path / "drafter", model, config, CARD, torch.float32, [SCALING])
    again, stored = load_drafter(folder, torch.float32, "cpu")
    assert again.spec == model.spec
    ours, theirs = dict(model.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    scaling = SurvivalScaling(4)
    assert scaling.load(folder / scaling_file("rejection"), "rejection") == SCALING
    require_target(stored, "abc")
    with pytest.raises(InvalidRequest, match="target_digest"):
        require_target(stored, "another")
    card = (folder / "README.md").read_text()
    assert "abc" in card and "1.10" in card and "5.00 % before" in card


def test_nothing_is_written_with_weights_that_are_not_finite(world, tmp_path):
    trainer = world.trainer()
    config = drafter_config(SHAPE, world.folder, read_spec(world.folder), MASK)
    with torch.no_grad():
        trainer.model.fc[0, 0] = float("nan")
    with pytest.raises(InternalError, match="finite"):
        export_drafter(tmp_path / "drafter", trainer.model, config, CARD, torch.float32)
    with pytest.raises(InternalError, match="finite"):
        save_checkpoint(tmp_path, trainer, {})
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_resumed_and_old_ones_go(world, tmp_path):
    trainer, items = world.trainer(), world.items()
    assert resume_checkpoint(tmp_path, trainer) is None
    for step in range(3):
        trainer.step(items)
        save_checkpoint(tmp_path, trainer, {"steps": step + 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    other = make_trainer(world.drafter(seed=4), world.ends)
    assert resume_checkpoint(tmp_path, other) == {"steps": 3} and other.train_step == 3
    first, second = trainer.step(items), other.step(items)
    assert first == second


def test_shapes_follow_the_target(world):
    assert spaced_layers(36, 5) == (1, 9, 17, 25, 33) and spaced_layers(40, 5) == (1, 10, 19, 28, 37)
    assert spaced_layers(36, 1) == (18,) and spaced_layers(2, 5) == (0,) and spaced_layers(6, 5) == (1, 2, 3)
    config = drafter_config(DrafterShape(markov_rank=0), world.folder, read_spec(world.folder), MASK)
    assert config["markov_rank"] == 0 and config["confidence_head_with_markov"] is False
    assert json.loads(json.dumps(config))["target_layer_ids"] == [0]
    with pytest.raises(InvalidRequest, match="mask_token_id"):
        drafter_config(SHAPE, world.folder, read_spec(world.folder), 512)


@pytest.mark.parametrize(
    "bad",
    [
        {"family": "GPTDSparkModel"},
        {"markov_head": "lstm"},
        {"layers": 0},
        {"block": 0},
        {"block": MAX_BLOCK + 1},
        {"captured": 0},
        {"markov_rank": -1},
        {"intermediate": 0},
        {"num_heads": 2.0},
        {"num_kv_heads": 3, "num_heads": 8},
        {"head_dim": 7},
        {"target_layers": (1, 1)},
        {"draft_ids": (3, 2)},
    ],
)
def test_bad_shapes_are_refused_by_name(bad):
    with pytest.raises(InvalidRequest, match=f"^shape.{next(iter(bad))}: expected"):
        DrafterShape(**bad)


def test_every_shape_that_the_engine_reads_can_be_asked_for(world):
    spec = read_spec(world.folder)
    assert set(get_args(Family)) == set(FAMILIES)
    for family in get_args(Family):
        shape = DrafterShape(family=family, layers=1, block=MAX_BLOCK, target_layers=(0,), markov_head="rnn")
        assert drafter_spec_from_config(drafter_config(shape, world.folder, spec, MASK)).block == MAX_BLOCK
