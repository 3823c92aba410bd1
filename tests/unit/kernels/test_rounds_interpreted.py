"""Rounds of speculation on the device end to end, interpreted: the serial loop's tokens, and plain ones where
the rule promises them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.round_log import logged, read
from engine import Want
from engine.dspark.cost_model import StepShape
from engine.dspark.graph_choice import GraphChoice
from engine.loops import seed_step_times
from engine.runner.round_plan import RoundPlan
from tests.support import ask, make_engine, prompt, reference_logprobs
from tests.unit.dspark.served import dspark, save_random, timeless

slow = pytest.mark.slow
REPEATED = np.tile(prompt(4, 30), 3)


def device_engine(folder, drafter, **fields):
    return make_engine(
        folder,
        page_size=4,
        burst=3,
        attention="triton",
        loop="overlapped",
        max_running=4,
        dspark=dspark(drafter, **fields),
    )


def work(most: int):
    stops = list(range(0, 512, 20))
    return [
        ask("greedy", prompt(9), max_new=most),
        ask("group", prompt(10), n=2, max_new=most, temperature=1.0, seed=3),
        ask("cut", prompt(3, 40), max_new=most, temperature=0.7, top_k=5, top_p=0.9, seed=4, stop_ids=stops),
        ask("edited", REPEATED, max_new=most, temperature=1.2, seed=5, logit_bias={7: 3.0}, min_new=3, stop_ids=stops),
    ]


def repetitive(most: int):
    """What an n-gram drafter finds drafts for, often right and sometimes wrong."""
    return [
        ask("same", REPEATED, max_new=most, temperature=0.9, seed=1, logit_bias={7: 12.0}),
        ask("greedy", REPEATED, max_new=most, logit_bias={7: 30.0}),
        ask("plain", REPEATED, max_new=most, temperature=1.0, seed=2),
    ]


def assert_same(device, expected, but: int = 0) -> None:
    """All but the last `but` tokens of each sample are."""
    for one, other in zip(device, expected, strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            sure = slice(len(b.ids) - but)
            assert len(a.ids) == len(b.ids) and a.ids[sure].tolist() == b.ids[sure].tolist(), one.group_id
            assert a.finish == b.finish
            np.testing.assert_allclose(a.logprobs[sure], b.logprobs[sure], atol=1e-4)
            for name, column in b.extra_logprobs.items():
                np.testing.assert_allclose(a.extra_logprobs[name][sure], column[sure], atol=1e-4)
            if b.entropy is not None:
                np.testing.assert_allclose(a.entropy[sure], b.entropy[sure], atol=1e-4)
            if b.top_ids is not None:
                assert (np.sort(a.top_ids, -1)[sure] == np.sort(b.top_ids, -1)[sure]).all(), one.group_id
                np.testing.assert_allclose(a.top_logprobs[sure], b.top_logprobs[sure], atol=1e-4)


@pytest.mark.parametrize(
    ("drafter", "mode"),
    [
        pytest.param("block", "compact", marks=slow),
        pytest.param("block", "static", marks=slow),
        pytest.param("block", "cap_accept", marks=slow),
        pytest.param("ngram", "static", marks=slow),
    ],
)
def test_coupled_rounds_equal_plain_steps(t_full, tmp_path, drafter, mode):
    folder = save_random(tmp_path / "d0") if drafter == "block" else drafter
    engine = device_engine(t_full, folder, mode=mode, least=1, probe_every=1)
    requests = work(6) if drafter == "block" else repetitive(9)
    assert_same(engine.generate(requests), make_engine(t_full, page_size=4).generate(requests))
    engine.check()
    counters = engine.draft_counters()
    assert engine.counters.device_rounds > (2 if drafter == "block" else 0) and engine.counters.serial_rounds == 0
    assert counters["draft_verified"] > 3


@pytest.fixture
def only_windows(monkeypatch):
    """Planners that give all rows the same windows."""
    reachable = GraphChoice._reachable

    def allow(*windows):
        def even(*given):
            found = reachable(*given)
            return found[np.isin(found[:, 4], windows)]

        monkeypatch.setattr(GraphChoice, "_reachable", even)
        monkeypatch.setattr(GraphChoice, "_ready", lambda *_: np.empty((0, 5), dtype=np.int64))

    return allow


def windows_of(engine):
    return {key.window for key in engine._loop._rounds._stepper._captured}


@pytest.mark.parametrize(("window", "most"), [(1, 4), pytest.param(3, 6, marks=slow)])
def test_windows_of_all_rows_equal_plain_steps(t_full, tmp_path, only_windows, window, most):
    only_windows(window)
    engine = device_engine(t_full, save_random(tmp_path / "d0"), mode="compact", least=1, probe_every=1)
    timeless(engine)
    assert_same(engine.generate(work(most)), make_engine(t_full, page_size=4).generate(work(most)))
    engine.check()
    assert windows_of(engine) == {window} and engine.draft_counters()["draft_verified"] > 3


def rejecting(folder, drafter, requests, but: int = 0, **fields):
    """A device engine and a serial one that verify the same drafts: whole windows in every round. Nothing is drafted
    for a sample's last token, which is a plain step's or a round's as it happens: `but` says whether to look."""
    replies = []
    for engine in (
        device_engine(folder, drafter, rule="rejection", **fields),
        make_engine(folder, page_size=4, dspark=dspark(drafter, rule="rejection", **fields)),
    ):
        replies.append((engine.generate(requests()), engine))
    (device, engine), (serial, other) = replies
    assert_same(device, serial, but)
    engine.check()
    assert engine.counters.device_rounds > 1 and engine.counters.serial_rounds == 0
    mine, theirs = engine.draft_counters(), other.draft_counters()
    for name in ("verified", "accepted") if but else ("verified", "accepted", "emitted", "steps"):
        assert mine[f"draft_{name}"] == theirs[f"draft_{name}"], name
    return mine


