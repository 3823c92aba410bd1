"""Engine and trainer in one process: by configuration alone, without Ray, HTTP or W&B."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from engine.errors import InvalidRequest
from recipes.grpo.__main__ import configuration
from recipes.grpo.config import RolloutConfig
from recipes.grpo.loop import run
from recipes.grpo.progress import Display
from recipes.grpo.report import read_series
from tests.unit.recipes.chat_model import save_chat_model

ROOT = Path(__file__).resolve().parents[3]
TINY = [
    "rollout.groups=4",
    "rollout.group_size=4",
    "rollout.evaluations=2",
    "rollout.engine.cache.kv_tokens=4096",
    "rollout.engine.scheduler.max_running=64",
    "task.held_out=2",
    "steps=2",
    "evaluate_every=1",
    "optim.decay_steps=50",
]
SUMS = [
    "rollout.where=colocated",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "warmup.steps=8",
    "warmup.optim.decay_steps=50",
    "tracking.wandb=disabled",
    "tracking.curves=false",
]
HIDDEN = """
import importlib.machinery
found = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    if name.split(".")[0] in {"ray", "wandb", "matplotlib", "starlette", "uvicorn"}:
        return None
    return found(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""
"""What makes packages look as if they were not installed."""


def execute(output: Path, *overrides: str, preset: str, resume: bool = False) -> dict:
    config = configuration(preset, [*overrides, f"output={json.dumps(str(output))}"])
    return run(config, resume=resume, display=Display(Console(file=io.StringIO())))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "policy").state_dict()


def test_giving_memory_to_each_other_changes_nothing(tmp_path: Path) -> None:
    release = 'rollout.release=["graphs", "kv", "weights"]'
    apart = execute(tmp_path / "turns", *TINY, *SUMS, release, preset="demo")
    kept = ["rollout.release=[]", "rollout.offload_trainer=false"]
    together = execute(tmp_path / "kept", *TINY, *SUMS, *kept, preset="demo")
    assert apart["reward_curve"] == together["reward_curve"] and len(apart["reward_curve"]) == 3
    assert apart["released_gib"] > 0 == together["released_gib"]
    assert apart["agreement"] == together["agreement"] and apart["agreement"].keys() == {"0", "1"}
    assert all(found["rollout_trainer"] < 1e-5 for found in apart["agreement"].values())
    for name, value in weights(tmp_path / "turns").items():
        assert torch.equal(value, weights(tmp_path / "kept")[name]), name


def test_smollm2_preset_in_16_bits_learns_in_fp32_and_resumes(tmp_path: Path) -> None:
    settings = [*TINY, f"model.name={save_chat_model(tmp_path / 'model')}", "task.begun=", "tracking.wandb=disabled"]
    settings += ["tracking.curves=false"]
    settings += ["task.prompt={a}{op}{b}", "shuffle_rewards=false", "checkpoint_every=1"]
    settings += ["rollout.engine.dtype=bfloat16", "filter_zero_variance=false", "overlong_buffer=8"]
    straight = execute(tmp_path / "straight", *settings, preset="smollm2")
    execute(tmp_path / "parts", *settings, "max_steps=1", preset="smollm2")
    parts = execute(tmp_path / "parts", *settings, preset="smollm2", resume=True)
    assert parts["policy_version"] == straight["policy_version"] == 2
    for found in straight["agreement"].values():
        assert 0 <= found["cached_uncached"] < 0.1 and 0 < found["rollout_trainer"] < 0.1 and found["tokens"] > 16
    state = [torch.load(tmp_path / f"{name}/checkpoints/step-000002/trainer.pt") for name in ("straight", "parts")]
    moved = 0
    for first, again in zip(state[0]["masters"], state[1]["masters"], strict=True):
        assert first.dtype == torch.float32 and torch.equal(first, again)
        moved += int((first != first.bfloat16().float()).sum())
    assert moved > 1000  # updates below the last bit of bfloat16 are kept


def test_retry_preset_asks_again_and_trains_on_both_turns(tmp_path: Path) -> None:
    execute(tmp_path, *TINY, *SUMS, "steps=1", "filter_zero_variance=false", preset="retry")
    series = read_series(tmp_path / "metrics.jsonl")
    turns, length = series["rollout/turns"][1], series["response_length/mean"][1]
    assert 1.0 < turns <= 2.0
    # Every token that the policy said in either turn is sampled and trained on, the question is not.
    agreement = series["train/train_rollout_logprob_abs_diff"][1]
    assert length > 0 and agreement < 1e-5


