"""The kernels of gated delta nets, convolutions and experts in Triton's interpreter against their references, and
both forms of the recurrence against each other."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.causal_conv import causal_conv, causal_conv_step
from engine.kernels.expert_gate import expert_gate, expert_gate_reference
from engine.kernels.expert_rows import (
    ExpertRows,
    expert_down,
    expert_down_reference,
    expert_gate_up,
    expert_gate_up_reference,
)
from engine.kernels.gdn_decode import gdn_decode
from engine.kernels.gdn_gate import gdn_gate
from engine.kernels.gdn_prefill import gdn_prefill
from engine.layers.causal_conv_reference import causal_conv_reference
from engine.layers.gated_delta_reference import (
    GatedDeltaHeads,
    GatedDeltaShape,
    HeadColumns,
    gdn_decode_reference,
    gdn_gate_reference,
    gdn_prefill_reference,
)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def heads_of(shape: GatedDeltaShape, together: bool) -> GatedDeltaHeads:
    """Raw numbers of a key head side by side, or all decays before all strengths."""
    count, shared = shape.value_heads, shape.shared
    raw, strength = (
        (HeadColumns(3 + shared, 2 * shared), HeadColumns(3, 2 * shared))
        if together
        else (HeadColumns(3, shared), HeadColumns(3 + count, shared))
    )
    return GatedDeltaHeads(noise(count, seed=1), noise(count, seed=2), raw, strength)


@pytest.mark.parametrize(("mapped", "biased", "taps"), [(True, False, 4), (False, True, 3)])
def test_convolution(mapped, biased, taps):
    """Rows of no more tokens than the state has, and of more, all at once and token by token: the same bits
    where the references' are."""
    channels, wide = 20, noise(9, 50)
    columns = torch.randperm(50, generator=torch.Generator().manual_seed(3))[:channels].int() if mapped else None
    inputs = wide if mapped else wide[:, 7 : 7 + channels]
    weight, bias = noise(channels, taps, seed=1), noise(channels, seed=2) if biased else None
    slots, ends, kept = torch.tensor([3, 1, 2]), torch.tensor([0, 1, 3, 9]), noise(4, taps - 1, channels, seed=4)
    rows = torch.tensor([0, 1, 1, 2, 2, 2, 2, 2, 2], dtype=torch.int32)
    expected, states = kept.clone(), kept.clone()
    out = causal_conv_reference(inputs, columns, weight, bias, expected, slots, ends)
    for keep in (False, True):
        close(causal_conv(inputs, columns, weight, bias, states, slots, ends, rows, keep=keep), out)
        assert torch.equal(states, expected if keep else kept)
    for take in (causal_conv_step, causal_conv_reference):
        states = kept.clone()
        for place in range(6):
            here = [row for row in range(3) if ends[row] + place < ends[row + 1]]
            at = ends[here] + place
            close(take(inputs[at], columns, weight, bias, states, slots[here]), out[at])
        assert torch.equal(states, expected)


@pytest.mark.parametrize(
    ("shape", "together"), [(GatedDeltaShape(2, 4, 12, 6), True), (GatedDeltaShape(1, 3, 32, 130), False)]
)
def test_decode(shape, together):
    heads, qkv, inputs = heads_of(shape, together), noise(3, shape.convolved, seed=4), noise(3, 30, seed=5)
    slots = torch.tensor([4, 1, 2])
    states = noise(5, shape.value_heads, shape.value_dim, shape.key_dim, seed=6)
    expected_states = states.clone()
    expected = gdn_decode_reference(qkv, inputs, heads, shape, expected_states, slots)
    close(gdn_decode(qkv, inputs, heads, shape, states, slots), expected)
    close(states, expected_states)


