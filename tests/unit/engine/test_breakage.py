"""Inputs that once broke an engine, or could: each in its smallest form, under both loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import Want
from engine.errors import InvalidRequest, SparkrollError, Unsupported
from engine.sampling.seeds import derive_seed
from engine.types import SampleResume, ScoreRequest
from tests.support import (
    ask,
    assert_sample_is_reference,
    assert_whole,
    begin_of,
    make_engine,
    prompt,
    reference_logprobs,
    state_tensors,
    update,
)

pytestmark = pytest.mark.usefixtures("both_loops")


@pytest.mark.parametrize("top", [0, 2])
def test_scoring_from_the_end_of_a_sequence_gives_empty_columns(t_full, top):
    engine = make_engine(t_full)
    scored = engine.score(ScoreRequest(sequences=[prompt(4), prompt(6)], start=4, top_logprobs=top)).sequences
    assert [len(sequence.logprobs) for sequence in scored] == [0, 2]
    if top:
        assert [sequence.top_ids.shape for sequence in scored] == [(0, 2), (2, 2)]
    engine.check()


def test_a_transaction_name_may_be_used_again(t_full, t_full_w1):
    """The stored report of an earlier commit must not stand in for a later one."""
    engine = make_engine(t_full)
    for version, folder in enumerate((t_full_w1, t_full), 1):
        tensors = state_tensors(folder)
        engine.update_begin(begin_of(tensors, "again", version - 1, version))
        engine.update_stage("again", tensors)
        report = engine.update_commit("again")
        assert (report.policy_version, engine.policy.version, engine.policy.pending) == (version, version, None)
        assert engine.update_commit("again") == report
        (group,) = engine.generate([ask(f"g{version}", prompt(8))])
        assert_sample_is_reference(folder, prompt(8), group.samples[0], 8)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0.0, -1.0])
def test_case_b2_a_transaction_without_a_limit_is_refused(t_full, timeout_s):
    engine = make_engine(t_full)
    with pytest.raises(InvalidRequest, match="timeout_s"):
        engine.update_begin(begin_of(state_tensors(t_full), "u", 0, 1, timeout_s=timeout_s))
    assert engine.policy.pending is None


def test_case_b4_a_drafter_is_refused_by_name_and_replies_list_modules(t_full, t_full_w1):
    engine = make_engine(t_full)
    before = engine.digest()
    with pytest.raises(Unsupported, match="module"):
        engine.update_begin(begin_of(state_tensors(t_full_w1), "d", 0, 1, module="drafter"))
    assert (engine.digest(), engine.policy.version) == (before, 0)
    tensors = state_tensors(t_full_w1)
    assert update(engine, t_full_w1, 1).loaded == {"policy": len(tensors)}


def test_case_h4_a_refused_batch_leaves_nothing_behind(t_full):
    engine = make_engine(t_full)
    with pytest.raises(SparkrollError, match="prompt_ids"):
        engine.generate([ask("first", prompt(4)), ask("second", [])])
    assert not engine.has_work
    (group,) = engine.generate([ask("first", prompt(4))])
    assert_sample_is_reference(t_full, prompt(4), group.samples[0], 8)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_case_c5_resumed_samples_still_score_their_prompt(t_full, start, page_size):
    want = Want(prompt_logprobs_from=start)
    engine = make_engine(t_full, page_size=page_size, prefill_tokens=5)
    fields = dict(n=3, seed=3, temperature=1.0, max_new=8, want=want)
    (whole,) = engine.generate([ask("whole", prompt(8), **fields)])
    resume = [SampleResume(index=i, ids=whole.samples[i].ids[: i + 1]) for i in (0, 2)]
    for cold in (make_engine(t_full, page_size=page_size, prefill_tokens=5), engine):
        (rest,) = cold.generate([ask("rest", prompt(8), resume=resume, **fields)])
        expected = reference_logprobs(t_full, prompt(8))[start:]
        np.testing.assert_allclose(rest.prompt_logprobs, expected, atol=1e-4)
        for sample in rest.samples:
            assert_whole(sample)
            assert sample.ids.tolist() == whole.samples[sample.index].ids[sample.index + 1 :].tolist()
        cold.check()


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_sample_of_no_numbers_poisons_no_page(t_full, page_size):
    """Stale NaN in pages that are handed out again reaches nobody."""
    engine = make_engine(t_full, page_size=page_size, kv_tokens=256, prefill_tokens=16)
    with torch.no_grad():
        engine._parts.model.model.embed_tokens.weight[77] = float("nan")
    for round_ in range(4):
        bad = [ask(f"bad{round_}.{i}", [77] * 20 + [i], max_new=5) for i in range(6)]
        *failed, good = engine.generate([*bad, ask("good", prompt(5), max_new=30)])
        assert {group.samples[0].finish for group in failed} == {"error"}
        assert_sample_is_reference(t_full, prompt(5), good.samples[0], 30)
    engine.check()


@pytest.mark.parametrize("max_running", [1, 16])
def test_case_k2_two_workers_equal_one(t_full, max_running):
    """A group split over two engines by explicit seeds is the group of one engine."""
    (whole,) = make_engine(t_full, max_running=max_running).generate(
        [ask("g", prompt(8), n=8, seed=5, temperature=1.0, max_new=16)]
    )
    expected = [sample.ids.tolist() for sample in whole.samples]
    assert len({tuple(ids) for ids in expected}) == 8
    seeds = [derive_seed(5, index) for index in range(8)]
    halves = []
    for part in (seeds[:4], seeds[4:]):
        (group,) = make_engine(t_full).generate([ask("g", prompt(8), n=4, seeds=part, temperature=1.0, max_new=16)])
        halves += [sample.ids.tolist() for sample in group.samples]
    assert halves == expected


def test_a_prompt_shorter_than_a_page_in_the_smallest_engine(t_full):
    engine = make_engine(t_full, page_size=16, kv_tokens=64, max_running=1, prefill_tokens=2)
    (group,) = engine.generate([ask("g", prompt(3), n=3, max_new=20)])
    for sample in group.samples:
        assert_sample_is_reference(t_full, prompt(3), sample, 20)
    engine.check()