def test_rejection_on_the_device_is_that_of_the_serial_loop(t_full, tmp_path):
    """Drafts, verdicts, replacements and log-probabilities alike, as both key their noise alike."""

    def requests():
        return [ask("a", prompt(6), max_new=5, temperature=1.0, seed=3)]

    assert rejecting(t_full, save_random(tmp_path / "d0"), requests)["draft_verified"] > 3


def test_rejection_of_windows_of_all_rows_is_that_of_a_drafter_of_such_windows(t_full, tmp_path, only_windows):
    only_windows(3)
    drafter, request = (
        save_random(tmp_path / "d0", block_size=3),
        ask("a", prompt(6), max_new=5, temperature=1.0, seed=3),
    )
    device = device_engine(t_full, drafter, rule="rejection", mode="compact", least=3, probe_every=1)
    timeless(device)
    serial = make_engine(t_full, page_size=4, dspark=dspark(drafter, rule="rejection", mode="static"))
    assert_same(device.generate([request]), serial.generate([request]))
    device.check()
    assert windows_of(device) == {3}
    for name in ("verified", "accepted", "emitted", "steps"):
        assert device.draft_counters()[f"draft_{name}"] == serial.draft_counters()[f"draft_{name}"] > 0, name


@slow
@pytest.mark.timeout(600)
def test_rejection_of_rows_that_ask_for_more(t_full, tmp_path):
    def requests():
        every = Want(logprobs="temperature", extra_logprobs=["raw", "processed"], entropy=True, top_logprobs=4)
        return [*work(5), ask("every", REPEATED, max_new=5, temperature=0.8, seed=2, want=every)]

    assert rejecting(t_full, save_random(tmp_path / "d0"), requests)["draft_verified"] > 5


@slow
def test_rejection_of_drafts_without_probabilities(t_full):
    """Which steps are rounds decides what is drawn, so greedy ids and every log-probability are what is promised."""
    engine = device_engine(t_full, "ngram", rule="rejection", probe_every=1)
    requests = [
        ask("greedy", REPEATED, max_new=8, logit_bias={7: 30.0}),
        ask("a", REPEATED, max_new=8, temperature=0.6),
    ]
    greedy, sampled = engine.generate(requests)
    (plain,) = make_engine(t_full, page_size=4).generate(requests[:1])
    assert greedy.samples[0].ids.tolist() == plain.samples[0].ids.tolist()
    whole = [*REPEATED, *sampled.samples[0].ids]
    expected = reference_logprobs(t_full, whole, 0.6)[len(REPEATED) :]
    np.testing.assert_allclose(sampled.samples[0].logprobs, expected, atol=1e-4)
    assert engine.counters.device_rounds > 0 and engine.draft_counters()["draft_accepted"] > 2
    engine.check()


