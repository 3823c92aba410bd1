"""Gated delta nets on a CUDA device: kernels against their references, captured steps against plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
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
from engine.kernels.state_copy import StateAddresses, copy_on_grid, copy_on_grid_reference
from engine.layers.causal_conv_reference import causal_conv_reference
from engine.layers.gated_delta import grouped_columns
from engine.layers.gated_delta_reference import (
    GatedDeltaHeads,
    GatedDeltaShape,
    HeadColumns,
    gdn_decode_reference,
    gdn_gate_reference,
    gdn_prefill_reference,
)
from tests.oracle.test_generate_hybrid import GATED_DELTA
from tests.support import ask, make_engine, prompt, save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [GatedDeltaShape(16, 32, 128, 128), GatedDeltaShape(2, 6, 64, 96)]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert float(difference) < TOLERANCE[dtype], float(difference)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPES[0], torch.bfloat16), (SHAPES[1], torch.bfloat16), (SHAPES[1], torch.float32)], ids=str
)
def test_layer(shape, dtype):
    """Rows that begin on, before and behind ends of chunks, from one product as checkpoints order it."""
    torch.manual_seed(0)
    shared, columns = shape.shared, grouped_columns(shape).cuda()
    group = 2 * shape.key_dim + 2 * shared * shape.value_dim
    end = group * shape.key_heads
    raw, strength = HeadColumns(end + shared, 2 * shared), HeadColumns(end, 2 * shared)
    heads = GatedDeltaHeads(torch.rand(shape.value_heads, device="cuda"), noise(shape.value_heads), raw, strength)
    inputs, weight = noise(333, end + 2 * shape.value_heads, dtype=dtype), noise(shape.convolved, 4, dtype=dtype)
    slots, ends = torch.tensor([3, 1, 7], device="cuda"), torch.tensor([0, 200, 201, 333], device="cuda")
    rows_T = torch.repeat_interleave(torch.arange(3, device="cuda"), ends.diff())
    kept = noise(8, 3, shape.convolved, dtype=dtype)
    states, expected_states = kept.clone(), kept.clone()
    expected = causal_conv_reference(inputs, columns, weight, None, expected_states, slots, ends)
    qkv = causal_conv(inputs, columns, weight, None, states, slots, ends, rows_T)
    check(qkv, expected, dtype)
    assert torch.equal(states, expected_states)
    first = causal_conv_step(inputs[[0, 200, 201]], columns, weight, None, kept, slots)
    assert torch.equal(first, qkv[[0, 200, 201]])

    before = noise(8, shape.value_heads, shape.value_dim, shape.key_dim)
    where = slots, ends, torch.tensor([0, 63, 100], device="cuda")
    stepped, states, expected_states = before.clone(), before.clone(), before.clone()
    expected = gdn_prefill_reference(qkv.float(), inputs.float(), heads, shape, expected_states, *where)
    out = gdn_prefill(qkv, inputs, heads, shape, states, *where, 4)
    check(out, expected, dtype)
    check(states, expected_states, dtype)
    check(gdn_decode(qkv, inputs, heads, shape, stepped, slots, ends), expected, dtype)
    check(stepped, expected_states, torch.float32)
    states, expected_states = before.clone(), before.clone()
    expected = gdn_decode_reference(qkv[:3], inputs[:3], heads, shape, expected_states, slots)
    check(gdn_decode(qkv[:3], inputs[:3], heads, shape, states, slots), expected, dtype)
    check(states, expected_states, torch.float32)
    gate, norm = HeadColumns(group - shared * shape.value_dim, group), noise(shape.value_dim, dtype=dtype)
    expected = gdn_gate_reference(out, inputs, gate, norm, 1e-6, shape)
    check(gdn_gate(out, inputs, gate, norm, 1e-6, shape), expected, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tokens", [1, 33, 900])
def test_experts(tokens, dtype):
    torch.manual_seed(0)
    logits, x = noise(tokens, 64), noise(tokens, 512, dtype=dtype)
    chosen, weights = expert_gate(logits, 10, True, 1.0)
    expected, shares = expert_gate_reference(logits, 10, True, 1.0)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, shares)
    gate_up, down = noise(64 * 2 * 192, 512, dtype=dtype) * 0.05, noise(64 * 512, 192, dtype=dtype) * 0.05
    rows = ExpertRows.of(chosen, 64)
    inner = expert_gate_up_reference(x, gate_up, rows)
    check(expert_gate_up(x, gate_up, rows), inner, dtype)
    check(expert_down(inner, down, rows), expert_down_reference(inner, down, rows), dtype)


def test_copies_on_the_grid():
    tensors = [noise(6, 3, 500, dtype=torch.bfloat16), noise(6, 4, 64, 64)]
    expected = [tensor.clone() for tensor in tensors]
    lengths = torch.tensor([64, 65, 0, 128], device="cuda", dtype=torch.int32)
    live, partners = torch.tensor([1, 2, 0, 3], device="cuda"), torch.tensor([4, 4, 4, 5], device="cuda")
    copy_on_grid_reference(expected, lengths, live, partners, 64)
    copy_on_grid(StateAddresses(tensors), lengths, live, partners, 64)
    assert all(torch.equal(one, other) for one, other in zip(tensors, expected, strict=True))


def test_captured_steps_equal_the_serial_loop(tmp_path):
    """Turns that go on from states which captured steps have kept, forks, rows that only the host ends."""
    folder = save_tiny(tmp_path, kind="qwen3_next", **(GATED_DELTA | {"linear_key_head_dim": 16}))
    fields = dict(page_size=16, kv_tokens=8192, max_running=16, prefill_tokens=128)
    fast = make_engine(folder, device="cuda", loop="overlapped", burst=8, **fields)
    plain = make_engine(folder, device="cpu", **fields)
    turn = prompt(70)
    for number in range(2):
        work = [
            ask("twins", turn, n=3, max_new=66, temperature=1.0, seed=number),
            ask("host", prompt(3, 40), max_new=30, seed=4, stop_ids=list(range(0, 512, 3))),
            *(ask(f"row-{row}", prompt(5 + 17 * row, row), max_new=10 + row) for row in range(6)),
        ]
        for one, other in zip(fast.generate(work), plain.generate(work), strict=True):
            assert one.hit.usable == other.hit.usable, one.group_id
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist(), one.group_id
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-3)
            if one.group_id == "twins":
                following = np.concatenate([turn, one.samples[0].ids, prompt(2, 300)])
        turn = following
    assert fast.counters.graph_captures > 0 and fast.counters.graph_eager_steps == 0
    fast.check()
