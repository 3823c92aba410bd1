"""The Mamba2 kernels in Triton's interpreter against their references, and both forms of the recurrence
against each other."""

from __future__ import annotations

import pytest
import torch

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


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads_of(shape: Mamba2Shape, low: float = 0.0, high: float = float("inf")) -> Mamba2Heads:
    return Mamba2Heads(noise(shape.heads, seed=1), noise(shape.heads, seed=2), noise(shape.heads, seed=3), low, high)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [(Mamba2Shape(4, 6, 2, 12), 0.0, float("inf")), (Mamba2Shape(3, 130, 1, 32), 0.05, 0.8)],
)
def test_decode(shape, low, high):
    """Rows beside each other's in a wider tensor, as a product leaves them; slots in any order."""
    heads, wide = heads_of(shape, low, high), noise(3, shape.convolved + 40, seed=4)
    rows, raw = wide[:, 8 : 8 + shape.convolved], wide[:, -shape.heads :] * 8
    slots = torch.tensor([4, 1, 2])
    states = noise(5, shape.heads, shape.head_dim, shape.state, seed=5)
    expected_states = states.clone()
    expected = mamba2_decode_reference(rows, raw, heads, shape, expected_states, slots)
    out = torch.full((3, shape.inner), float("nan"))
    close(mamba2_decode(rows, raw, heads, shape, states, slots, out=out), expected)
    close(states, expected_states)


def test_prefill_is_decode_token_by_token():
    """Rows that begin on, before and behind ends of chunks: both kernels and both references agree."""
    shape, chunk = Mamba2Shape(2, 6, 2, 12), 16
    heads = heads_of(shape, 0.01)
    ends, positions, slots = torch.tensor([0, 20, 21, 40]), torch.tensor([0, 15, 30]), torch.tensor([2, 3, 1])
    xbc, raw = noise(40, shape.convolved, seed=4), noise(40, shape.heads, seed=5)
    states = noise(4, shape.heads, shape.head_dim, shape.state, seed=6)
    kept = noise(4, shape.heads, shape.head_dim, shape.state, seed=6)
    stepped, states = kept.clone(), kept.clone()
    expected = mamba2_decode_reference(xbc, raw, heads, shape, stepped, slots, ends)
    close(mamba2_decode(xbc, raw, heads, shape, states, slots, ends, keep=False), expected)
    assert torch.equal(states, kept)
    close(mamba2_decode(xbc, raw, heads, shape, states, slots, ends), expected)
    close(states, stepped)
    states = kept.clone()
    close(mamba2_prefill_reference(xbc, raw, heads, shape, states, slots, ends, positions, chunk), expected)
    close(states, stepped)
    states = kept.clone()
    close(mamba2_prefill(xbc, raw, heads, shape, states, slots, ends, positions, chunk), expected)
    close(states, stepped)
    assert torch.equal(states[0], kept[0])


def test_chunks_end_where_states_are_kept():
    """Who goes on from a state at a chunk's end computes the same bits, whatever came with it."""
    shape = Mamba2Shape(2, 8, 1, 8)
    heads, xbc, raw = heads_of(shape), noise(40, shape.convolved, seed=4), noise(40, shape.heads, seed=5)
    whole, parts = (torch.zeros(2, shape.heads, shape.head_dim, shape.state) for _ in range(2))

    def run(start: int, end: int, states: torch.Tensor) -> torch.Tensor:
        ends, slot, position = torch.tensor([0, end - start]), torch.tensor([1]), torch.tensor([start])
        given = xbc[start:end], raw[start:end], heads, shape, states
        return mamba2_prefill_reference(*given, slot, ends, position, 16)

    expected = run(0, 40, whole)
    assert torch.equal(torch.cat((run(0, 16, parts), run(16, 40, parts))), expected) and torch.equal(parts, whole)


@pytest.mark.parametrize("width", [96, 1536])
@pytest.mark.parametrize("form", ["gated", "gated-normed", "normed-gated"])
def test_gate(form: str, width: int) -> None:
    """In place, in the first rows of more, which stay as they are: 1536 is no multiple of what a program has."""
    rows, wide = noise(3, width), noise(3, width + 104, seed=1) * 3
    kept, gate = rows.clone(), wide[:2, 7 : width + 7]
    norm = None if form == "gated" else GroupNorm(noise(width, seed=2), 3, 1e-5, form == "gated-normed")
    expected = mamba2_gate_reference(kept[:2], gate, norm)
    close(mamba2_gate(rows[:2], gate, norm, out=rows[:2]), expected)
    assert torch.equal(rows[2], kept[2])
    close(mamba2_gate(kept[:2], gate, norm), expected)
