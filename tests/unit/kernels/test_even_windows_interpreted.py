"""Rounds whose rows all have one window, interpreted, beside everything that rows may ask for: the coupled rule's
tokens are those of plain steps, and whole windows are counted as the serial loop counts them."""

from __future__ import annotations

import msgspec
import pytest
import torch

import engine.attention.decode_metadata as decode_metadata
from engine import Want
from engine.runner.round_stepper import RoundStepper
from engine.types import DraftWindow
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random, timeless
from tests.unit.engine.lora_cases import ask_with, save_adapter
from tests.unit.kernels.test_rounds_interpreted import REPEATED, assert_same, device_engine, only_windows, windows_of

__all__ = ["only_windows"]
PENALTIES = dict(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4)
EVERY = Want(logprobs="temperature", extra_logprobs=["raw", "processed"], entropy=True, top_logprobs=4)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("drafters") / "d0")


def even_engine(folder, drafter, least: int = 1, **fields):
    engine = device_engine(folder, drafter, mode="compact", least=least, probe_every=1, **fields)
    timeless(engine)
    return engine


def bounded(request, least: int = 0, most: int | None = None):
    return msgspec.structs.replace(request, draft_window=DraftWindow(least=least, most=most))


def check(engine, window, verified: int = 4):
    engine.check()
    assert windows_of(engine) == {window} and engine.counters.serial_rounds == 0
    assert engine.draft_counters()["draft_verified"] >= verified


@pytest.mark.parametrize("window", [1, 3])
def test_rows_that_ask_for_more(t_full, drafter, only_windows, window):
    """Penalties, biases, least lengths, alternatives and entropy, of several rows at once."""
    only_windows(window)
    asked = [
        ask("greedy", REPEATED, max_new=4, logit_bias={7: 40.0}, want=EVERY, frequency_penalty=1.5),
        ask("edited", REPEATED, max_new=5, seed=5, logit_bias={7: 9.0}, min_new=3, stop_ids=[7], **PENALTIES),
        ask("cut", prompt(5), max_new=4, temperature=0.8, top_p=0.9, seed=4, want=Want(top_logprobs=2), **PENALTIES),
        ask("plain", prompt(6), max_new=4, temperature=1.0, seed=2),
    ]
    engine = even_engine(t_full, drafter)
    assert_same(engine.generate(asked), make_engine(t_full, page_size=4).generate(asked))
    check(engine, window)


def test_rows_of_many_policies(t_full, drafter, only_windows, tmp_path):
    only_windows(3)
    options = {"ends": {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}, "linear": {"r": 9}}
    engines = even_engine(t_full, drafter), make_engine(t_full, page_size=4)
    for seed, (name, chosen) in enumerate(options.items()):
        folder = save_adapter(t_full, tmp_path / name, seed, **chosen)
        for engine in engines:
            engine.adapters.register_folder(name, folder)
    asked = [ask_with(None, "base", prompt(5), max_new=4), ask_with("ends", "ends", prompt(7), max_new=5, **PENALTIES)]
    asked.append(ask_with("linear", "group", prompt(9), n=2, max_new=4, temperature=1.0, seed=3))
    assert_same(*(engine.generate(asked) for engine in engines))
    check(engines[0], 3)
    captured = engines[0]._loop._rounds._stepper._captured.values()
    assert all(each.launches.adapters is not None for each in captured)
    report = engines[0].draft_report()
    assert all(report.total("verified", adapter=name) > 0 for name in ("", "ends", "linear"))


def test_samples_of_a_prompt(t_full, drafter, only_windows, monkeypatch):
    """Between others; what they share every round reads once, for blocks and for verify rows."""
    only_windows(3)
    monkeypatch.setattr(RoundStepper, "capture_seconds", -1e9)
    for name in ("MIN_SAVED_BYTES", "MIN_SAVED_SEGMENT_BYTES"):
        monkeypatch.setattr(decode_metadata, name, -(1 << 40))
    asked = [
        ask("before", prompt(9), max_new=5),
        ask("group", prompt(22, 50), n=2, max_new=6, temperature=1.0, seed=3),
        ask("after", prompt(5, 70), max_new=4, temperature=0.8, seed=4),
    ]
    engine = even_engine(t_full, drafter)
    assert_same(engine.generate(asked), make_engine(t_full, page_size=4).generate(asked))
    check(engine, 3)
    plans = [round.launches._plan for round in engine._loop._rounds._stepper._captured.values()]
    assert any(plan.shared is not None and int(plan.shared.before.own_start_B.max()) == 16 for plan in plans)
    assert 0 < engine.counters.shared_rounds <= engine.counters.device_rounds


def test_some_rows_have_no_room(t_full, only_windows, tmp_path):
    """At the ends of their lengths, and where the drafter's contexts end, which others go past without drafts."""
    only_windows(3)
    asked = [
        ask("short", prompt(5), max_new=2, temperature=1.0, seed=1),
        ask("ending", prompt(14), max_new=6, temperature=0.9, seed=2),
        ask("beyond", prompt(19), max_new=4),
        ask("long", prompt(3), max_new=8, temperature=1.0, seed=3),
    ]
    engine = even_engine(t_full, save_random(tmp_path / "d0", max_position_embeddings=18))
    assert_same(engine.generate(asked), make_engine(t_full, page_size=4).generate(asked))
    check(engine, 3)
    report = engine.draft_report()
    assert report.total("plain_steps") > 4


