"""Every attention backend against the reference, on the same batches.

A backend joins by its line in `BACKENDS`. Whatever a row may not read is poisoned.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.attention.flashinfer import installed
from engine.attention.prefill_scenes import Scene, Workload
from engine.attention.registry import make_attention
from engine.attention.torch_ref import TorchReference
from engine.errors import Unsupported
from engine.models.spec import LayerSpec, ModelSpec

WINDOW, SOFTCAP = {"window": 70}, {"softcap": 20.0}
SINK, BIAS = {"sink": True}, {"bias": 8}


@dataclass(frozen=True)
class Backend:
    """`refused` are the kinds of layers it says no to."""

    name: str
    device: str
    dtype: torch.dtype
    tolerance: float
    refused: tuple[str, ...]
    head_dim: int = 128


def _gpu(backend: Backend, present: bool = True):
    absent = not (torch.cuda.is_available() and present)
    marks = (pytest.mark.gpu, pytest.mark.skipif(absent, reason=f"{backend.name} needs a CUDA device and its library"))
    return pytest.param(backend, id=backend.name, marks=marks)


BACKENDS = [
    pytest.param(
        Backend("torch", "cpu", torch.float32, 1e-5, ("window", "softcap", "sink", "bias"), head_dim=16), id="torch"
    ),
    _gpu(Backend("triton", "cuda", torch.bfloat16, 1e-2, ("bias",))),
    _gpu(Backend("flashinfer", "cuda", torch.bfloat16, 1e-2, ("sink", "bias")), installed()),
]
BATCHES = {
    "whole prompts": Workload("", (200, 1, 77, 64), (200, 1, 77, 64)),
    "chunks behind their context": Workload("", (100, 3, 130), (300, 90, 131)),
    "verify rows": Workload("", (5, 1, 8, 16), (200, 70, 8, 401)),
    "decode rows": Workload("", (1, 1, 1), (1, 300, 17)),
}


def make_spec(backend: Backend, *layers: dict) -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        context_len=1024,
        hidden=64,
        intermediate=32,
        num_layers=len(layers),
        num_heads=6,
        num_kv_heads=2,
        head_dim=backend.head_dim,
        layers=tuple(LayerSpec(**layer) for layer in layers),
        tied=True,
        eos_ids=(),
        dtype=backend.dtype,
    )


def make_scene(workload: Workload, spec: ModelSpec, page_size: int, backend: Backend) -> Scene:
    """Decode rows come first, as in every batch, and what nobody wrote is NaN."""
    scene = Scene(workload, spec, page_size, backend.dtype, torch.device(backend.device))
    scene.batch.num_decode = sum(1 for count in workload.query_lens if count == 1) if workload.query_lens[0] == 1 else 0
    written = torch.zeros(scene.pool.num_pages * page_size, dtype=torch.bool)
    for row, length in enumerate(workload.seq_lens):
        position = torch.arange(length)
        written[scene.batch.page_tables_BP[row].cpu()[position // page_size] * page_size + position % page_size] = True
    for layer in range(spec.num_layers):
        scene.pool.tokens(layer)[~written.to(backend.device)] = float("nan")
    return scene


def compare(used, scene: Scene, spec: ModelSpec, tolerance: float) -> None:
    ones = [1] * spec.num_layers
    expected, actual = scene.run(TorchReference(spec), ones), scene.run(used, ones)
    for out, right in zip(actual, expected, strict=True):
        error = float((out - right).float().norm() / right.float().norm())
        assert error <= tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_layers(backend: Backend, page_size: int) -> None:
    """One backend through several plans: nothing of an earlier step stays."""
    spec = make_spec(backend, {})
    used = make_attention(backend.name, spec, backend.device)
    for workload in BATCHES.values():
        compare(used, make_scene(workload, spec, page_size, backend), spec, backend.tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_rows_beside_prompts(backend: Backend) -> None:
    spec = make_spec(backend, {})
    used = make_attention(backend.name, spec, backend.device)
    mixed = Workload("", (1, 1, 90, 12), (33, 257, 90, 40))
    compare(used, make_scene(mixed, spec, 16, backend), spec, backend.tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_different_kinds_in_one_model(backend: Backend) -> None:
    kinds = [kind for kind in ({}, WINDOW, SOFTCAP, SINK) if not set(kind) & set(backend.refused)]
    spec = make_spec(backend, *kinds)
    used = make_attention(backend.name, spec, backend.device)
    for workload in BATCHES.values():
        scene = make_scene(workload, spec, 16, backend)
        scene.sinks = [None if sink is None else torch.randn_like(sink) for sink in scene.sinks]
        compare(used, scene, spec, backend.tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_layers_are_refused_by_name(backend: Backend) -> None:
    for field in backend.refused:
        (kind,) = (kind for kind in (WINDOW, SOFTCAP, SINK, BIAS) if field in kind)
        with pytest.raises(Unsupported) as refusal:
            make_attention(backend.name, make_spec(backend, {}, kind), backend.device)
        assert refusal.value.field == f"layers[1].{field}"
        assert backend.name in refusal.value.message
