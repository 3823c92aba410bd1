"""The Mamba2 kernels on a CUDA device against their references, on published shapes and odd ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.mamba2_decode import mamba2_decode
from engine.kernels.mamba2_gate import mamba2_gate
from engine.kernels.mamba2_prefill import mamba2_prefill
from engine.layers.mamba2_reference import (
    GroupNorm,
    Mamba2Heads,
    Mamba2Shape,
    mamba2_decode_reference,
    mamba2_gate_reference,
    mamba2_prefill_reference,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = {
    "falcon-h1-1.5b": Mamba2Shape(48, 64, 1, 256),
    "nemotron-h-8b": Mamba2Shape(128, 64, 8, 128),
    "odd": Mamba2Shape(6, 40, 3, 24),
}
DTYPES = [torch.bfloat16, torch.float32]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """By norm: bf16 rounds products of a chunk that the reference sums in fp32."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(difference) < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_steps_and_chunks(name: str, dtype: torch.dtype) -> None:
    """Rows that begin on, before and behind ends of chunks, their numbers in a product's wider rows."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    heads = Mamba2Heads(torch.rand(shape.heads, device="cuda"), noise(shape.heads) - 3, noise(shape.heads), 0.001)
    wide = noise(333, shape.convolved + 40 + shape.heads, dtype=dtype)
    rows, raw = wide[:, 8 : 8 + shape.convolved], wide[:, -shape.heads :]
    slots = torch.tensor([3, 1, 2], device="cuda")
    ends, positions = torch.tensor([0, 200, 201, 333], device="cuda"), torch.tensor([0, 63, 100], device="cuda")
    kept = noise(4, shape.heads, shape.head_dim, shape.state)
    expected_states = kept.clone()
    expected = mamba2_prefill_reference(rows, raw, heads, shape, expected_states, slots, ends, positions, 64)
    for chunked in (True, False):
        states, out = kept.clone(), torch.full((333, shape.inner), float("nan"), dtype=dtype, device="cuda")
        given = rows, raw, heads, shape, states, slots, ends
        actual = mamba2_prefill(*given, positions, 64, out=out) if chunked else mamba2_decode(*given, out=out)
        close(actual, expected, dtype)
        close(states, expected_states, dtype)
        assert torch.equal(states[0], kept[0])
    states, others = kept.clone(), kept.clone()
    expected = mamba2_decode_reference(rows[:3], raw[:3], heads, shape, others, slots)
    close(mamba2_decode(rows[:3], raw[:3], heads, shape, states, slots), expected, dtype)
    close(states, others, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_a_row_is_cut_changes_no_bit(dtype: torch.dtype) -> None:
    shape = SHAPES["nemotron-h-8b"]
    heads = Mamba2Heads(torch.rand(shape.heads, device="cuda"), noise(shape.heads) - 3, noise(shape.heads))
    rows, raw, slot = noise(90, shape.convolved, dtype=dtype), noise(90, shape.heads, dtype=dtype), torch.tensor([1])
    whole = noise(2, shape.heads, shape.head_dim, shape.state)
    parts, slot = whole.clone(), slot.cuda()

    def run(states: torch.Tensor, start: int, end: int) -> torch.Tensor:
        ends = torch.tensor([0, end - start], device="cuda")
        return mamba2_decode(rows[start:end], raw[start:end], heads, shape, states, slot, ends)

    expected = run(whole, 0, 90)
    cut = torch.cat([run(parts, start, end) for start, end in ((0, 7), (7, 8), (8, 90))])
    assert torch.equal(cut, expected) and torch.equal(parts, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["gated", "gated-normed", "normed-gated"])
@pytest.mark.parametrize("width", [3072, 1536, 120])
def test_gate(form: str, width: int, dtype: torch.dtype) -> None:
    rows, gate = noise(6, width, dtype=dtype), noise(6, 2 * width, dtype=dtype)[:5, :width]
    kept = rows.clone()
    norm = None if form == "gated" else GroupNorm(noise(width, dtype=dtype), 3, 1e-5, form == "gated-normed")
    expected = mamba2_gate_reference(kept[:5], gate, norm)
    close(mamba2_gate(rows[:5], gate, norm, out=rows[:5]), expected, dtype)
    assert torch.equal(rows[5], kept[5])
    close(mamba2_gate(kept[:5], gate, norm), expected, dtype)
