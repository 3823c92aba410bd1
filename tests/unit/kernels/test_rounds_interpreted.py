"""Rounds of speculation on the device end to end, interpreted: same tokens as plain decoding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random


def device_engine(folder, drafter, **fields):
    settings = dspark(drafter, **fields.pop("dspark", {}))
    return make_engine(
        folder, page_size=4, burst=3, attention="triton", loop="overlapped", max_running=4, dspark=settings, **fields
    )


def work():
    return [
        ask("greedy", prompt(9), max_new=7),
        ask("group", prompt(10), n=2, max_new=5, temperature=1.0, seed=3),
        ask("stop", prompt(3, 40), max_new=6, temperature=0.7, top_k=5, seed=4, stop_ids=list(range(0, 512, 20))),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        dict(least=1, mode="compact"),
        *(pytest.param(dict(mode=m), marks=pytest.mark.slow) for m in ("static", "cap_accept")),
    ],
)
def test_coupled_rounds_equal_plain_steps(t_full, tmp_path, fields):
    engine = device_engine(t_full, save_random(tmp_path / "d0"), dspark=fields)
    plain = make_engine(t_full, page_size=4)
    for one, other in zip(engine.generate(work()), plain.generate(work()), strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.ids.tolist() == b.ids.tolist(), one.group_id
            assert a.finish == b.finish
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    engine.check()
    counters = engine.draft_counters()
    assert engine.counters.device_rounds > 2 and engine.counters.serial_rounds == 0
    assert counters["draft_verified"] > 3
