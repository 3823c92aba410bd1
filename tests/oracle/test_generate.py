"""Whatever the engine does to serve a request, the tokens are those of transformers."""

import numpy as np
import pytest

from engine import ScoreRequest, Want
from engine.types import SampleResume
from tests.support import (
    TOLERANCE,
    ask,
    assert_sample_is_reference,
    assert_whole,
    make_engine,
    prompt,
    reference_greedy,
    reference_logits,
    reference_logprobs,
)

MARGIN = 10 * TOLERANCE

pytestmark = pytest.mark.usefixtures("both_loops")


def assert_greedy(folder, ids, sample, num):
    """Exact where the reference's own choice is not a near tie."""
    logits = reference_logits(folder, [*ids, *reference_greedy(folder, ids, num)])[len(ids) - 1 : -1]
    top = logits.topk(2, -1).values
    assert float((top[:, 0] - top[:, 1]).min()) > MARGIN, "the fixture has a near tie; choose another seed"
    assert_sample_is_reference(folder, ids, sample, num)


@pytest.mark.parametrize("model", ["t_full", "t_tied", "t_qwen3"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [5, 64])
def test_cold_and_warm(model, page_size, chunk, request):
    folder = request.getfixturevalue(model)
    engine = make_engine(folder, page_size=page_size, prefill_tokens=chunk)
    for round_ in range(2):
        (group,) = engine.generate([ask("g", prompt(23), max_new=6)])
        assert_greedy(folder, prompt(23), group.samples[0], 6)
        expected = 22 // page_size * page_size if round_ else 0
        assert group.hit.usable == expected
        engine.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_every_hit_depth(t_full, page_size):
    """A warm prefix of any depth, on and beside page borders, changes nothing."""
    reference = {n: reference_greedy(t_full, prompt(n), 3) for n in range(17, 24)}
    for depth in range(1, 18):
        engine = make_engine(t_full, page_size=page_size, prefill_tokens=7)
        engine.generate([ask("warm", prompt(depth), max_new=1)])
        for n in (17, 20, 23):
            (group,) = engine.generate([ask("g", prompt(n), max_new=3)])
            assert group.samples[0].ids.tolist() == reference[n]
            logprobs = reference_logprobs(t_full, [*prompt(n), *reference[n]])[n:]
            np.testing.assert_allclose(group.samples[0].logprobs, logprobs, atol=TOLERANCE)
        engine.check()


@pytest.mark.parametrize("batch", [2, 7, 16])
def test_mixed_batches(t_full, batch):
    """Requests of many lengths arriving together equal their solo runs."""
    engine = make_engine(t_full, prefill_tokens=16)
    prompts = [prompt(3 + 5 * i % 31, start=10 + 3 * i) for i in range(batch)]
    groups = engine.generate([ask(f"g{i}", ids, max_new=3 + i % 4) for i, ids in enumerate(prompts)])
    for i, (ids, group) in enumerate(zip(prompts, groups, strict=True)):
        assert_sample_is_reference(t_full, ids, group.samples[0], 3 + i % 4)
    engine.check()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 8, 15, 16, 17])
def test_forks_share_the_prompt(t_full, page_size, length):
    """A group prefills once; every sample continues as if it had been alone."""
    engine = make_engine(t_full, page_size=page_size)
    (group,) = engine.generate([ask("g", prompt(length), n=6, max_new=9)])
    for sample in group.samples:
        assert_sample_is_reference(t_full, prompt(length), sample, 9)
    assert engine.counters.computed_tokens == length
    assert [s.cached_tokens for s in group.samples] == [0] + [length] * 5
    engine.check()


def test_identical_prompts_of_separate_requests_are_computed_once(t_full):
    engine = make_engine(t_full, page_size=4, prefill_tokens=8)
    groups = engine.generate([ask(f"g{i}", prompt(33), max_new=4) for i in range(6)])
    for group in groups:
        assert_sample_is_reference(t_full, prompt(33), group.samples[0], 4)
    # The first computes 33; the others find 32 tokens in whole pages.
    assert engine.counters.computed_tokens == 33 + 5