def test_bounds_of_requests(t_full, drafter, only_windows):
    """None at all, one, at least two, and whatever there is."""
    only_windows(3)
    asked = [
        bounded(ask("none", prompt(5), max_new=4, temperature=1.0, seed=1), most=0),
        bounded(ask("one", prompt(9), max_new=5), most=1),
        bounded(ask("two", REPEATED, max_new=5, temperature=0.8, seed=4), least=2),
        bounded(ask("just one", prompt(6), max_new=5, temperature=1.0, seed=5), least=1, most=1),
    ]
    engine = even_engine(t_full, drafter, least=0)
    replies = engine.generate(asked)
    unbounded = [msgspec.structs.replace(request, draft_window=None) for request in asked]
    assert_same(replies, make_engine(t_full, page_size=4).generate(unbounded))
    check(engine, 3)
    none, one, two, just = (reply.samples[0].draft_use for reply in replies)
    assert none is None and one.verified == one.steps > 0 and two.verified > two.steps and just.verified == just.steps


class Heard:
    """States of samples that ended, and how many rounds and drafts there were."""

    def __init__(self):
        self.states, self.steps, self.kept = {}, 0, 0

    def on_round(self, step):
        self.steps += sum(bool(drafts) for drafts in step.drafts)
        self.kept += sum(step.emitted)

    def wants(self, sample):
        return True

    def on_sample(self, sample, states_TMD):
        self.states[sample.group.request.group_id, sample.index] = states_TMD.clone()


def test_kept_states_are_those_of_plain_steps(t_full, drafter, only_windows):
    only_windows(3)
    asked = [
        ask("group", prompt(10), n=2, max_new=5, temperature=1.0, seed=3),
        ask("greedy", prompt(9), max_new=6),
        ask("short", prompt(7, 50), max_new=1),
    ]
    heard = []
    plain = make_engine(t_full, page_size=4, dspark=dspark(drafter, keep_states=True, max_context=1))
    for engine in (even_engine(t_full, drafter, keep_states=True), plain):
        engine.drafting.watch(Heard())
        heard.append((engine.generate(asked), engine._parts.speculation.record.on_round.__self__))
        engine.check()
    (device, mine), (serial, theirs) = heard
    assert_same(device, serial)
    assert mine.states.keys() == theirs.states.keys() and theirs.steps == 0 < mine.steps
    for key, states_TMD in theirs.states.items():
        torch.testing.assert_close(mine.states[key], states_TMD, atol=1e-4, rtol=1e-4)


SUMS = ("steps", "plain_steps", "proposed", "accepted", "emitted", "verify_rows")


def sums_of(engine):
    """What was counted of verified drafts, by class: of those that were made rounds count what rows had windows for."""
    record = engine._parts.speculation.record
    record._take_in()
    return {
        pair: {name: getattr(stats, name) for name in SUMS}
        | {name: getattr(stats, name).tolist() for name in ("accepted_at", "windows", "lengths")}
        for pair, stats in record._classes.items()
    }


@pytest.mark.parametrize(("drafts", "bias"), [(4, 0.0), (1, 25.0)])
def test_whole_windows_are_counted_as_the_serial_loop_counts_them(t_full, only_windows, tmp_path, drafts, bias):
    """Rows that end in the middle of a launch, by length and by stops; fewer drafts than the drafter makes."""
    only_windows(drafts)
    folder = save_random(tmp_path / "d0")
    stops = list(range(0, 512, 9))
    edit = {"logit_bias": {7: bias}} if bias else {}
    asked = [
        ask("a", prompt(9), n=2, max_new=9, temperature=1.0, seed=3, **edit),
        ask("b", prompt(12, 40), max_new=7, **edit),
        ask("c", prompt(5), max_new=12, temperature=1.3, seed=7, stop_ids=stops),
    ]
    device = even_engine(t_full, folder, drafts=drafts)
    serial = make_engine(t_full, page_size=4, dspark=dspark(folder, drafts=drafts))
    assert_same(device.generate(asked), serial.generate(asked))
    check(device, drafts)
    mine, theirs = sums_of(device), sums_of(serial)
    assert mine == theirs and mine["", ""]["plain_steps"] + mine["", ""]["accepted"] > 0


def test_nobody_remembers_groups_that_are_over(t_full, drafter, only_windows):
    """Samples that a launch in flight will end are left out of the next one before they have."""
    only_windows(3)
    engine = even_engine(t_full, drafter)
    for turn in range(2):
        engine.generate([ask(f"{turn}-{i}", prompt(5 + i), n=1 + (i == 0), max_new=2 + 3 * (i % 3)) for i in range(6)])
    record = engine._parts.speculation.record
    engine.generate([ask("last", prompt(4), max_new=3)])
    record.report()
    left = {group.request.group_id for group in record._names} | {str(s.group.request.group_id) for s in record._gone}
    assert left <= {"last"} and len(record._estimate._requests) <= 1