@slow
@pytest.mark.timeout(400)
def assert_larger_graphs_serve(stepper):
    """A plan that may have no graph made for it runs as the least that has room; else its own is made."""
    drafts, (tier, verify, *_) = stepper._parts.drafts, max(stepper.ready(1))
    assert tier == 2 and (1, verify, 1) not in {key[:3] for key in stepper._captured}
    plan = RoundPlan(
        slots=[-1], rounds=1, verify=verify, budget=1, most=[1], least=[0], room=[0], modes=stepper._kind[0],
        page_tables_BP=np.zeros((1, 1), np.int32), survival_BG=np.zeros((1, drafts)), capture=False,
    )  # fmt: skip
    made = set(stepper._captured)
    _, key = stepper._ready(plan)
    assert set(stepper._captured) == made and key[0] == 2 and key[1] >= verify and key[2] >= 1
    _, own = stepper._ready(replace(plan, capture=True))
    assert own[0] == 1 and own[1] == verify and own not in made


def test_a_sweep_seeds_step_times_and_leaves_nothing_behind(t_full, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.runner.round_sweep._CONTEXT", 9)
    fields = dict(mode="compact", sweep_seconds=600.0, drafts=3)
    engine = device_engine(t_full, save_random(tmp_path / "d0"), **fields)
    loop, speculation, plans = engine._loop, engine._parts.speculation, []
    stepper = loop._rounds._stepper
    run = stepper.run
    stepper.run = lambda plan, samples: plans.append((plan.slots, plan.budget, plan.most)) or run(plan, samples)
    seed_step_times(engine._parts, speculation, loop._table, stepper, loop._stepper, 2)
    assert plans[::2] == plans[1::2], "what is timed is what went before it"
    # Two rows and one: without drafts, with one a row, with one of each, with all; two and the last behind short
    # contexts too.
    assert speculation.cost.observed == 14
    # One row may also run as what two were measured with, but for windows of all rows.
    assert set(stepper.ready(1)) == {(1, 2, 2, 0), (1, 2, 0, 1), (1, 4, 0, 3), (2, 4, 4, 0)}
    assert set(stepper.ready(2)) == {(2, 4, 4, 0), (2, 4, 0, 1), (2, 8, 0, 3)}
    predicted = speculation.cost.predict([StepShape(2, 2, False), StepShape(2, 8, True)])
    assert 0 < predicted[0] < predicted[1]
    assert_larger_graphs_serve(loop._rounds._stepper)
    timeless(engine)
    requests = [ask("greedy", prompt(9), max_new=4), ask("drawn", prompt(6), max_new=4, temperature=1.0, seed=3)]
    assert_same(engine.generate(requests), make_engine(t_full, page_size=4).generate(requests))
    engine.check()


@slow
def test_a_log_of_rounds_accounts_for_all_tokens(t_full, tmp_path):
    engine = device_engine(t_full, save_random(tmp_path / "d0"), mode="compact", least=1, probe_every=1)
    timeless(engine)
    with logged(tmp_path / "log.jsonl.gz"):
        groups = engine.generate([ask("a", prompt(9), max_new=9), ask("b", prompt(5, 40), max_new=7)])
    events = read(tmp_path / "log.jsonl.gz")
    came = [event for event in events if event["event"] == "came"]
    launched = sum(event["steps"] for event in events if event["event"] == "rounds")
    assert launched == sum(event["steps"] for event in came) == engine.counters.device_rounds > 0
    tokens = sum(event["tokens"] * event["steps"] for event in came)
    said = sum(len(sample.ids) for group in groups for sample in group.samples)
    assert 0 < tokens <= said and tokens == pytest.approx(round(tokens), abs=0.05)