def test_prefill_is_decode_token_by_token():
    """Rows that begin on, before and behind ends of chunks: both kernels and both references agree."""
    shape = GatedDeltaShape(1, 2, 16, 20)
    heads, qkv, inputs = heads_of(shape, True), noise(57, shape.convolved, seed=4), noise(57, 30, seed=5)
    slots, ends = torch.tensor([2, 3, 1]), torch.tensor([0, 40, 41, 57])
    rows = slots, ends, torch.tensor([0, 15, 30])
    kept = noise(4, shape.value_heads, shape.value_dim, shape.key_dim, seed=6)
    stepped, states = kept.clone(), kept.clone()
    expected = gdn_decode_reference(qkv, inputs, heads, shape, stepped, slots, ends)
    close(gdn_decode(qkv, inputs, heads, shape, states, slots, ends, keep=False), expected)
    assert torch.equal(states, kept)
    close(gdn_decode(qkv, inputs, heads, shape, states, slots, ends), expected)
    close(states, stepped)
    for prefill, most in ((gdn_prefill_reference, ()), (gdn_prefill, (3,))):
        states = kept.clone()
        close(prefill(qkv, inputs, heads, shape, states, *rows, *most, chunk=16), expected)
        close(states, stepped)
        assert torch.equal(states[0], kept[0])


def test_equal_keys_that_never_decay():
    """A chunk whose system has ones everywhere below its diagonal, which powers of it would not survive."""
    shape = GatedDeltaShape(1, 1, 16, 16)
    heads = GatedDeltaHeads(torch.tensor([-20.0]), torch.zeros(1), HeadColumns(0, 1), HeadColumns(1, 1))
    qkv, inputs = noise(64, shape.convolved, seed=4), torch.tensor([0.0, 30.0]).repeat(64, 1)
    qkv[:, 16:32] = qkv[0, 16:32]
    rows, (expected_states, states) = (torch.tensor([1]), torch.tensor([0, 64])), torch.zeros(2, 2, 1, 16, 16)
    expected = gdn_decode_reference(qkv, inputs, heads, shape, expected_states, *rows)
    close(gdn_prefill(qkv, inputs, heads, shape, states, *rows, torch.zeros(1, dtype=torch.int64), 1), expected)


def test_chunks_end_where_states_are_kept():
    """Who goes on from a state at a chunk's end computes the same bits, whatever came with it."""
    shape = GatedDeltaShape(1, 2, 8, 8)
    heads, qkv, inputs = heads_of(shape, False), noise(40, shape.convolved, seed=4), noise(40, 30, seed=5)
    whole, parts = torch.zeros(2, 2, shape.value_heads, shape.value_dim, shape.key_dim)
    slot, at = torch.tensor([1]), torch.tensor
    expected = gdn_prefill_reference(qkv, inputs, heads, shape, whole, slot, at([0, 40]), at([0]), 16)
    out = [
        gdn_prefill_reference(qkv[a:b], inputs[a:b], heads, shape, parts, slot, at([0, b - a]), at([a]), 16)
        for a, b in ((0, 16), (16, 40))
    ]
    assert torch.equal(torch.cat(out), expected) and torch.equal(parts, whole)


@pytest.mark.parametrize("shape", [GatedDeltaShape(2, 6, 4, 12)])
def test_gate(shape):
    x, inputs, weight = noise(2, shape.outputs), noise(2, 90, seed=1) * 3, noise(12, seed=2)
    for columns in (HeadColumns(5, 40), HeadColumns(7, shape.shared * 12)):
        close(
            gdn_gate(x, inputs, columns, weight, 1e-5, shape),
            gdn_gate_reference(x, inputs, columns, weight, 1e-5, shape),
        )


def test_experts():
    """One that nobody chose, one that more rows chose than a tile has, widths that no tile divides."""
    chosen = torch.stack([torch.arange(20) % 3 // 2 * 3, torch.full((20,), 1)], dim=1)
    rows, x = ExpertRows.of(chosen, 4), noise(20, 24)
    gate_up, down = noise(4 * 2 * 20, 24, seed=1), noise(4 * 24, 20, seed=2)
    inner = expert_gate_up_reference(x, gate_up, rows)
    close(expert_gate_up(x, gate_up, rows), inner)
    close(expert_down(inner, down, rows), expert_down_reference(inner, down, rows))
    assert rows.starts_X1.tolist() == [0, 14, 34, 34, 40]
    logits = noise(3, 12) * 3
    logits[1] = 0.25
    for normed in (True, False):
        chosen, weights = expert_gate(logits, 5, normed, 1.5)
        expected, shares = expert_gate_reference(logits, 5, normed, 1.5)
        assert torch.equal(chosen, expected) and chosen[1].tolist() == [0, 1, 2, 3, 4]
        close(weights, shares)
