"""Recipes that train adapters: what is published, what stays as it was, who gets which turn, and that they learn."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.errors import InvalidRequest
from recipes.grpo.__main__ import configuration
from recipes.grpo.loop import run
from recipes.grpo.progress import Display
from recipes.grpo.report import read_series
from recipes.lora_grpo.config import PRESETS
from recipes.population.__main__ import configuration as population_of
from recipes.population.loop import run as run_population
from recipes.population.turns import Turns

HARDLY_TAUGHT = [
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "adapter.rank=2",
    "task.largest=2",
    "task.held_out=4",
    "warmup.batch=4",
    "warmup.steps=40",
    "warmup.optim.decay_steps=50",
    "rollout.groups=3",
    "rollout.group_size=4",
    "rollout.evaluations=4",
    "tracking.wandb=disabled",
    "tracking.curves=false",
]


def quiet() -> Display:
    return Display(Console(file=io.StringIO()))


def lora(output: Path, *overrides: str, resume: bool = False) -> dict:
    config = configuration("tiny", [*overrides, f"output={json.dumps(str(output))}"], presets=PRESETS)
    return run(config, resume=resume, display=quiet())


def test_an_adapter_alone_is_trained_and_published_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    settings = [*HARDLY_TAUGHT, "overlong_buffer=12", "steps=2", "checkpoint_every=1"]
    lora(tmp_path, *settings, "max_steps=1")
    first = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert sum(float(value.abs().sum()) for name, value in first.items() if "lora_B" in name) > 0
    results = lora(tmp_path, *settings, resume=True)
    # The first revision is the untrained adapter, so that requests always name one.
    assert (results["steps"], results["policy_version"]) == (2, 3)
    # Step 1 samples what the resumed trainer holds: engine and trainer have the same base and the same adapter.
    assert results["agreement"].keys() == {"1"} and results["agreement"]["1"]["rollout_trainer"] < 1e-5
    second = load_file(tmp_path / "policy" / "adapter_model.safetensors")
    assert first.keys() == second.keys() and any(not torch.equal(first[name], second[name]) for name in first)
    saved = load_file(tmp_path / "checkpoints" / "step-000001" / "policy" / "adapter_model.safetensors")
    assert all(torch.equal(first[name], saved[name]) for name in first)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "initial_policy")
    assert len(PeftModel.from_pretrained(base, str(tmp_path / "policy")).peft_config) == 1


def test_settings_that_contradict_an_adapter_are_refused() -> None:
    for override, field in (("adapter.rank=0", "rank"), ('rollout.release=["weights"]', "release")):
        with pytest.raises(InvalidRequest, match=field):
            configuration("tiny", [override], presets=PRESETS)
    for override, field in (
        ("forks=4", "forks"),
        ("max_lead=-1", "max_lead"),
        ("perturb=[]", "perturb"),
        ('members=[{name = "a", learning_rate = 0.1}]', "members"),
        ('rollout.release=["kv"]', "release"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            population_of("tiny", [override])


def test_four_policies_take_fair_turns_and_the_worst_becomes_the_best(tmp_path: Path) -> None:
    small = [*HARDLY_TAUGHT, "rounds=2", "steps=1"]
    results = run_population(population_of("tiny", small, tmp_path), display=quiet())
    names = {"steady", "slow", "brief", "cautious"}
    assert results["steps"] == dict.fromkeys(names, 2) and results["widest_lead"] <= 1
    assert all(0.1 < share < 0.4 for share in results["token_shares"].values())
    (fork,) = results["forks"]
    # One revision at the start, one a step, one for a fork.
    assert results["versions"] == {name: 3 + (name == fork["to"]) for name in names}
    after = {name: values[1] for name, values in results["rewards"].items()}
    assert after[fork["to"]] == min(after.values()) < max(after.values()) == after[fork["from"]]
    for name in names:
        series = read_series(tmp_path / name / "metrics.jsonl")
        assert list(series["train/adapter_rev"]) == [1, 2] and len(series["val/reward/mean"]) == 3
        assert all(value < 1e-5 for value in series["train/train_rollout_logprob_abs_diff"].values())
    policies = [load_file(Path(folder) / "adapter_model.safetensors") for folder in results["policies"].values()]
    assert all(set(policy) == set(policies[0]) for policy in policies)


def test_nobody_gets_further_ahead_than_allowed_and_nobody_waits_for_one_that_left() -> None:
    turns, leads = Turns(["a", "b", "c"], 1), []

    def work(name: str, steps: int) -> None:
        for _ in range(steps):
            turns.begin(name)
            leads.append(turns.done[name] - min(turns.done.values()))
            turns.end(name)
        turns.leave(name)

    threads = [threading.Thread(target=work, args=item) for item in (("a", 40), ("b", 40), ("c", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(leads) == 83 and max(leads) <= 2 and turns.widest <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["colocated", "service"])
def test_lora_grpo_learns(tmp_path: Path, where: str) -> None:
    results = lora(tmp_path, f"rollout.where={where}", "rollout.release=[]", "tracking.wandb=disabled")
    assert results["reward_after"] >= results["reward_before"] + 0.15
    assert results["policy_version"] == results["steps"] + 1 and results["logprob_abs_diff"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["colocated", "service"])
def test_the_population_learns_and_forks(tmp_path: Path, where: str) -> None:
    engines = ["rollout.engines=2"] if where == "service" else []
    results = run_population(population_of("tiny", [f"rollout.where={where}", *engines], tmp_path), display=quiet())
    assert results["reward_after"] >= results["reward_before"] + 0.15
    assert results["forks"] and results["widest_lead"] <= 1 and results["metrics_lost"] == 0
    assert max(results["token_shares"].values()) < 0.35
    runs = list(tmp_path.glob(f"*/wandb/offline-run-*/run-{results['group']}-*.wandb"))
    assert len(runs) == 4
