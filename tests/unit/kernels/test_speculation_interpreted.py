"""Speculation over the fused path, interpreted: verify rows and the layers that a drafter reads."""

import numpy as np
import pytest

from engine.runner import prefill_graphs
from engine.runner.prefill_graphs import PrefillGraphs
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random


@pytest.mark.parametrize("buffers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_rows_of_the_fused_path_equal_plain_ones(t_full, tmp_path, monkeypatch, buffers):
    monkeypatch.setattr(prefill_graphs, "USES_BEFORE_CAPTURE", 0)
    drafter = save_random(tmp_path / "d0")
    engine = make_engine(t_full, attention="triton", dspark=dspark(drafter), max_running=4, prefill_tokens=32)
    runner, pages = engine._parts.runner, engine._parts.pages
    used = []
    if buffers:
        runner.prefill_graphs = PrefillGraphs(
            runner.model.spec,
            runner.fused,
            runner.attention,
            pages.pool,
            32,
            pages.table.pages_SP.shape[1],
            engine.counters,
            engine._parts.speculation.captured_layers,
        )
        hidden = runner.prefill_graphs.hidden
        runner.prefill_graphs.hidden = lambda *inputs: used.append(hidden(*inputs)) or used[-1]
    work = [ask("a", prompt(6), max_new=4), ask("b", prompt(5, 40), temperature=0.8, seed=3, max_new=3)]
    plain = make_engine(t_full).generate(work)
    for group, other in zip(engine.generate(work), plain, strict=True):
        assert group.samples[0].ids.tolist() == other.samples[0].ids.tolist()
        np.testing.assert_allclose(group.samples[0].logprobs, other.samples[0].logprobs, atol=1e-4)
    engine.check()
    assert engine.draft_counters()["draft_verified"] > 2
    assert not buffers or (len(used) > 2 and all(value is not None for value in used))
