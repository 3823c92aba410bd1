"""Case F3: a drafter's context is there wherever the target's is. Pools hold NaN until written."""

import numpy as np
import pytest

from engine.collector import Collector
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import dspark, save_random


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("drafters") / "d0")


def poisoned(t_full, drafter, **fields):
    engine = make_engine(t_full, dspark=dspark(drafter), **fields)
    pages = engine._parts.pages
    assert pages.draft_pool is not None and pages.draft_pool.num_pages == pages.pool.num_pages
    pages.pool.fill(float("nan"))
    pages.draft_pool.fill(float("nan"))
    watch(engine)
    return engine


def watch(engine):
    """Every confidence and every draft logit must be a number: no unset context was read."""
    drafter = engine._parts.speculation.drafter
    propose = drafter.propose
    engine.seen = []

    def watched(rows):
        proposal = propose(rows)
        assert bool(proposal.logits_BGV.isfinite().all()) and bool(proposal.confidence_BG.isfinite().all())
        engine.seen += [
            (position, tuple(np.round(row.tolist(), 4)))
            for position, row in zip(rows.positions_B.tolist(), proposal.confidence_BG, strict=True)
        ]
        return proposal

    drafter.propose = watched


def run(engine, name, ids, **fields):
    engine.seen.clear()
    (group,) = engine.generate([ask(name, ids, max_new=12, **fields)])
    engine.check()
    return [sample.ids.tolist() for sample in group.samples], sorted(engine.seen)


def test_case_f3_warm_flushed_and_chunked_prefixes_draft_alike(t_full, drafter):
    """Same drafts from the same anchors, whether the prompt was computed, cached, or computed in pieces."""
    engine = poisoned(t_full, drafter, prefill_tokens=7)
    ids = [*prompt(40), 99, 5]
    cold = run(engine, "cold", ids)
    assert run(engine, "warm", ids) == cold
    engine.flush("all")
    assert run(engine, "flushed", ids) == cold
    whole = poisoned(t_full, drafter, prefill_tokens=64)
    assert run(whole, "whole", ids) == cold
    assert len(cold[1]) > 3


def test_case_f3_forks_draft_from_copied_pages(t_full, drafter):
    engine = poisoned(t_full, drafter)
    alone = run(engine, "alone", prompt(18))
    engine.flush("all")
    ids, seen = run(engine, "group", prompt(18), n=3)
    assert ids == alone[0] * 3
    assert seen == sorted(alone[1] * 3)


def test_case_f3_retracted_and_resumed_samples_keep_their_context(t_full, drafter):
    engine = poisoned(t_full, drafter, kv_tokens=56)
    requests = [ask(f"r{i}", prompt(8, 20 + 9 * i), max_new=24) for i in range(4)]
    tight = [group.samples[0].ids.tolist() for group in engine.generate(requests)]
    assert engine.counters.retractions > 0
    engine.check()
    roomy = poisoned(t_full, drafter)
    assert [group.samples[0].ids.tolist() for group in roomy.generate(requests)] == tight


def test_paused_and_retracted_samples_draft_from_what_the_cache_kept(t_full, drafter):
    def stopped(pause):
        engine = poisoned(t_full, drafter)
        sink = Collector()
        engine.add_group(ask("g", prompt(12), max_new=24), sink)
        for _ in range(5):
            engine.step()
        if pause:
            engine.pause("retract")
            engine.resume()
        while not sink.ended:
            engine.step()
        return sink.result().samples[0].ids.tolist(), dict(engine.seen)

    resumed, undisturbed = stopped(True), stopped(False)
    assert resumed[0] == undisturbed[0]
    # A resumed sample draws a token before it drafts, so that some anchors differ; what is drafted does not.
    common = resumed[1].keys() & undisturbed[1].keys()
    assert len(common) > 5 and max(common) > 20
    for anchor in common:
        np.testing.assert_allclose(resumed[1][anchor], undisturbed[1][anchor], atol=2e-3)
