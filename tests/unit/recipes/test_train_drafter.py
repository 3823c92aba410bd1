"""The drafter's recipe on a tiny chat model: whole runs, runs in pieces, what comes out, what is refused."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from engine.dspark.packing import expand_drafter, pack_drafter
from engine.errors import InvalidRequest, SparkrollError, TooLarge
from recipes.grpo.progress import Display
from recipes.train_drafter.__main__ import configuration
from recipes.train_drafter.calibration import calibrate_drafter, compare_drafters
from recipes.train_drafter.config import PRESETS, CalibrateConfig
from recipes.train_drafter.run import DrafterRun
from tests.unit.recipes.chat_model import save_chat_model
from trainer_bridge.drafter.export import load_drafter

ENGINE = ["device=cpu", "dtype=float32", "cache.page_size=4", "cache.kv_tokens=4096"]
ENGINE += ["scheduler.max_running=32", "scheduler.prefill_tokens=256"]
SMALL = [
    *(f"engine.{line}" for line in ENGINE),
    "dtype=float32",
    "features.source=disk",
    "prompts.training=20",
    "prompts.held_out=4",
    "sampling.max_new=12",
    "shape.layers=1",
    "shape.block=4",
    "shape.markov_rank=8",
    "optim.steps=6",
    "optim.learning_rate=3e-3",
    "optim.anchors=8",
    "evaluation.every=3",
    "evaluation.max_new=10",
    'evaluation.rules=["rejection"]',
    "evaluation.temperatures=[1.0]",
    "evaluation.fit_samples=1",
    "batch=8",
    "portion=8",
    "checkpoint_every=2",
    "tracking.wandb=disabled",
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("target")
    target = save_chat_model(folder / "model")
    asked = folder / "asked.jsonl"
    asked.write_text("\n".join(json.dumps({"turns": [f"say {i}", "again"]}) for i in range(24)) + "\n")
    return [*SMALL, f"target.name={json.dumps(str(target))}", f"prompts.sources=[{json.dumps(str(asked))}]"]


def start(settings: list[str], output: Path, *extra: str) -> dict:
    config = configuration("smollm2", [*settings, *extra, f"output={json.dumps(str(output))}"])
    return DrafterRun(config, Display(Console(file=io.StringIO()))).run()


@pytest.fixture(scope="module")
def whole(settings, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    return output, start(settings, output)


def weights(output: Path) -> dict:
    return dict(load_drafter(output / "drafter", torch.float32, "cpu")[0].named_parameters())


def test_a_run_leaves_a_drafter_with_temperatures_card_and_picture(whole):
    output, results = whole
    assert results["finished"] and [step for step, _ in results["accept_length_held_out"]] == [0, 3, 6]
    names = {path.name for path in (output / "drafter").iterdir()}
    assert names == {"config.json", "model.safetensors", "sts-rejection.json", "README.md"}
    card = (output / "drafter" / "README.md").read_text()
    for part in ("loss.ce = 0.1", "loss.detach_confidence = False", "accept length", "Brier"):
        assert part in card, part
    assert "- 20 conversations (`asked`), " in card and "25% of the conversations greedily" in card
    assert str(output.parent) not in card
    assert json.loads((output / "drafter" / "config.json").read_text())["detach_confidence"] is False
    assert (output / "reliability-rejection.png").read_bytes()[:4] == b"\x89PNG"
    axes = {json.loads(line)["axis"] for line in (output / "metrics.jsonl").read_text().splitlines()}
    assert axes == {"train_step", "evaluation"}


def test_a_run_in_pieces_ends_with_the_same_weights(whole, settings, tmp_path):
    output = tmp_path / "run"
    stages = []
    for _ in range(30):
        results = start(settings, output, "max_seconds=0.0")
        stages.append(results.get("stage"))
        if results["finished"]:
            break
    assert results["finished"] and {"answers", "states", "training", "evaluation"} <= set(stages)
    ours, theirs = weights(output), weights(whole[0])
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert results["accept_length_held_out"] == whole[1]["accept_length_held_out"]


@pytest.mark.parametrize("source", ["memory", pytest.param("live", marks=pytest.mark.slow)])
def test_states_computed_anew_or_kept_train_the_same(whole, settings, tmp_path, source):
    start(settings, tmp_path / "run", f"features.source={source}")
    ours, theirs = weights(tmp_path / "run"), weights(whole[0])
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=1e-3)
    assert not (tmp_path / "run" / "features").exists()


@pytest.mark.slow
def test_states_from_other_processes_train_the_same(whole, settings, tmp_path):
    start(settings, tmp_path / "run", "features.source=ray", "features.workers=2")
    ours, theirs = weights(tmp_path / "run"), weights(whole[0])
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-4, rtol=1e-3)


def test_a_confidence_head_is_trained_alone_on_a_finished_drafter(whole, settings, tmp_path):
    begin = f"start_from={json.dumps(str(whole[0] / 'drafter'))}"
    start(settings, tmp_path / "run", begin, "trained=confidence", "optim.steps=2")
    ours, theirs = weights(tmp_path / "run"), weights(whole[0])
    moved = {name for name in theirs if not torch.equal(ours[name], theirs[name])}
    assert moved == {"confidence_head.weight", "confidence_head.bias"}


def test_temperatures_are_fitted_anew(whole, settings, tmp_path):
    folder = tmp_path / "drafter"
    shutil.copytree(whole[0] / "drafter", folder)
    (folder / "sts-rejection.json").unlink()
    base = configuration("smollm2", settings)
    config = CalibrateConfig(
        target=base.target.name,
        dtype="float32",
        require_digest=True,
        prompts=base.prompts,
        evaluation=base.evaluation,
        engine=base.engine,
        tracking=base.tracking,
    )
    results = calibrate_drafter(folder, config, Display(Console(file=io.StringIO())))
    assert (folder / "sts-rejection.json").is_file() and len(results["scalings"][0]["temperatures"]) == 4
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"target_digest": "another"}))
    with pytest.raises(InvalidRequest, match="target_digest"):
        calibrate_drafter(folder, config, Display(Console(file=io.StringIO())))
    packed = tmp_path / "packed"
    pack_drafter(folder, packed)
    shutil.copytree(whole[0] / "drafter", tmp_path / "other")
    expand_drafter(packed, tmp_path / "back")
    said, before = io.StringIO(), sorted(tmp_path.rglob("*"))
    both = {"whole": tmp_path / "other", "packed": tmp_path / "back"}
    found = compare_drafters(both, replace(config, require_digest=False), Display(Console(file=said, width=200)))
    (lengths,) = found["accept_length"].values()
    assert lengths["whole"] == {name: one["accept_length"] for name, one in domains_of(results)}
    assert lengths["packed"].keys() == lengths["whole"].keys() and min(lengths["packed"].values()) >= 1
    assert "100.00%  whole" in said.getvalue() and sorted(tmp_path.rglob("*")) == before


def domains_of(results: dict) -> list:
    (report,) = results["reports"]
    return [*report["domains"].items(), ("all", report["overall"])]


def test_a_dry_run_says_what_it_would_take_and_makes_nothing(settings, tmp_path):
    config = configuration("smollm2", [*settings, f"output={json.dumps(str(tmp_path / 'run'))}"])
    shown = io.StringIO()
    found = DrafterRun(config, Display(Console(file=shown))).dry_run()
    assert found["conversations"] == 20 and found["tokens"] > 20 * 12 and found["cache_gib"] > 0
    assert "GiB" in shown.getvalue() and {p.name for p in (tmp_path / "run").iterdir()} == {"settings.json"}


def test_another_run_in_the_same_folder_is_refused_by_setting(whole, settings):
    with pytest.raises(InvalidRequest, match=r"sampling\.max_new"):
        start(settings, whole[0], "sampling.max_new=13")


def test_states_beyond_the_limit_are_refused_before_they_are_made(settings, tmp_path):
    for source in ("disk", "memory"):
        with pytest.raises(TooLarge, match="max_gib"):
            start(settings, tmp_path / "run", "features.max_gib=1e-9", f"features.source={source}")
    assert not (tmp_path / "run" / "features").exists()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("optim.steps=0", "optim.steps"),
        ("loss.decay=0.0", "loss.decay"),
        ("prompts.held_out=24", "held out"),
        ("shape.target_layers=[1]", "target_layer_ids"),
        ('prompts.sources=["nothing"]', "prompts.sources"),
        ('prompts.sources=["sums"]', "prompts.sources"),
        ("features.max_gib=0.0", "features.max_gib"),
        ("evaluation.every=0", "evaluation.every"),
        ("unknown=1", "unknown"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, tmp_path, wrong, named):
    with pytest.raises(SparkrollError, match=named):
        start(settings, tmp_path / "run", wrong)


def test_presets_are_whole_configurations():
    assert set(PRESETS) == {"tiny", "smollm2", "smollm2_dflash", "smollm2_rnn"}
    head, none, state = PRESETS["smollm2"](), PRESETS["smollm2_dflash"](), PRESETS["smollm2_rnn"]()
    assert none.shape.markov_rank == 0 and state.shape.markov_head == "rnn"
    for twin in (none, state):
        assert (twin.optim, twin.seed, twin.batch, twin.prompts) == (head.optim, head.seed, head.batch, head.prompts)
    with pytest.raises(InvalidRequest, match=r"features\.source"):
        replace(head.features, **{"source": "disc"})
    with pytest.raises(InvalidRequest, match="preset"):
        configuration("huge", [])
