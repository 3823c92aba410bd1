"""Rounds of speculation on a GPU: captured, launched ahead, and equal to decoding without drafts."""

import numpy as np
import pytest
import torch

from engine.dspark.graph_choice import GraphChoice
from engine.dspark.planner import Planner
from lora.config import AdapterConfig
from tests.gpu.test_engine_gpu import assert_equal, work
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random, timeless
from tests.unit.engine.lora_cases import ask_with, save_adapter
from tests.unit.engine.test_device_rows import assert_equal as assert_all_columns
from tests.unit.engine.test_device_rows import work as mixed_work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIELDS = dict(
    device="cuda",
    attention="triton",
    page_size=16,
    kv_tokens=16384,
    max_running=32,
    prefill_tokens=128,
    adapters=AdapterConfig(max_rank=96),
)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("rounds") / "d0")


def speculating(folder, drafter, loop="overlapped", **fields):
    return make_engine(folder, loop=loop, burst=8, dspark=dspark(drafter, **fields), **FIELDS)


@pytest.mark.parametrize("mode", ["static", "compact", "cap_accept"])
def test_coupled_rounds_equal_plain_steps(t_full, drafter, mode):
    engine = speculating(t_full, drafter, mode=mode, least=1)
    timeless(engine)
    plain = make_engine(t_full, loop="overlapped", burst=8, **FIELDS)
    engine._parts.pages.draft_pool.fill(float("nan"))
    expected = plain.generate(list(work()))
    for _ in range(2):  # the second turn replays what the first captured
        assert_equal(engine.generate(list(work())), expected)
    engine.check()
    assert engine.counters.device_rounds > 5 and engine.counters.serial_rounds == 0
    assert engine.counters.graph_eager_steps == 0 and engine.draft_counters()["draft_verified"] > 10


@pytest.mark.parametrize("window", [1, 3])
def test_windows_of_all_rows_equal_plain_steps(t_full, drafter, monkeypatch, window):
    reachable = GraphChoice._reachable
    monkeypatch.setattr(
        GraphChoice, "_reachable", lambda *given: (found := reachable(*given))[np.isin(found[:, 4], [0, window])]
    )
    choose = Planner._kept
    # The window of all rows wherever there is one.
    monkeypatch.setattr(
        Planner,
        "_kept",
        lambda planner, tiers, rates: len(rates) - 1 if len(rates) > 1 else choose(planner, tiers, rates),
    )
    engine = speculating(t_full, drafter, mode="compact", least=1)
    timeless(engine)
    expected = make_engine(t_full, loop="overlapped", burst=8, **FIELDS).generate(list(work()))
    for _ in range(2):
        assert_equal(engine.generate(list(work())), expected)
    engine.check()
    assert window in {key.window for key in engine._loop._rounds._stepper._captured}
    assert engine.counters.graph_eager_steps == 0 and engine.draft_counters()["draft_verified"] > 10


@pytest.fixture(scope="module")
def policies(t_full, tmp_path_factory):
    """Adapters of few ranks, of all ends, and of more ranks than ride along with other launches."""
    root, ends = tmp_path_factory.mktemp("policies"), ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    options = {"few": {}, "ends": dict(target_modules=ends), "many": dict(r=80)}
    return {name: save_adapter(t_full, root / name, seed, **more) for seed, (name, more) in enumerate(options.items())}


def of_policies(*names):
    """Requests of the base and of these adapters, alone and as groups, that end at different times."""
    for number, name in enumerate((None, *names, None, *names)):
        more = dict(n=1 + number % 3, max_new=9 + 4 * number, temperature=float(number % 2), seed=number)
        yield ask_with(name, str(number), prompt(6 + 5 * number, 20 * number), **more)