def test_case_c7_retraction_under_pressure(t_full):
    """A pool too small for all retracts some; nobody's tokens or log-probabilities change."""
    engine = make_engine(t_full, page_size=4, kv_tokens=64, lookahead=4)
    prompts = [prompt(8, start=10 + 40 * i) for i in range(6)]
    want = Want(top_logprobs=2, entropy=True, extra_logprobs=["raw"])
    groups = engine.generate([ask(f"g{i}", ids, max_new=24, want=want) for i, ids in enumerate(prompts)])
    assert engine.counters.retractions > 0
    for ids, group in zip(prompts, groups, strict=True):
        assert_sample_is_reference(t_full, ids, group.samples[0], 24)
    engine.check()


def test_case_l4_counts_survive_retraction(t_full):
    engine = make_engine(t_full, page_size=4, kv_tokens=64, lookahead=4)
    head = list(prompt(24))
    groups = engine.generate([ask(f"g{i}", [*head, 100 + i], n=2, max_new=12) for i in range(4)])
    assert engine.counters.retractions > 0
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        assert 0 <= sample.cached_tokens <= 25
    assert engine.counters.cached_tokens == sum(sample.cached_tokens for sample in samples)
    assert engine.counters.prompt_tokens == 25 * len(samples)
    assert sum(sample.retractions for sample in samples) == engine.counters.retractions
    engine.check()


def test_case_k1_a_sample_depends_on_nothing_but_its_seed(t_full):
    """Alone, in company, at another place in the batch, warm, and retracted."""
    mine = dict(temperature=1.0, seed=5, max_new=16)
    (alone,) = make_engine(t_full).generate([ask("r", prompt(8), **mine)])
    expected = alone.samples[0].ids.tolist()
    mates = [
        ask("a", prompt(9, 50), temperature=1.0, top_p=0.9, seed=1, max_new=20),
        ask("b", prompt(5, 90), max_new=20),
        *(ask(f"c{i}", prompt(4 + i, 120 + 10 * i), temperature=0.7, top_k=5, max_new=20) for i in range(5)),
    ]
    for kv_tokens in (4096, 72):
        engine = make_engine(t_full, kv_tokens=kv_tokens)
        groups = engine.generate([*mates[:4], ask("r", prompt(8), **mine), *mates[4:]])
        assert groups[4].samples[0].ids.tolist() == expected
        np.testing.assert_allclose(groups[4].samples[0].logprobs, alone.samples[0].logprobs, atol=TOLERANCE)
        (again,) = engine.generate([ask("r", prompt(8), **mine)])
        assert again.samples[0].ids.tolist() == expected
        engine.check()


def test_case_k2_seeds_of_a_group(t_full):
    engine = make_engine(t_full)
    sampling = dict(temperature=1.0, max_new=12)

    def ids(**fields):
        (group,) = engine.generate([ask("g", prompt(8), **(sampling | fields))])
        return [tuple(sample.ids) for sample in group.samples], [sample.seed for sample in group.samples]

    eight, seeds = ids(n=8, seed=5)
    assert len(set(eight)) == 8
    assert ids(n=8, seed=5)[0] == eight
    assert len({ids(seed=5)[0][0] for _ in range(3)}) == 1
    assert len({ids()[0][0] for _ in range(4)}) == 4
    # Two workers with half the group each equal the one.
    assert ids(n=4, seeds=seeds[:4])[0] + ids(n=4, seeds=seeds[4:])[0] == eight


