"""The choice of who prefills: decision, memory, and what stays out. The backends are real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from engine.attention.choice import Choice, Setting, choose, key_of, recall, remember
from engine.attention.prefill_scenes import Scene, Workload, prefill_workloads, wall_seconds
from engine.attention.torch_fast import TorchAttention
from engine.attention.torch_ref import TorchReference
from engine.errors import Unsupported
from engine.models.spec import LayerSpec, ModelSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    context_len=192,
    hidden=64,
    intermediate=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerSpec(),) * 3,
    tied=True,
    eos_ids=(),
    dtype=torch.float32,
)
SETTING = Setting(SPEC, torch.float32, torch.device("cpu"), page_size=8, prefill_tokens=64)
MAKE = {"torch_ref": TorchReference, "torch": TorchAttention}


class Stopwatch:
    """Runs the step and reads the times it was given, in order."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def __call__(self, step, device: torch.device) -> float:
        step()
        return self.times.pop(0)


def never(step, device) -> float:
    raise AssertionError("nothing is to be measured")


def test_the_faster_of_two_real_backends_is_chosen_and_its_figures_kept(tmp_path: Path) -> None:
    choice = choose(SETTING, MAKE, tmp_path)
    workloads = [workload.name for workload in prefill_workloads(64, 192)]
    assert {name: list(times) for name, times in choice.seconds.items()} == dict.fromkeys(MAKE, workloads)
    totals = {name: sum(times.values()) for name, times in choice.seconds.items()}
    assert choice.name == ("torch" if totals["torch"] <= 0.97 * totals["torch_ref"] else "torch_ref")
    assert choose(SETTING, MAKE, tmp_path, never) == choice
    assert all(part in choice.describe() for part in (f"prefill by {choice.name}", *workloads, "ms"))


