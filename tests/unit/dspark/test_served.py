"""Whole engines with and without a drafter: same ids, log-probabilities, columns, ends."""

import itertools

import numpy as np
import pytest

from engine import Want
from engine.collector import Collector
from engine.errors import InvalidRequest
from tests.support import (
    TOLERANCE,
    VOCAB,
    ask,
    assert_whole,
    chain,
    make_engine,
    prompt,
    reference_logits,
    save_chain,
)
from tests.unit.dspark.served import Oracle, Scripted, dspark, save_random, scripted_engine, timeless

RICH = Want(entropy=True, top_logprobs=2, extra_logprobs=["raw"])


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("drafters") / "d0")


def requests():
    """Everything a row can ask for, in one batch: groups, truncation, edits, stops, columns."""
    repeats = np.tile(prompt(5, 30), 4)
    return [
        ask("greedy", prompt(9), n=2),
        ask("greedy rich", prompt(9), max_new=6, want=RICH),
        ask("group", prompt(13, 60), n=3, temperature=1.0, seed=3, max_new=12),
        ask("cold", repeats, n=2, temperature=0.05, seed=4, max_new=16),
        ask("cut", repeats, temperature=0.7, top_k=9, top_p=0.9, seed=5, max_new=9, want=RICH),
        ask("min_p", prompt(3), temperature=0.9, min_p=0.02, seed=6, max_new=10),
        ask("penalised", repeats, frequency_penalty=2.0, presence_penalty=0.5, max_new=10),
        ask("encouraged", repeats, frequency_penalty=-2.0, repetition_penalty=1.3, max_new=10, want=RICH),
        ask("biased", prompt(6), logit_bias={17: 100.0}, max_new=5),
        ask("stopped", prompt(11), n=2, temperature=1.0, seed=9, max_new=14, stop_ids=list(range(0, VOCAB, 9))),
        ask("cut off", prompt(11), temperature=1.0, seed=9, max_new=14, stop_ids=list(range(200)), keep_stop=False),
        ask("late", prompt(11), temperature=1.0, seed=9, max_new=9, min_new=5, stop_ids=list(range(400))),
        ask("one", prompt(1), max_new=1),
        ask("two", prompt(2), max_new=2, temperature=1.0, seed=1),
    ]


@pytest.fixture(scope="module")
def plain(t_full):
    return make_engine(t_full).generate(requests())


def assert_alike(groups, expected, atol=TOLERANCE):
    for group, other in zip(groups, expected, strict=True):
        for sample, plain in zip(group.samples, other.samples, strict=True):
            name = f"{group.group_id}[{sample.index}]"
            assert sample.ids.tolist() == plain.ids.tolist(), name
            assert (sample.finish, sample.matched) == (plain.finish, plain.matched), name
            assert sample.spans == plain.spans, name
            assert_whole(sample)
            for column in ("logprobs", "entropy", "top_ids", "top_logprobs"):
                mine, theirs = getattr(sample, column), getattr(plain, column)
                assert (mine is None) == (theirs is None), (name, column)
                if mine is not None:
                    np.testing.assert_allclose(mine, theirs, atol=atol, err_msg=f"{name} {column}")
            for definition, values in plain.extra_logprobs.items():
                np.testing.assert_allclose(sample.extra_logprobs[definition], values, atol=atol)
            use = sample.draft_use
            assert use is None or 0 <= use.accepted <= min(use.verified, len(sample.ids))


@pytest.mark.parametrize("kind", ["block", "ngram"])
@pytest.mark.parametrize("mode", ["static", "compact", "cap_accept"])
def test_a_seed_keeps_its_tokens_whatever_is_drafted(t_full, drafter, plain, kind, mode):
    settings = dspark(drafter if kind == "block" else "ngram", mode=mode)
    engine = make_engine(t_full, dspark=settings, prefill_tokens=24)
    timeless(engine)
    assert_alike(engine.generate(requests()), plain)
    engine.check()
    warm = engine.generate(requests())
    assert_alike(warm, plain)
    counters = engine.draft_counters()
    assert counters["draft_verified"] >= counters["draft_steps"] > (10 if kind == "block" else 1)
    # A stop may leave a step without the token after the accepted ones.
    steps, accepted, emitted = (counters[f"draft_{name}"] for name in ("steps", "accepted", "emitted"))
    assert accepted <= emitted <= steps + accepted