@pytest.mark.parametrize("mode", ["static", "compact"])
@pytest.mark.parametrize("names", [("few", "ends"), ("few", "many", "ends")])
def test_rounds_of_many_policies_equal_plain_steps(t_full, drafter, policies, mode, names):
    engine = speculating(t_full, drafter, mode=mode, least=1)
    timeless(engine)
    plain = make_engine(t_full, loop="overlapped", burst=8, **FIELDS)
    for name in names:
        for one in (engine, plain):
            one.adapters.register_folder(name, policies[name])
    expected = plain.generate(list(of_policies(*names)))
    for _ in range(2):
        assert_equal(engine.generate(list(of_policies(*names))), expected)
    assert_equal(engine.generate(list(work())), plain.generate(list(work())))
    engine.check()
    assert engine.counters.device_rounds > 5 and engine.counters.serial_rounds == 0
    assert engine.counters.graph_eager_steps == 0
    report = engine._parts.speculation.record.report()
    assert all(report.total("verified", adapter=name) > 0 for name in ("", *names))


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_penalties_and_columns_of_rounds_equal_those_of_plain_steps(t_full, drafter, mode):
    engine = speculating(t_full, drafter, mode=mode, least=1)
    timeless(engine)
    plain = make_engine(t_full, loop="overlapped", burst=8, **FIELDS)
    expected = plain.generate(list(mixed_work()))
    for _ in range(2):
        assert_all_columns(engine.generate(list(mixed_work())), expected)
    engine.check()
    assert engine.counters.device_rounds > 5 and engine.counters.serial_rounds == 0
    assert engine.counters.graph_eager_steps == 0 and engine.draft_counters()["draft_verified"] > 10


def test_rejection_rounds_equal_the_serial_loops(t_full, drafter):
    """Whole windows in every round, so that both loops judge the same drafts with the same noise; but the
    last token of a sample, which nothing is drafted for, is a plain step's or a round's as it happens."""
    fast, serial = (speculating(t_full, drafter, loop, rule="rejection") for loop in ("overlapped", "serial"))
    for group, other, asked in zip(fast.generate(list(work())), serial.generate(list(work())), work(), strict=True):
        sure = asked.sampling.max_new - 1
        for a, b in zip(group.samples, other.samples, strict=True):
            assert a.ids[:sure].tolist() == b.ids[:sure].tolist(), group.group_id
            np.testing.assert_allclose(a.logprobs[:sure], b.logprobs[:sure], atol=2e-4)
    assert fast.draft_counters()["draft_accepted"] == serial.draft_counters()["draft_accepted"]
    assert fast.counters.device_rounds > 10
    fast.check()


def test_ngram_rounds_equal_plain_steps(t_full):
    engine = speculating(t_full, "ngram", probe_every=2)
    plain = make_engine(t_full, loop="overlapped", burst=8, **FIELDS)

    def texts():
        """Some that repeat themselves, with 7 likely to come again."""
        yield from list(work())[:4]
        for row in range(9):
            ids = np.tile(prompt(5, 20 * row), 3)
            often = dict(frequency_penalty=0.1 * row, repetition_penalty=1.0 + 0.02 * row)
            yield ask(f"again-{row}", ids, max_new=30, temperature=0.7, seed=row, logit_bias={7: 5.0 + row}, **often)

    assert_equal(engine.generate(list(texts())), plain.generate(list(texts())))
    assert engine.counters.device_rounds > 0 and engine.draft_counters()["draft_accepted"] > 0
    engine.check()


def test_rounds_after_a_sweep_of_step_times(t_full, drafter, tmp_path):
    """What is measured at the start stands in the rows and pages that requests get afterwards."""
    fields = dict(mode="compact", sweep_seconds=3.0, cost=tmp_path / "times.json")
    engine = speculating(t_full, drafter, **fields)
    assert engine._parts.speculation.cost.observed >= 3 and (tmp_path / "times.json").exists()
    timeless(engine)
    plain = make_engine(t_full, loop="overlapped", burst=8, **FIELDS)
    assert_equal(engine.generate(list(work())), plain.generate(list(work())))
    engine.check()
    assert speculating(t_full, drafter, **fields)._parts.speculation.cost.observed >= 3


def test_rounds_after_memory_was_released(t_full, drafter):
    """Graphs of rounds are dropped with the memory tag that holds them, and captured again."""
    engine = speculating(t_full, drafter)
    first = engine.generate(list(work()))
    held = engine.gauges().graphs_bytes
    engine.release_memory(["graphs"])
    assert engine.gauges().graphs_bytes < held
    engine.resume_memory(["graphs"])
    assert_equal(engine.generate(list(work())), first)
    assert np.isfinite(first[0].samples[0].logprobs).all()
    engine.check()
