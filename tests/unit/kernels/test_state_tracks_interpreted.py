"""Captured steps of recurrent models, launch by launch in the interpreter: tokens, states and what the cache is told
of them are those of plain steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.state_copy import StateAddresses, copy_on_grid, copy_on_grid_reference
from engine.runner.step_plan import StepPlan
from tests.support import ask, make_engine, prompt, save_tiny


def test_states_on_the_grid_are_copied():
    kept = [torch.randn(6, 3, 5), torch.randn(6, 70, 50).bfloat16()]
    lengths = torch.tensor([8, 9, 0, 16], dtype=torch.int32)
    live, partners = torch.tensor([1, 2, 0, 3]), torch.tensor([4, 4, 4, 5])
    expected, copied = ([tensor.clone() for tensor in kept] for _ in range(2))
    copy_on_grid_reference(expected, lengths, live, partners, 8)
    copy_on_grid(StateAddresses(copied), lengths, live, partners, 8)
    for one, other, before in zip(copied, expected, kept, strict=True):
        assert torch.equal(one, other) and torch.equal(one[5], before[3]) and torch.equal(one[4], before[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_steps_equal_plain_ones(kind, tmp_path):
    """Rows that end at different times, twins, a row that only the host ends, and turns that go on from what was
    kept: bursts reach over ends of pages, so that states are kept on the device."""
    shape = {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}
    if kind == "qwen3_next":
        shape = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0}
        shape |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
        shape |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    folder = save_tiny(tmp_path, kind=kind, **shape)
    page = 4 if kind == "lfm2" else 64
    fields = dict(page_size=page, burst=3, max_running=5)
    device = make_engine(folder, attention="triton", loop="overlapped", **fields)
    plain = make_engine(folder, **fields)
    launch = device._loop._stepper._captured.launch
    device._loop._stepper._captured.launch = lambda plan: launch(StepPlan.decode(plan.encode()))
    long = prompt(page + 1)
    for turn in range(2):
        work = [
            ask("twins", long, n=2, max_new=7, temperature=1.0, seed=3),
            ask("host", prompt(3, 40), max_new=5, seed=4, stop_ids=list(range(0, 512, 3))),
            ask("short", prompt(2, 90), max_new=2),
        ]
        fast, reference = device.generate(work), plain.generate(work)
        for one, other in zip(fast, reference, strict=True):
            assert one.hit.usable == other.hit.usable, one.group_id
            for a, b in zip(one.samples, other.samples, strict=True):
                assert a.ids.tolist() == b.ids.tolist(), one.group_id
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)
        long = np.concatenate([long, fast[0].samples[0].ids, prompt(1, 300 + turn)])
    assert device.counters.graph_captures > 0 and fast[0].hit.usable >= page
    device.check()