@pytest.mark.parametrize(
    "times, name",
    [
        ((1.0, 1.0, 0.5, 1.0), "torch"),
        ((1.0, 1.0, 1.5, 0.2), "torch"),  # all workloads together
        ((1.0, 1.0, 0.99, 0.99), "torch_ref"),  # within noise
        ((1.0, 1.0, 2.0, 1.0), "torch_ref"),
    ],
)
def test_decisions(tmp_path: Path, times, name: str) -> None:
    assert choose(SETTING, MAKE, tmp_path, Stopwatch(*times)).name == name
    assert choose(SETTING, MAKE, tmp_path, never).name == name


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 16},
        {"dtype": torch.bfloat16},
        {"prefill_tokens": 32},
        {"spec": replace(SPEC, num_heads=2)},
        {"spec": replace(SPEC, layers=(LayerSpec(), LayerSpec(), LayerSpec(window=4)))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_measured_anew(tmp_path: Path, change: dict) -> None:
    other = replace(SETTING, **change)
    choose(SETTING, MAKE, tmp_path, Stopwatch(1, 1, 0, 0))
    assert recall(key_of(other, list(MAKE)), tmp_path) is None
    with pytest.raises(AssertionError, match="nothing is to be measured"):
        choose(other, MAKE, tmp_path, never)


def _spoilt(choice: Choice) -> dict[str, bytes]:
    tree = msgspec.to_builtins(choice)
    return {
        "empty": b"",
        "cut short": msgspec.json.encode(tree)[:-20],
        "no text": bytes(range(256)),
        "another structure": msgspec.json.encode([1, 2]),
        "an unknown field": msgspec.json.encode(tree | {"more": 1}),
        "wrong types": msgspec.json.encode(tree | {"seconds": {"torch": 1}}),
        "another setting's": msgspec.json.encode(tree | {"key": tree["key"] | {"libraries": "older"}}),
        "a backend never measured": msgspec.json.encode(tree | {"name": "other"}),
    }


def test_a_spoilt_file_is_measured_anew_and_replaced(tmp_path: Path) -> None:
    first = choose(SETTING, MAKE, tmp_path, Stopwatch(1, 1, 0.5, 0.5))
    (file,) = tmp_path.iterdir()
    for what, content in _spoilt(first).items():
        file.write_bytes(content)
        assert choose(SETTING, MAKE, tmp_path, Stopwatch(1, 1, 3, 3)).name == "torch_ref", what
        assert choose(SETTING, MAKE, tmp_path, never).name == "torch_ref", what
    assert list(tmp_path.iterdir()) == [file], "nothing is left lying about"


def test_a_folder_that_cannot_be_used_costs_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "below"
    for _ in range(2):
        assert choose(SETTING, MAKE, folder, Stopwatch(1, 1, 0.5, 0.5)).name == "torch"


def test_a_candidate_that_fails_is_left_out_by_name_and_tried_again(tmp_path: Path) -> None:
    def broken(spec: ModelSpec):
        raise Unsupported("kernels are being compiled")

    def crashing(step, device) -> float:
        step()
        raise RuntimeError("no compiler")

    choice = choose(SETTING, MAKE | {"torch": broken}, tmp_path, Stopwatch(1, 1))
    assert (choice.name, choice.left_out) == ("torch_ref", {"torch": "kernels are being compiled"})
    assert "not torch: kernels are being compiled" in choice.describe()
    assert choose(SETTING, MAKE, tmp_path, Stopwatch(1, 1, 0.5, 0.5)).name == "torch"
    with pytest.raises(RuntimeError, match="no compiler"):  # the default is no candidate: it must work
        choose(replace(SETTING, page_size=4), MAKE, tmp_path, crashing)


@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_a_candidate_with_other_results_is_left_out(tmp_path: Path, value: float) -> None:
    def forgetful(spec: ModelSpec):
        """Sees the last three tokens only, or no number at all."""
        return TorchReference(
            replace(spec, layers=(LayerSpec(window=3) if value == 0.5 else LayerSpec(softcap=value),))
        )

    choice = choose(SETTING, MAKE | {"torch": forgetful}, tmp_path, Stopwatch(1, 1, 0.1, 0.1))
    assert choice.name == "torch_ref" and "differ" in choice.left_out["torch"]
    assert list(tmp_path.iterdir()) == []


def test_two_processes_may_remember_at_once(tmp_path: Path) -> None:
    choice = choose(SETTING, MAKE, tmp_path, Stopwatch(1, 1, 0.5, 0.5))
    remember(choice, tmp_path)
    assert recall(choice.key, tmp_path) == choice and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("tokens, context", [(512, 40_960), (8192, 40_960), (64, 192), (512, 512), (4096, 100), (1, 1)])
def test_workloads_fit_the_model(tokens: int, context: int) -> None:
    workloads = prefill_workloads(tokens, context)
    assert len(workloads) == (2 if min(tokens, context) < context else 1)
    for workload in workloads:
        assert sum(workload.query_lens) <= tokens and max(workload.seq_lens) <= context
        assert all(count <= length for count, length in zip(workload.query_lens, workload.seq_lens, strict=True))


def test_a_scene_runs_the_layers_it_stands_for() -> None:
    """Layer kinds run as often as the model has them, on pages in no order."""
    spec = replace(SPEC, num_layers=2, layers=(LayerSpec(), LayerSpec(window=4)))
    scene = Scene(Workload("", (20, 3), (30, 3)), spec, 4, torch.float32, torch.device("cpu"))
    plain, windowed = scene.run(TorchReference(spec), [2, 1])
    assert plain.shape == windowed.shape == (23, 4, 16)
    torch.testing.assert_close(plain[20:], windowed[20:])
    assert not torch.allclose(plain[:20], windowed[:20])
    assert scene.batch.page_tables_BP[0].tolist() != sorted(scene.batch.page_tables_BP[0].tolist())


def test_the_clock_runs_warm_ups_and_bounded_repeats() -> None:
    runs: list[int] = []
    assert wall_seconds(lambda: runs.append(1), torch.device("cpu")) >= 0
    assert 5 <= len(runs) <= 17
