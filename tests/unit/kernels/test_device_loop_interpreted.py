"""The device-resident loop end to end in interpreted kernels: same tokens as transformers."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine, Want
from engine.attention import decode_metadata
from engine.kernels import decode_pieces
from engine.runner.step_plan import StepPlan
from tests.support import ask, assert_sample_is_reference, make_engine, prompt, update


def device_engine(folder, **fields) -> Engine:
    return make_engine(folder, page_size=4, burst=3, attention="triton", loop="overlapped", max_running=6, **fields)


@pytest.mark.parametrize("model", ["t_full", pytest.param("t_qwen3", marks=pytest.mark.slow)])
def test_steps_equal_plain_ones(model, request):
    folder = request.getfixturevalue(model)
    device = device_engine(folder)
    stepper = device._loop._stepper
    launch = stepper.launch
    stepper.launch = lambda plan: launch(StepPlan.decode(plan.encode()))
    plain = make_engine(folder, page_size=4)
    work = [
        ask("greedy", prompt(9), max_new=3),
        ask("group", prompt(10), n=2, max_new=3, temperature=1.0, seed=3),
        ask("stop", prompt(3, 40), max_new=4, temperature=0.7, top_k=5, seed=4, stop_ids=list(range(0, 512, 20))),
    ]
    fast, reference = device.generate(work), plain.generate(work)
    assert_sample_is_reference(folder, prompt(9), fast[0].samples[0], 3)
    for one, other in zip(fast, reference, strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.ids.tolist() == b.ids.tolist(), one.group_id
            assert a.finish == b.finish
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert device.counters.graph_captures > 0
    assert 0 < device.counters.graph_rows <= device.counters.graph_padded_rows
    device.check()


@pytest.mark.slow
def test_deterministic_steps_share_prefixes_and_equal_plain_ones(t_full, monkeypatch):
    """A group that grows from two pieces, small here, to three, read together and then apart: the same tokens as
    without the device, and the same log-probabilities either way."""
    for module in (decode_pieces, decode_metadata):
        monkeypatch.setattr(module, "SHORT", 16)
    monkeypatch.setattr(decode_pieces, "LONG", 64)
    monkeypatch.setattr(decode_pieces, "LONG_FROM", 64)
    work = [ask("group", prompt(46), n=2, max_new=4, temperature=1.0, seed=3)]

    def generate(least: int):
        monkeypatch.setattr(decode_metadata, "MIN_SAVED_BYTES", least)
        monkeypatch.setattr(decode_metadata, "MIN_SAVED_SEGMENT_BYTES", least)
        engine = device_engine(t_full, deterministic=True)
        listed = []
        launch = engine._loop._stepper.launch
        engine._loop._stepper.launch = lambda plan: listed.append(len(plan.prefixes)) or launch(plan)
        (reply,) = engine.generate(work)
        engine.check()
        return reply.samples, max(listed)

    (together, some), (apart, none) = generate(1), generate(1 << 40)
    assert some and not none
    (plain,) = make_engine(t_full, page_size=4).generate(work)
    for a, b, c in zip(together, apart, plain.samples, strict=True):
        assert a.ids.tolist() == b.ids.tolist() == c.ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
        np.testing.assert_allclose(a.logprobs, c.logprobs, atol=1e-4)


def test_rows_that_ask_for_more_equal_plain_ones(t_full):
    """Edits, alternatives and entropy of every definition, beside a row that asks for nothing."""
    every = Want(logprobs="temperature", extra_logprobs=["raw", "processed"], top_logprobs=3, entropy=True)
    edits = dict(repetition_penalty=1.6, frequency_penalty=0.4, logit_bias={7: 2.5}, min_new=3, stop_ids=[1, 2, 7])
    work = [
        ask("edits", prompt(5), max_new=4, temperature=0.9, seed=2, want=every, **edits),
        ask("plain", prompt(6), max_new=2),
    ]
    device = device_engine(t_full)
    for one, other in zip(device.generate(work), make_engine(t_full).generate(work), strict=True):
        (a,), (b,) = one.samples, other.samples
        assert a.ids.tolist() == b.ids.tolist() and a.finish == b.finish
        for name in ("logprobs", "entropy", "top_logprobs"):
            if getattr(b, name) is not None:
                np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-4)
        for name, column in b.extra_logprobs.items():
            np.testing.assert_allclose(a.extra_logprobs[name], column, atol=1e-4)
        assert b.top_ids is None or a.top_ids.tolist() == b.top_ids.tolist()
    assert {modes.extra for _, _, modes, _ in device._loop._stepper._captured} == {True}
    device.check()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["offload", "discard"])
def test_case_m1_steps_after_memory_was_released(t_qwen3, level):
    """Captured steps read the storage that came back, where it was before."""
    engine = device_engine(t_qwen3)
    for version in (1, 2):
        engine.generate([ask("g", prompt(9), max_new=3)])
        captures = engine.counters.graph_captures
        engine.release_memory(["weights", "kv"], level)
        engine.resume_memory(["weights", "kv"])
        engine._parts.runner.kv_pool.fill(float("nan"))
        if level == "discard":
            update(engine, t_qwen3, version)
        (after,) = engine.generate([ask("g", prompt(9), max_new=3)])
        assert_sample_is_reference(t_qwen3, prompt(9), after.samples[0], 3)
        assert engine.counters.graph_captures == captures
    engine.check()