@pytest.mark.parametrize("page_size", [1, 4])
def test_case_c4_scores_do_not_depend_on_the_cache(t_full, page_size):
    expected = reference_logprobs(t_full, prompt(24))
    other = np.array([10, 11, 99, 12, 13], dtype=np.uint32)
    for warm_first in (False, True):
        engine = make_engine(t_full, page_size=page_size, prefill_tokens=10)
        if warm_first:
            engine.generate([ask("g", prompt(20), max_new=1)])
        for ids, reference in ((prompt(24), expected), (other, reference_logprobs(t_full, other))):
            (scored,) = engine.score(ScoreRequest(sequences=[ids])).sequences
            np.testing.assert_allclose(scored.logprobs, reference, atol=TOLERANCE)
            assert np.isnan(scored.logprobs[0]) and np.isfinite(scored.logprobs[1:]).all()
        engine.check()


def test_case_c5_prompt_logprobs_from_a_position(t_full):
    """The first scored position needs the token before it computed, even when cached."""
    engine = make_engine(t_full, page_size=4)
    (first,) = engine.generate([ask("t1", prompt(12), max_new=6)])
    ids = np.array([*prompt(12), *first.samples[0].ids, 50, 51, 52], dtype=np.uint32)
    (second,) = engine.generate([ask("t2", ids, max_new=2, want=Want(prompt_logprobs_from=18))])
    np.testing.assert_allclose(second.prompt_logprobs, reference_logprobs(t_full, ids)[18:], atol=TOLERANCE)
    assert second.hit.usable == 16
    # Prompts are scored under the model's own distribution, whatever samples are drawn from.
    (warm,) = engine.generate([ask("t4", ids, temperature=0.7, top_k=5, want=Want(prompt_logprobs_from=18))])
    np.testing.assert_allclose(warm.prompt_logprobs, reference_logprobs(t_full, ids)[18:], atol=TOLERANCE)
    (whole,) = engine.generate([ask("t3", ids, max_new=2, want=Want(prompt_logprobs_from=0))])
    np.testing.assert_allclose(whole.prompt_logprobs, reference_logprobs(t_full, ids), atol=TOLERANCE)
    assert_sample_is_reference(t_full, ids, whole.samples[0], 2)


def test_case_c8_the_sampled_id_has_its_own_column(t_full):
    engine = make_engine(t_full)
    outside = 0
    for seed in range(8):
        want = Want(logprobs="raw", top_logprobs=2, extra_logprobs=["processed", "temperature"], entropy=True)
        (group,) = engine.generate([ask("g", prompt(12), temperature=1.5, seed=seed, want=want)])
        (sample,) = group.samples
        ids = [*prompt(12), *sample.ids]
        raw = reference_logprobs(t_full, ids)[12:]
        np.testing.assert_allclose(sample.logprobs, raw, atol=TOLERANCE)
        scaled = reference_logprobs(t_full, ids, temperature=1.5)[12:]
        np.testing.assert_allclose(sample.extra_logprobs["processed"], scaled, atol=TOLERANCE)
        np.testing.assert_allclose(sample.extra_logprobs["temperature"], scaled, atol=TOLERANCE)
        outside += sum(int(i) not in row for i, row in zip(sample.ids, sample.top_ids, strict=True))
        assert_whole(sample)
    assert outside > 0


def test_continuation_on_another_engine(t_full):
    """Resuming elsewhere from any point gives the rest of the undisturbed sample."""
    sampling = dict(temperature=1.0, seed=11, max_new=12, repetition_penalty=1.3, presence_penalty=0.2)
    (whole,) = make_engine(t_full).generate([ask("g", prompt(9), n=3, **sampling)])
    for cut in (1, 4, 11):
        resume = [SampleResume(index=s.index, ids=s.ids[:cut]) for s in whole.samples[1:]]
        (rest,) = make_engine(t_full).generate([ask("g", prompt(9), n=3, resume=resume, **sampling)])
        for before, after in zip(whole.samples[1:], rest.samples, strict=True):
            assert after.index == before.index
            assert after.ids.tolist() == before.ids[cut:].tolist()
            np.testing.assert_allclose(after.logprobs, before.logprobs[cut:], atol=TOLERANCE)
            assert after.spans[0].start == cut and after.spans[-1].end == 12
