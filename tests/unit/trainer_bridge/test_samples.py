"""Rollouts to samples: columns, versions, masks over turns, advantages, staleness. Cases B8, C1, I4."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import Conflict, InvalidRequest
from engine.types import CacheHit, GroupOutput, SampleOutput, Span
from trainer_bridge.advantages import (
    add_overlong_penalties,
    assign_advantages,
    group_advantages,
    overlong_penalty,
    split_zero_variance,
)
from trainer_bridge.environment import Action, Message, Observation, Outcome, SingleTurn
from trainer_bridge.episodes import Turn, play
from trainer_bridge.samples import Episode, TrainingSample, is_trainable
from trainer_bridge.staleness import StalenessFilter, lag


def output(
    ids: list[int], index: int = 0, finish: str = "stop", spans: list[Span] | None = None, **options
) -> SampleOutput:
    columns = {"logprobs": -np.arange(1, len(ids) + 1, dtype=np.float32), "logprob_definition": "processed"}
    return SampleOutput(
        index=index, ids=np.array(ids, np.uint32), finish=finish, seed=0,
        spans=[Span(start=0, end=len(ids), policy_version=3)] if spans is None else spans,
        **(columns | options),
    )  # fmt: skip


def group(samples: list[SampleOutput]) -> GroupOutput:
    return GroupOutput(group_id="g", samples=samples, prompt_tokens=2, hit=CacheHit(), policy_version=9)


def recorded(one: SampleOutput, temperature: float = 1.0) -> TrainingSample:
    """A single-turn sample."""
    episode = Episode("g", one.index, np.array([1, 2], np.uint32), temperature)
    episode.record(one)
    return episode.close(1.0)


class Bytes:
    """A codec of one id per character."""

    def render(self, messages, *, first: bool) -> list[int]:
        return [1] * first + [ord(c) for message in messages for c in message.content]

    def decode(self, ids) -> str:
        return "".join(chr(i) for i in ids)


def test_words_that_open_a_group_are_rendered_once() -> None:
    codec, rendered = Bytes(), []
    render = codec.render
    codec.render = lambda messages, *, first: rendered.append(messages) or render(messages, first=first)

    def environments(words: str):
        observation = Observation(messages=(Message("user", words),))
        return [SingleTurn(observation, lambda action: 1.0) for _ in range(8)]

    def generate(turns: list[Turn]) -> list[GroupOutput]:
        return [group([output([5], index) for index in range(turn.n)]) for turn in turns]

    groups = [("a", 0, environments("one")), ("b", 1, environments("two"))]
    played = play(groups, generate, codec, temperature=1.0, max_turns=1)
    assert len(rendered) == 2 and [len(members) for members in played] == [8, 8]
    mixed = [("c", 2, [*environments("one")[:4], *environments("two")[:4]])]
    with pytest.raises(InvalidRequest, match="one first observation"):
        play(mixed, generate, codec, temperature=1.0, max_turns=1)


def test_case_b8_samples_carry_the_versions_of_their_tokens_not_of_the_reply() -> None:
    spans = [Span(start=0, end=10, policy_version=0), Span(start=10, end=40, policy_version=1)]
    sample = recorded(output(list(range(40)), spans=spans))
    assert sample.spans == spans and sample.oldest_version == 0
    assert lag(sample, 1) == 1


def test_errors_and_aborts_make_no_samples() -> None:
    outputs = [output([5]), output([6], 1, "error"), output([], 2, "abort"), output([7], 3, "length")]
    assert [is_trainable(one) for one in outputs] == [True, False, False, True]
    assert not is_trainable(output([8], 4, "abort"))


def test_case_c1_raw_logprobs_at_another_temperature_are_refused() -> None:
    raw = output([5], logprob_definition="raw")
    with pytest.raises(InvalidRequest, match=r"log-probabilities at temperature 0\.6"):
        recorded(raw, temperature=0.6)
    assert recorded(raw).num_trained == 1


def test_columns_of_unequal_length_or_uncovered_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="logprobs: expected 2 values"):
        recorded(output([5, 6], logprobs=np.zeros(1, np.float32)))
    with pytest.raises(InvalidRequest, match="a policy version for every trained token"):
        recorded(output([5, 6], spans=[Span(start=0, end=1, policy_version=0)]))


class Guess:
    """Guess a letter within three turns; each wrong guess costs 0.1."""

    def __init__(self, letter: str) -> None:
        self.letter = letter

    def reset(self) -> Observation:
        return Observation(messages=(Message("user", "?"),))

    def step(self, action: Action) -> Outcome:
        if action.text == self.letter:
            return Outcome(1.0)
        return Outcome(-0.1, done=False, observation=Observation(ids=(77, 78)))


class Table:
    """Answers in order, one list of outputs for each turn asked; remembers the turns."""

    def __init__(self, *answers: list[SampleOutput]) -> None:
        self.answers = iter(answers)
        self.turns: list[Turn] = []

    def __call__(self, turns: list[Turn]) -> list[GroupOutput]:
        self.turns += turns
        return [group(next(self.answers)) for _ in turns]


def episode(environment, generate, max_turns: int) -> TrainingSample | None:
    (((played,),)) = play([("g", 7, [environment])], generate, Bytes(), temperature=1.0, max_turns=max_turns)
    return played.sample


def test_turns_are_one_sample_whose_mask_is_the_policys_own_tokens() -> None:
    table = Table([output([65])], [output([66, 66])], [output([67])])
    sample = episode(Guess("C"), table, 5)
    assert sample is not None
    prompts = [turn.prompt_ids.tolist() for turn in table.turns]
    assert prompts == [[1, 63], [1, 63, 65, 77, 78], [1, 63, 65, 77, 78, 66, 66, 77, 78]]
    assert len({turn.seed for turn in table.turns}) == 3 and table.turns[0].seed == 7
    assert sample.output_ids.tolist() == [65, 77, 78, 66, 66, 77, 78, 67]
    assert sample.loss_mask.tolist() == [True, False, False, True, True, False, False, True]
    assert sample.rollout_logprobs.tolist() == [-1, 0, 0, -1, -2, 0, 0, -1]
    assert [(s.start, s.end) for s in sample.spans] == [(0, 1), (3, 5), (7, 8)]
    assert sample.reward == pytest.approx(0.8) and sample.num_trained == 4


def test_a_group_opens_as_one_request_and_its_episodes_go_on_alone() -> None:
    table = Table([output([65]), output([66]), output([67])], [output([67])], [output([], finish="abort")])
    groups = [("g", 7, [Guess("A"), Guess("C"), Guess("B")])]
    ((right, later, lost),) = play(groups, table, Bytes(), temperature=1.0, max_turns=2)
    assert [(turn.group_id, turn.n) for turn in table.turns] == [("g", 3), ("g/1/1", 1), ("g/2/1", 1)]
    assert right.sample is not None and (right.sample.index, right.sample.reward) == (0, 1.0)
    assert later.sample is not None and later.sample.output_ids.tolist() == [66, 77, 78, 67]
    assert (later.sample.index, later.sample.reward) == (1, pytest.approx(0.9))
    assert lost.sample is None and len(lost.outputs) == 2
    with pytest.raises(InvalidRequest, match="one first observation"):
        unlike = SingleTurn(Observation(ids=(4,)), lambda action: 0.0)
        play([("g", 7, [Guess("A"), unlike])], table, Bytes(), temperature=1.0, max_turns=2)


def test_an_episode_ends_at_its_last_turn_or_with_a_failed_one() -> None:
    sample = episode(Guess("C"), Table([output([65])], [output([65])]), 2)
    assert sample is not None and sample.output_ids.tolist() == [65, 77, 78, 65]
    assert sample.reward == pytest.approx(-0.2)
    assert episode(Guess("C"), Table([output([], finish="error")]), 2) is None
    with pytest.raises(InvalidRequest, match="max_turns"):
        episode(Guess("C"), Table(), 0)


def test_single_turn_is_a_verifier() -> None:
    environment = SingleTurn(Observation(ids=(4,)), lambda action: float(action.text == "A"))
    sample = episode(environment, Table([output([65])]), 1)
    assert sample is not None and sample.reward == 1.0 and sample.prompt_ids.tolist() == [4]


@pytest.mark.parametrize(
    "make", [lambda: Observation(), lambda: Observation(ids=(1,), messages=()), lambda: Outcome(0.0, done=False),
             lambda: Outcome(0.0, observation=Observation(ids=(1,)))],
)  # fmt: skip
def test_contradictory_observations_and_outcomes_are_refused(make) -> None:
    with pytest.raises(InvalidRequest):
        make()


def test_advantages_by_hand() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(group_advantages(rewards, divide_by_std=True), [1, -1, -1, 1], rtol=1e-5)
    np.testing.assert_allclose(group_advantages(rewards, divide_by_std=False), [0.5, -0.5, -0.5, 0.5])
    assert group_advantages(np.ones(3), divide_by_std=True).tolist() == [0, 0, 0]
    with pytest.raises(InvalidRequest, match="rewards"):
        group_advantages(np.array([1.0, np.nan]), divide_by_std=True)


def test_groups_are_judged_apart_and_those_without_variance_filtered(make_sample) -> None:
    samples = [
        make_sample(group=g, index=i, reward=r)
        for i, (g, r) in enumerate([("a", 1), ("b", 5), ("a", 0), ("b", 5), ("c", 2)])
    ]
    assign_advantages(samples, divide_by_std=False)
    assert [s.advantage for s in samples] == [0.5, 0.0, -0.5, 0.0, 0.0]
    kept, left_out = split_zero_variance(samples)
    assert [s.group_id for s in kept] == ["a", "a"] and left_out == 2


@pytest.mark.parametrize(("length", "penalty"), [(10, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)])
def test_overlong_penalty_is_linear_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_new=20, buffer=4) == penalty


def test_overlong_penalties_count_the_policys_own_tokens(make_sample) -> None:
    samples = [make_sample(output=6, reward=1.0), make_sample(output=6, reward=1.0, mask=[True, False] * 3)]
    add_overlong_penalties(samples, max_new=6, buffer=2)
    assert [sample.reward for sample in samples] == [0.0, 1.0]
    with pytest.raises(InvalidRequest, match="buffer"):
        add_overlong_penalties(samples, max_new=6, buffer=7)


def test_case_i4_staleness_counts_from_the_oldest_token_and_is_never_negative(make_sample) -> None:
    queue = [make_sample(index=i, version=v) for i, v in enumerate([55, 57, 54])]
    mixed = make_sample(index=3)
    mixed.spans = [Span(start=0, end=2, policy_version=54), Span(start=2, end=4, policy_version=57)]
    keep = StalenessFilter(max_lag=2)
    assert [s.index for s in keep.apply([*queue, mixed], 57)] == [0, 1]
    assert (keep.kept, keep.dropped) == (2, 2)
    with pytest.raises(Conflict, match=r"at most the trainer's 1, got 5[57]"):
        keep.apply(queue, 1)
    with pytest.raises(InvalidRequest, match="max_lag"):
        StalenessFilter(-1)


def test_an_episode_without_turns_has_nothing_to_train_on() -> None:
    sample = Episode("g", 0, np.array([1], np.uint32), 1.0).close(0.0)
    assert isinstance(sample, TrainingSample) and sample.num_trained == 0