@pytest.mark.parametrize("kind", ["block", "ngram"])
def test_bursts_of_plain_steps_between_rounds(t_full, drafter, plain, kind):
    """The overlapped loop, asking often; the first planned step never drafts, so that both ways are met."""
    settings = dspark(drafter if kind == "block" else "ngram", probe_every=2)
    engine = make_engine(t_full, dspark=settings, loop="overlapped", prefill_tokens=24)
    speculation, pool = engine._parts.speculation, engine._parts.pages.draft_pool
    if pool is not None:
        pool.fill(float("nan"))
    draft, drafts = speculation.draft, itertools.count()

    def by_turns(samples):
        speculation.faulty = "not now" if next(drafts) % 2 == 0 else None
        step = draft(samples)
        if step.proposal is not None and step.proposal.logits_BGV is not None:
            assert bool(step.proposal.logits_BGV.isfinite().all()), "bursts leave the drafter its context"
        return step

    speculation.draft = by_turns
    for _ in range(2):
        assert_alike(engine.generate(requests()), plain)
        engine.check()
    counters = engine.draft_counters()
    assert counters["draft_plain_steps"] > 30
    assert counters["draft_verified"] > (10 if kind == "block" else 0)


def test_bursts_end_where_there_is_something_to_draft(tmp_path):
    """A text that repeats itself after thirty tokens: bursts until then, rounds from there on."""
    ring = list(range(10, 40))
    folder = save_chain(tmp_path / "ring", chain(*ring, ring[0]))
    engine = make_engine(folder, dspark=dspark("ngram", mode="static", probe_every=1000), loop="overlapped")
    (group,) = engine.generate([ask("g", [1, 10], max_new=90)])
    assert group.samples[0].ids.tolist() == [ring[(1 + k) % 30] for k in range(90)]
    counters = engine.draft_counters()
    assert 25 <= counters["draft_plain_steps"] <= 45
    assert counters["draft_accepted"] > 35 and counters["draft_steps"] < 10
    engine.check()


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_greedy_ids_do_not_depend_on_the_rule(t_full, drafter, plain, rule):
    engine = make_engine(t_full, dspark=dspark(drafter, rule=rule))
    greedy = [request for request in requests() if request.sampling.temperature == 0]
    expected = [group for group in plain if group.group_id in {request.group_id for request in greedy}]
    assert_alike(engine.generate(greedy), expected)


@pytest.mark.parametrize("kind", ["block", "ngram"])
def test_deterministic_engines_agree_bit_for_bit(t_full, drafter, kind):
    plain = make_engine(t_full, deterministic=True).generate(requests())
    settings = dspark(drafter if kind == "block" else "ngram")
    engine = make_engine(t_full, deterministic=True, dspark=settings)
    for group, other in zip(engine.generate(requests()), plain, strict=True):
        for sample, expected in zip(group.samples, other.samples, strict=True):
            assert sample.ids.tolist() == expected.ids.tolist()
            name = f"{group.group_id}[{sample.index}]"
            assert sample.logprobs.tolist() == expected.logprobs.tolist(), name
    assert engine.draft_counters()["draft_verified"] > 10


@pytest.mark.parametrize("kind", ["block", "scripted"])
def test_case_f2_rejection_keeps_the_distribution(t_full, drafter, kind):
    """Three tokens out of truncated, penalised rows, drafted with and without probabilities: chi-square
    against enumeration."""
    ids, count = prompt(8), 600
    cut = dict(top_k=3, presence_penalty=0.4, temperature=1.6)
    fields: dict = dict(kv_tokens=8192, max_running=64, max_waiting=2000)
    if kind == "block":
        engine = make_engine(t_full, dspark=dspark(drafter, rule="rejection", drafts=2), **fields)
    else:
        scripted = Scripted(Oracle(t_full), lambda slot, number: 2, max_drafts=2)
        engine = scripted_engine(t_full, scripted, dspark=dict(rule="rejection", drafts=2), **fields)
    (group,) = engine.generate([ask("g", ids, n=count, max_new=3, seed=11, **cut)])
    seen = {}
    for sample in group.samples:
        seen[tuple(sample.ids.tolist())] = seen.get(tuple(sample.ids.tolist()), 0) + 1
    chances = enumerate_chances(t_full, ids.tolist(), 3, 3, 0.4, 1.6)
    assert set(seen) <= set(chances)
    statistic = sum((seen.get(k, 0) - count * p) ** 2 / (count * p) for k, p in chances.items())
    assert statistic < 60.0, f"chi-square of {statistic} with 26 degrees of freedom"
    counters = engine.draft_counters()
    assert counters["draft_verified"] > 500
    assert kind == "block" or counters["draft_accepted"] > 100
    # A log-probability is that of the distribution sampled from, for kept drafts and redrawn tokens alike.
    for sample in group.samples[:20]:
        row = tuple(sample.ids.tolist())
        whole = np.exp(sample.logprobs.astype(np.float64).sum())
        np.testing.assert_allclose(whole, chances[row], rtol=1e-3)


