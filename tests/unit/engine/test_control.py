"""Abort, pause, memory and bad input: every call leaves the engine whole."""

import numpy as np
import pytest

from engine import GroupRequest, ScoreRequest, Want
from engine.errors import Conflict, InvalidRequest, Overloaded, Paused, SparkrollError, TooLarge
from engine.types import SampleResume
from tests.support import (
    CONTEXT,
    VOCAB,
    ask,
    assert_sample_is_reference,
    assert_whole,
    make_engine,
    prompt,
    update,
)
from tests.unit.engine.test_updates import Sink, finish, start

pytestmark = pytest.mark.usefixtures("both_loops")


def test_case_g3_abort_returns_what_there_is(t_full):
    engine = make_engine(t_full, kv_tokens=64)
    sinks = [Sink() for _ in range(6)]
    for i, sink in enumerate(sinks):
        engine.add_group(ask(f"g{i}", prompt(8, 10 + 40 * i), max_new=30), sink)
    while engine.counters.retractions == 0:
        engine.step()
    late = Sink()
    wanted = Want(entropy=True, top_logprobs=2, extra_logprobs=["raw"])
    engine.add_group(ask("late", prompt(5), want=wanted), late)
    outcomes = engine.abort()
    assert {outcome.outcome for outcome in outcomes} == {"aborted"} and len(outcomes) == 7
    for sink in [*sinks, late]:
        (sample,) = sink.group.samples
        assert sample.finish == "abort"
        assert_whole(sample)
    retracted = [s.group.samples[0] for s in sinks if s.group.samples[0].retractions]
    assert retracted and all(len(sample.ids) > 0 for sample in retracted)
    # Who has no token has all columns all the same: a fleet joins them to those of other engines.
    (sample,) = late.group.samples
    assert not len(sample.ids) and sample.top_ids.shape == sample.top_logprobs.shape == (0, 2)
    assert sample.entropy.shape == sample.extra_logprobs["raw"].shape == (0,)
    assert late.group.samples[0].ids.tolist() == []
    assert engine.gauges().pages_private == 0
    assert engine.abort(["late", "never"])[0].outcome == "unknown"
    engine.check()


@pytest.mark.parametrize("mode", ["drain", "abort", "retract", "in_place"])
def test_case_g5_pause_modes_do_what_they_say(t_full, mode):
    engine = make_engine(t_full)
    sink = start(engine, "r", prompt(8), 5, max_new=24)
    engine.pause(mode)
    parked = Sink()
    engine.add_group(ask("parked", prompt(9)), parked)
    while not engine.quiescent:
        assert engine.step()
    assert not engine.step() and not engine.has_work
    if mode == "drain":
        assert len(sink.group.samples[0].ids) == 24
    elif mode == "abort":
        assert sink.group.samples[0].finish == "abort" and engine.pause_report.aborted == 1
    else:
        assert sink.group is None
        assert engine.pause_report.retracted == (mode == "retract")
        assert engine.gauges().running == (mode == "in_place")
    assert parked.group is None
    engine.pause(mode)
    with pytest.raises(Paused):
        engine.score(ScoreRequest(sequences=[prompt(4)]))
    engine.resume()
    engine.resume()
    assert_sample_is_reference(t_full, prompt(9), finish(engine, parked), 8)
    if mode in ("retract", "in_place"):
        assert_sample_is_reference(t_full, prompt(8), finish(engine, sink), 24)
    engine.check()


@pytest.mark.parametrize("mode", ["keep", "", "wait"])
def test_case_g5_unknown_modes_are_refused(t_full, mode):
    engine = make_engine(t_full)
    with pytest.raises(InvalidRequest, match="mode"):
        engine.pause(mode)
    assert engine.paused is None


def addresses(engine) -> list[int]:
    pool = engine._parts.runner.kv_pool
    layers = [layer.data_ptr() for layer in pool._layers]
    return layers + [parameter.data_ptr() for parameter in engine._parts.model.parameters()]


