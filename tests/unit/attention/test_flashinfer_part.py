"""FlashInfer's part of prefill as far as it needs neither the library nor a GPU."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.attention.choice import Setting
from engine.attention.flashinfer import FlashInferPrefill, _kind, _page_ids, _starts, installed, refuse_unfit
from engine.attention.registry import make_attention, resolve_attention
from engine.errors import Unsupported
from engine.models.spec import LayerSpec, ModelSpec

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    context_len=512,
    hidden=96,
    intermediate=32,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=128,
    layers=(LayerSpec(), LayerSpec(window=9, softcap=3.0)),
    tied=True,
    eos_ids=(),
    dtype=torch.bfloat16,
)


@pytest.mark.parametrize(
    "change, dtype, deterministic, field",
    [
        ({"layers": (LayerSpec(), LayerSpec(sink=True))}, torch.bfloat16, False, "layers[1].sink"),
        ({"layers": (LayerSpec(bias=4), LayerSpec())}, torch.bfloat16, False, "layers[0].bias"),
        ({"head_dim": 96}, torch.bfloat16, False, "head_dim"),
        ({}, torch.float32, False, "dtype"),
        ({}, torch.float16, True, "deterministic"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(change, dtype, deterministic, field) -> None:
    spec = replace(SPEC, **change)
    setting = Setting(spec, dtype, torch.device("cpu"), 16, 512, deterministic)
    refusals = (
        lambda: refuse_unfit(spec, dtype, deterministic),
        lambda: resolve_attention("flashinfer", spec, "cpu", setting),
        lambda: FlashInferPrefill(spec, dtype, "cuda", deterministic),
    )
    for refuse in refusals:
        with pytest.raises(Unsupported, match="flashinfer") as refusal:
            refuse()
        assert refusal.value.field == field


def test_windows_and_soft_caps_are_its_own() -> None:
    refuse_unfit(SPEC, torch.float16)
    assert [_kind(layer) for layer in SPEC.layers] == [(-1, 0.0), (8, 3.0)]


def test_asked_for_without_a_gpu_it_says_so() -> None:
    with pytest.raises(Unsupported, match="cuda with the flashinfer attention"):
        make_attention("flashinfer", SPEC, "cpu")


@pytest.mark.skipif(installed(), reason="FlashInfer is installed")
def test_asked_for_without_the_library_it_says_so() -> None:
    with pytest.raises(Unsupported, match="flashinfer-python to be installed"):
        make_attention("flashinfer", SPEC, "cuda")


def test_page_ids_of_random_tables() -> None:
    rng = random.Random(0)
    for _ in range(50):
        rows, columns = rng.randint(1, 6), rng.randint(1, 9)
        used = [rng.randint(1, columns) for _ in range(rows)]
        table = torch.randint(0, 1000, (rows + 2, columns), dtype=torch.int32)
        behind_decode_rows = table[2:]
        expected = [int(page) for row, count in enumerate(used) for page in behind_decode_rows[row, :count]]
        used_B = torch.tensor(used, dtype=torch.int32)
        pages = _page_ids(behind_decode_rows, used_B)
        assert pages.tolist() == expected and pages.dtype == torch.int32
        assert _starts(used_B).tolist() == [sum(used[:row]) for row in range(rows + 1)]