def enumerate_chances(folder, ids, length, top_k, presence, temperature):
    chances = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in chances.items():
            logits = reference_logits(folder, [*ids, *text])[-1].double().clone()
            for token in set(text):
                logits[token] -= presence
            values, picked = (logits / temperature).topk(top_k)
            for token, p in zip(picked.tolist(), values.softmax(-1).tolist(), strict=True):
                longer[(*text, token)] = chance * p
        chances = longer
    return chances


def test_case_l3_counters_of_a_scripted_run(t_full):
    """Kept drafts 4, 2, 0, 1 in four steps of one request, counted while it runs."""
    oracle, script = Oracle(t_full), [4, 2, 0, 1]
    drafter = Scripted(oracle, lambda slot, number: script[number])
    engine, sink = scripted_engine(t_full, drafter), Collector()
    engine.add_group(ask("g", prompt(6), max_new=30), sink)
    engine.step()
    for number in range(4):
        engine.step()
        assert engine.draft_counters()["draft_accepted"] == sum(script[: number + 1])
    engine.abort()
    counters = engine.draft_counters()
    assert [counters[f"draft_{name}"] for name in ("verified", "accepted", "steps", "emitted")] == [16, 7, 4, 11]
    report = engine.draft_report()
    assert report.column("accepted_at", "position", 4).tolist() == [3, 2, 1, 1]
    assert report.figures()["accept_length"] == 11 / 4 and report.figures()["verify_rate"] == 11 / 20
    use = sink.result().samples[0].draft_use
    assert (use.steps, use.verified, use.accepted) == (4, 16, 7)


@pytest.mark.parametrize("max_new", range(1, 10))
def test_case_d3_lengths_are_met_exactly(t_full, max_new):
    drafter = Scripted(Oracle(t_full), lambda slot, number: 4)
    engine = scripted_engine(t_full, drafter)
    (group,) = engine.generate([ask("g", prompt(6), max_new=max_new)])
    (sample,) = group.samples
    assert (len(sample.ids), sample.finish) == (max_new, "length")
    assert sample.draft_use is None or sample.draft_use.accepted < max_new
    engine.check()


def test_case_f6_uneven_rows_with_aborts(t_full):
    oracle = Oracle(t_full)
    drafter = Scripted(oracle, lambda slot, number: (slot * 3 + number * 2) % 5)
    engine = scripted_engine(t_full, drafter)
    lengths, news = (1, 7, 30, 64, 100, 3), (1, 20, 7, 13, 20, 2)
    wanted = [ask(f"g{i}", prompt(n, 5 + i), max_new=m) for i, (n, m) in enumerate(zip(lengths, news, strict=True))]
    sinks = [Collector() for _ in wanted]
    for request, sink in zip(wanted, sinks, strict=True):
        engine.add_group(request, sink)
    for step in itertools.count():
        if step == 5:
            engine.abort(["g4"])
        if not engine.step():
            break
        engine.check()
    for request, sink in zip(wanted, sinks, strict=True):
        (sample,) = sink.result().samples
        ids = request.prompt_ids.tolist()
        assert sample.ids.tolist() == oracle(ids, len(sample.ids))
        assert sample.finish == ("abort" if request.group_id == "g4" else "length")


def test_case_f7_near_the_ends_of_both_contexts(t_full, tmp_path):
    folder = save_random(tmp_path / "short", max_position_embeddings=128)
    engine = make_engine(t_full, dspark=dspark(folder, sweep_seconds=0.3))
    plain = make_engine(t_full)
    wanted = [ask(f"p{n}", prompt(n, 1), max_new=20) for n in (120, 127, 128, 129, 200)]
    wanted += [ask(f"e{n}", prompt(n, 1), max_new=256 - n) for n in (250, 253, 255)]
    assert_alike(engine.generate(wanted), plain.generate(wanted))
    engine.check()
    assert engine.draft_counters()["draft_steps"] > 0 < engine.draft_counters()["draft_plain_steps"]


@pytest.mark.parametrize(
    "fields, error",
    [
        (dict(dspark=dspark("ngram", rule="lossy")), InvalidRequest),
        (dict(dspark=dspark("ngram", mode="full")), InvalidRequest),
        (dict(dspark=dspark("ngram", least=9)), InvalidRequest),
        (dict(dspark=dspark("/nowhere")), InvalidRequest),
    ],
)
def test_settings_that_cannot_be_are_refused(t_full, fields, error):
    with pytest.raises(error):
        make_engine(t_full, **fields)


def test_the_resolved_loop_is_told(t_full, drafter):
    assert make_engine(t_full, dspark=dspark(drafter)).config.loop == "serial"
    assert make_engine(t_full).draft_counters() == {}