def test_recipes_and_benchmarks_need_neither_ray_nor_wandb(tmp_path: Path) -> None:
    model = save_chat_model(tmp_path / "model")
    arguments = [f"--set={item}" for item in [*TINY, f"model.name={model}", f"output={tmp_path / 'run'}"]]
    code = f"""{HIDDEN}
import dataclasses, json, sys
import typer
import benchmarks.decode as decode, benchmarks.group_rollout as group_rollout, benchmarks.shapes as shapes
import recipes.grpo.__main__ as grpo
small = dict(vocab_size=64, hidden=32, intermediate=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
shapes.SHAPES["tiny"] = dataclasses.replace(
    shapes.SHAPES["smollm2-135m"], layers=shapes.SHAPES["smollm2-135m"].layers[:1], **small
)
decode.INPUT, decode.OUTPUT, decode.SETTLE = 16, 4, 1
decode.main(shape="tiny", batch="1,2", repeats=1)
group_rollout.main(shape="tiny", groups=2, samples=2, prompt=16, new=4, repeats=1)
sys.argv = ["grpo", "--preset", "smollm2", *{arguments!r}]
typer.run(grpo.main)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line.get("name") for line in lines] == ["decode", "group_rollout", None]
    assert lines[2]["policy_version"] == 2 and lines[2]["curves"] is None
    assert "wandb is not installed" in done.stderr


ONLINE = [
    'rollout.engine.dspark.mode="static"',
    "rollout.engine.dspark.sweep_seconds=0.0",
    "model.num_layers=3",
    "online.enabled=true",
    "online.shape.layers=1",
    "online.shape.block=4",
    "online.shape.markov_rank=8",
    "online.training.batch=8",
    "online.training.optim.learning_rate=0.01",
    "online.training.optim.warmup=0.0",
]


def test_a_run_trains_publishes_and_exports_its_drafter(tmp_path: Path) -> None:
    result = execute(
        tmp_path,
        *TINY,
        *SUMS,
        *ONLINE,
        "online.training.steps=2",
        "evaluate_every=0",
        "tracking.curves=true",
        preset="demo",
    )
    assert [row[:2] for row in result["accept_lengths"]] == [[1, 0], [2, 1]]
    series = read_series(tmp_path / "metrics.jsonl")
    assert series["drafter/version"] == {1: 1.0, 2: 2.0} and series["train/policy_version"] == {1: 1.0, 2: 2.0}
    assert series["draft/accept_length"][1] >= 1.0 and series["drafter/replay_examples"][2] > 8
    assert (tmp_path / "drafter" / "README.md").is_file() and (tmp_path / "curves.png").is_file()


@pytest.mark.slow
def test_an_online_drafter_learns_beside_a_policy_that_does_not_notice(tmp_path: Path) -> None:
    settings = [*TINY, *SUMS, *ONLINE, "steps=4", "evaluate_every=2", "warmup.steps=60", "online.training.steps=15"]
    plain = execute(tmp_path / "plain", *settings, "online.enabled=false", preset="demo")
    execute(tmp_path / "online", *settings, "max_steps=2", preset="demo")
    whole = execute(tmp_path / "online", *settings, preset="demo", resume=True)
    assert whole["reward_curve"] == plain["reward_curve"] and whole["policy_version"] == plain["policy_version"] == 4
    for name, value in weights(tmp_path / "plain").items():
        torch.testing.assert_close(weights(tmp_path / "online")[name], value, atol=1e-3, rtol=1e-3)
    series = read_series(tmp_path / "online" / "metrics.jsonl")
    lengths = [series["draft/accept_length"][step] for step in range(1, 5)]
    assert lengths[-1] > lengths[0] + 0.1, lengths
    # A resumed run serves and publishes the drafter it goes on with.
    assert [series["drafter/version"][step] for step in range(1, 5)] == [1, 2, 2, 3]


def test_contradictory_settings_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"rollout\.engines"):
        RolloutConfig(where="colocated", engines=2)
    with pytest.raises(InvalidRequest, match=r"rollout\.where"):
        configuration("demo", ["rollout.where=nowhere"])
    with pytest.raises(InvalidRequest, match=r"warmup\.steps"):
        configuration("smollm2", ["warmup.steps=3"])
    with pytest.raises(InvalidRequest, match=r"online\.enabled"):
        configuration("demo", ["online.enabled=true"])
    with pytest.raises(InvalidRequest, match="overlong_buffer"):
        configuration("dapo", ["overlong_buffer=13"])
