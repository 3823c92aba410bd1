"""The GRPO recipe through the whole service: Ray actor, HTTP, MessagePack, radix cache, updates."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.grpo.__main__ import configuration
from recipes.grpo.loop import run
from recipes.grpo.progress import Display
from recipes.grpo.report import read_series
from rollout.actors.launch import ensure_ray

SMALL = [
    "task.largest=6",
    "task.held_out=64",
    "model.hidden_size=64",
    "model.intermediate_size=192",
    "model.initializer_range=0.1",
    "warmup.batch=32",
    "warmup.steps=120",
    "warmup.optim.learning_rate=4e-3",
    "warmup.optim.decay_steps=120",
    "rollout.groups=16",
    "optim.learning_rate=4e-3",
    "steps=10",
    "tracking.wandb=disabled",
    "tracking.curves=false",
]
WHERE = pytest.mark.parametrize("where", ["colocated", pytest.param("service", marks=pytest.mark.slow)])
"""What follows from the loop alone is shown without the service too."""
UNTAUGHT = ["warmup.steps=2", "warmup.optim.decay_steps=50", "rollout.groups=4", "task.held_out=32"]


@pytest.fixture(scope="module", autouse=True)
def one_ray() -> Iterator[None]:
    """Runs of this file share a Ray session."""
    import ray

    owned = ensure_ray(None)
    yield
    if owned:
        ray.shutdown()


def execute(output: Path, *overrides: str, resume: bool = False, preset: str = "demo") -> dict:
    config = configuration(preset, [*overrides, f"output={json.dumps(str(output))}"])
    return run(config, resume=resume, display=Display(Console(file=io.StringIO())))


def test_grpo_learns_stops_and_resumes_with_versions_going_on(tmp_path: Path) -> None:
    first = execute(tmp_path, *SMALL, "max_steps=4")
    assert (first["steps"], first["policy_version"]) == (4, 4)
    results = execute(tmp_path, *SMALL, "tracking.curves=true", resume=True)
    assert (results["steps"], results["policy_version"], results["metrics_lost"]) == (10, 10, 0)
    assert results["reward_before"] == first["reward_before"] <= 0.35
    assert results["reward_after"] >= results["reward_before"] + 0.15
    assert results["seconds"] > first["seconds"]
    assert results["logprob_abs_diff"] < 1e-5
    assert results["cache_hit_share"] > 0.8
    assert json.loads(json.dumps(results)).keys() >= {"reward_before", "reward_after", "seconds"}

    series = read_series(tmp_path / "metrics.jsonl")
    assert sorted(series["critic/rewards/mean"]) == list(range(1, 11))
    assert [series["train/policy_version"][step] for step in range(1, 11)] == list(range(1, 11))
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode("3+2+1=")])).logits
    assert logits[0, -1].argmax() == tokenizer.convert_tokens_to_ids("5")


@WHERE
def test_grpo_resumed_equals_uninterrupted(tmp_path: Path, where: str) -> None:
    settings = [*SMALL, "warmup.steps=60", "task.held_out=32", "rollout.groups=8", "steps=2", f"rollout.where={where}"]
    straight = execute(tmp_path / "straight", *settings)
    execute(tmp_path / "parts", *settings, "max_steps=1")
    parts = execute(tmp_path / "parts", *settings, resume=True)
    assert parts["reward_after"] == straight["reward_after"]
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "policy") for name in ("straight", "parts"))
    for (name, value), again in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(value, again, atol=1e-6, rtol=0, msg=name)
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "initial_policy")
    assert any(not torch.equal(value, one.state_dict()[name]) for name, value in start.state_dict().items())


@WHERE
def test_grpo_with_zero_learning_rate_changes_nothing(tmp_path: Path, where: str) -> None:
    settings = [*SMALL, *UNTAUGHT, "warmup.steps=60", f"rollout.where={where}"]
    results = execute(tmp_path, *settings, "optim.learning_rate=0", "steps=3")
    assert results["reward_after"] == results["reward_before"] and results["policy_version"] == 3
    assert results["logprob_abs_diff"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_demo_reaches_its_reward(tmp_path: Path, seed: int) -> None:
    results = execute(tmp_path, f"seed={seed}", "tracking.wandb=disabled")
    assert results["held_out_questions"] >= 256
    assert results["reward_before"] <= 0.35 and results["reward_after"] >= 0.80


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("control", ["shuffle_rewards=true", "optim.learning_rate=0"])
def test_grpo_demo_does_not_learn_from_nothing(tmp_path: Path, control: str) -> None:
    results = execute(tmp_path, control, "tracking.wandb=disabled")
    assert abs(results["reward_after"] - results["reward_before"]) <= 0.05