def test_case_m1_m4_release_and_restore(t_full):
    engine = make_engine(t_full)
    (before,) = engine.generate([ask("g", prompt(16))])
    places = addresses(engine)
    for level in ("discard", "offload", "discard"):
        held, released = engine.release_memory(["weights", "kv"], level)
        assert held["kv"] > 0 and held["weights"] > 0 and not any(released.values())
        assert addresses(engine) == places
        with pytest.raises(Paused):
            engine.generate([ask("g", prompt(4))])
        engine.resume_memory(["weights"])
        with pytest.raises(Paused, match="kv"):
            engine.generate([ask("g", prompt(4))])
        engine.resume_memory(["kv"])
        engine.resume_memory(["kv"])
        engine._parts.runner.kv_pool.fill(float("nan"))
        if level == "discard":
            with pytest.raises(Paused, match="weights"):
                engine.generate([ask("g", prompt(4))])
            update(engine, t_full, engine.policy.version + 1)
        (after,) = engine.generate([ask("g", prompt(16))])
        assert after.samples[0].ids.tolist() == before.samples[0].ids.tolist()
        np.testing.assert_allclose(after.samples[0].logprobs, before.samples[0].logprobs, atol=1e-6)
        assert after.hit.usable == 0
        engine.check()
    engine.release_memory(["graphs"])
    with pytest.raises(Paused, match="graphs"):
        engine.generate([ask("g", prompt(4))])
    engine.resume_memory(["graphs"])
    engine.release_memory(["kv"])
    engine.release_memory(["kv"])
    with pytest.raises(InvalidRequest, match="tags"):
        engine.resume_memory(["everything"])
    engine.resume_memory(["kv", "weights"])
    assert_sample_is_reference(t_full, prompt(16), engine.generate([ask("g", prompt(16))])[0].samples[0], 8)


def test_case_m3_release_is_refused_while_busy(t_full):
    engine = make_engine(t_full)
    for steps in range(4):
        sink = Sink()
        engine.add_group(ask("g", prompt(40), max_new=4), sink)
        for _ in range(steps):
            engine.step()
        engine.check()
        if sink.group is None:
            with pytest.raises(Conflict):
                engine.release_memory(["kv"])
            finish(engine, sink)
        engine.release_memory(["kv"])
        engine.resume_memory(["kv"])
        assert_sample_is_reference(t_full, prompt(40), sink.group.samples[0], 4)


@pytest.mark.parametrize("bad", [[-1], [VOCAB], [2**31], [2**63]])
def test_case_h1_ids_outside_the_vocabulary(t_full, bad):
    engine = make_engine(t_full)
    dtype = np.uint64 if bad[0] > 2**62 else np.int64
    for ids in (np.array([1, *bad], dtype), np.array([*bad, 1], dtype)):
        for call in (
            lambda ids=ids: engine.generate([GroupRequest(group_id="g", prompt_ids=ids)]),
            lambda ids=ids: engine.score(ScoreRequest(sequences=[ids])),
        ):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert str(bad[0]) in str(caught.value)
    for field in ({"stop_ids": bad}, {"logit_bias": {bad[0]: 1.0}}, {"stop_ids": bad, "min_new": 5}):
        with pytest.raises(InvalidRequest):
            engine.generate([ask("g", prompt(4), **field)])
    assert_sample_is_reference(t_full, prompt(4), engine.generate([ask("g", prompt(4))])[0].samples[0], 8)


def refused(t_full):
    """(field, request) that must be refused before they touch anything."""
    yield "prompt_ids", ask("g", [])
    yield "n", ask("g", prompt(4), n=0)
    for name, values in {
        "temperature": [float("nan"), float("inf"), -1.0, float("-inf")],
        "top_p": [float("nan"), 0.0, 1.5],
        "top_k": [-1, -2],
        "min_p": [float("nan"), -0.1, 1.1],
        "repetition_penalty": [float("nan"), 0.0, -1.0],
        "presence_penalty": [float("nan"), float("inf")],
        "frequency_penalty": [float("nan")],
        "max_new": [0, -1],
        "min_new": [-1, 9],
        "seeds": [[1, 2]],
    }.items():
        for value in values:
            yield name, ask("g", prompt(4), **{name: value})
    for count in (VOCAB + 1, 10**9, -1):
        yield "top_logprobs", ask("g", prompt(4), want=Want(top_logprobs=count))
    yield "prompt_logprobs_from", ask("g", prompt(4), want=Want(prompt_logprobs_from=5))
    yield "group_id", ask("", prompt(4))
    yield "group_id", ask("x" * 2**20, prompt(4))
    yield "group_id", ask("a\0b", prompt(4))
    yield "group_id", ask("\ud83d", prompt(4))
    yield "cache_salt", ask("g", prompt(4), cache_salt="\udc97")
    yield "resume", ask("g", prompt(4), seed=1, resume=[])
    yield "index", ask("g", prompt(4), seed=1, resume=[SampleResume(index=1, ids=prompt(1))])
    yield "ids", ask("g", prompt(4), seed=1, resume=[SampleResume(index=0, ids=prompt(8))])
    yield "seed", ask("g", prompt(4), resume=[SampleResume(index=0, ids=prompt(1))])


def test_cases_h2_to_h5_bad_values_are_named_and_harm_nobody(t_full):
    engine = make_engine(t_full)
    sink = start(engine, "mate", prompt(8), 3, max_new=12)
    for field, bad in refused(t_full):
        with pytest.raises(InvalidRequest) as caught:
            engine.add_group(bad, Sink())
        assert field in str(caught.value), (field, str(caught.value))
    assert_sample_is_reference(t_full, prompt(8), finish(engine, sink), 12)
    engine.check()


def test_case_h3_the_whole_vocabulary_as_alternatives(t_full):
    engine = make_engine(t_full)
    (group,) = engine.generate([ask("g", prompt(4), max_new=2, want=Want(top_logprobs=VOCAB))])
    assert group.samples[0].top_ids.shape == (2, VOCAB)
    np.testing.assert_allclose(np.exp(group.samples[0].top_logprobs).sum(-1), 1.0, atol=1e-4)


def test_case_h6_a_live_id_is_taken(t_full):
    engine = make_engine(t_full)
    sink = start(engine, "x", prompt(8), 3, max_new=12)
    with pytest.raises(Conflict, match="group_id"):
        engine.add_group(ask("x", prompt(8, 100)), Sink())
    assert_sample_is_reference(t_full, prompt(8), finish(engine, sink), 12)
    engine.add_group(ask("x", prompt(8, 100)), Sink())
    engine.abort(["x"])
    (again,) = engine.generate([ask("x", prompt(9))])
    assert_sample_is_reference(t_full, prompt(9), again.samples[0], 8)


@pytest.mark.parametrize("length", [254, 255, 256, 257, 300])
@pytest.mark.parametrize("new", [1, 2, 10])
def test_case_h7_the_context_is_exact_and_prompts_are_never_cut(t_full, length, new):
    engine = make_engine(t_full, prefill_tokens=512)
    ids = np.arange(length, dtype=np.uint32) % 500
    if length + new > CONTEXT:
        with pytest.raises(TooLarge, match=f"{length} tokens and {new}"):
            engine.generate([ask("g", ids, max_new=new)])
    else:
        (group,) = engine.generate([ask("g", ids, max_new=new)])
        assert group.prompt_tokens == length and len(group.samples[0].ids) == new


def test_pool_smaller_than_a_request_refuses_it(t_full):
    engine = make_engine(t_full, kv_tokens=32)
    with pytest.raises(TooLarge, match="pool"):
        engine.generate([ask("g", prompt(30), max_new=4)])
    (group,) = engine.generate([ask("g", prompt(28), max_new=4, n=4)])
    for sample in group.samples:
        assert_sample_is_reference(t_full, prompt(28), sample, 4)
    engine.check()


def test_a_full_queue_says_so(t_full):
    engine = make_engine(t_full, max_waiting=8)
    engine.add_group(ask("a", prompt(4), n=8), Sink())
    with pytest.raises(Overloaded) as caught:
        engine.add_group(ask("b", prompt(4)), Sink())
    assert caught.value.retryable and caught.value.retry_after_ms
    engine.abort()


def test_case_a5_salts_separate_and_never_collide(t_full):
    """Whatever string a caller salts with, it cannot name another part of the key."""
    engine = make_engine(t_full)
    engine.generate([ask("warm", prompt(24))])
    for salt in ("float32/4", "0", "float32/4 group 1", "warm", "('', 0)"):
        (group,) = engine.generate([ask("g", prompt(24), cache_salt=salt)])
        assert group.hit.usable == 0, salt
        (group,) = engine.generate([ask("g", prompt(24), cache_salt=salt)])
        assert group.hit.usable == 20
    assert engine.generate([ask("g", prompt(24))])[0].hit.usable == 20


def test_case_c6_impossible_tokens_are_minus_infinity(t_full):
    engine = make_engine(t_full)
    want = Want(top_logprobs=VOCAB)
    bias = {17: float("-inf")}
    (group,) = engine.generate([ask("g", prompt(8), temperature=0.01, top_p=0.3, logit_bias=bias, want=want, seed=1)])
    (sample,) = group.samples
    assert np.isfinite(sample.logprobs).all() and 17 not in sample.ids
    assert np.isneginf(sample.top_logprobs[sample.top_ids == 17]).all()


def test_nan_logits_end_one_sample_only(t_full):
    """A token whose embedding is broken poisons its own request and nobody else's."""
    engine = make_engine(t_full)
    embedding = dict(engine._parts.model.named_parameters())
    (name,) = [n for n in embedding if "embed" in n]
    embedding[name].data[400] = float("nan")
    good, bad = engine.generate([ask("good", prompt(8)), ask("bad", [10, 400, 11])])
    assert bad.samples[0].finish == "error" and bad.samples[0].error.code == "INTERNAL"
    assert_sample_is_reference(t_full, prompt(8), good.samples[0], 8)
    (again,) = engine.generate([ask("again", prompt(8))])
    assert_sample_is_reference(t_full, prompt(8), again.samples[0], 8)
    engine.check()


def test_every_refusal_pickles():
    import pickle

    for error in (Overloaded(field="queue", expected=1, actual=2, retry_after_ms=5), TooLarge("long", field="x")):
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, SparkrollError) and type(copy) is type(error)
        assert copy.__dict__ == error.__dict__ and str(copy) == str(error)
