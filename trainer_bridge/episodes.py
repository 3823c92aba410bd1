"""Plays environments against a policy, all episodes of a step side by side.

Owns the loop of turns and the mask it leaves behind. Ignores who samples: `generate` is any
function from requests to their replies (a service, an engine, a table in a test). Episodes of a
group share their first prompt, so their first turn is one request for the whole group; from then
on each asks for itself, and finds its own words in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.errors import InvalidRequest
from engine.types import GroupOutput, SampleOutput
from trainer_bridge.environment import Action, Environment, Observation, TextCodec
from trainer_bridge.samples import Episode, TrainingSample, is_trainable


@dataclass(frozen=True, slots=True)
class Turn:
    """Asks for `n` samples after `prompt_ids`. `seed` is the group's, spread over its samples and
    turns."""

    group_id: str
    prompt_ids: np.ndarray
    n: int
    seed: int


Generate = Callable[[list[Turn]], list[GroupOutput]]


@dataclass(slots=True)
class Played:
    """One episode as it went. `sample` is None where a turn of the policy failed or was aborted."""

    group_id: str
    index: int
    outputs: list[SampleOutput] = field(default_factory=list)
    replies: list[GroupOutput] = field(default_factory=list)
    sample: TrainingSample | None = None


@dataclass(slots=True)
class _Running:
    played: Played
    environment: Environment
    episode: Episode
    seed: int
    reward: float = 0.0


def play(
    groups: Sequence[tuple[str, int, Sequence[Environment]]],
    generate: Generate,
    codec: TextCodec,
    *,
    temperature: float,
    max_turns: int,
) -> list[list[Played]]:
    """Episodes by group, in the order of the environments.

    A group is its id, its seed and one environment for each of its samples, all of which must
    open with the same words. An episode still running after `max_turns` ends with the reward it has.
    """
    if max_turns < 1:
        raise InvalidRequest(field="max_turns", expected="at least 1", actual=max_turns)
    begun = [_begin(group_id, seed, members, codec, temperature) for group_id, seed, members in groups]
    asked = begun
    turns = [
        Turn(group_id, members[0].episode.prompt_ids, len(members), seed)
        for (group_id, seed, _), members in zip(groups, begun, strict=True)
    ]
    for turn in range(max_turns):
        running: list[_Running] = []
        for members, reply in zip(asked, generate(turns), strict=True):
            for member, output in zip(members, reply.samples, strict=True):
                member.played.replies.append(reply)
                if _answer(member, output, codec, last=turn + 1 == max_turns):
                    running.append(member)
        if not running:
            break
        asked = [[member] for member in running]
        turns = [
            Turn(f"{m.played.group_id}/{m.played.index}/{turn + 1}", m.episode.context_ids, 1, _seed(m, turn + 1))
            for m in running
        ]
    return [[member.played for member in members] for members in begun]


def _begin(
    group_id: str, seed: int, environments: Sequence[Environment], codec: TextCodec, temperature: float
) -> list[_Running]:
    # The same words are rendered once: a template and a tokenizer take longer than some steps.
    words = [environment.reset() for environment in environments]
    others = [observation for observation in words[1:] if observation != words[0]]
    prompts = [observation_ids(observation, codec, first=True) for observation in (*words[:1], *others)]
    if not prompts or any(not np.array_equal(prompt, prompts[0]) for prompt in prompts):
        raise InvalidRequest(field=f"group {group_id}", expected="one first observation", actual=len(prompts))
    return [
        _Running(Played(group_id, index), environment, Episode(group_id, index, prompts[0], temperature), seed)
        for index, environment in enumerate(environments)
    ]


def _answer(member: _Running, output: SampleOutput, codec: TextCodec, *, last: bool) -> bool:
    """Takes the policy's turn; True where the episode goes on."""
    member.played.outputs.append(output)
    if not is_trainable(output):
        return False
    member.episode.record(output)
    outcome = member.environment.step(action_of(output, codec))
    member.reward += outcome.reward
    if outcome.observation is None or last:
        member.played.sample = member.episode.close(member.reward)
        return False
    member.episode.observe(observation_ids(outcome.observation, codec, first=False))
    return True


def _seed(member: _Running, turn: int) -> int:
    return int(np.random.SeedSequence([member.seed, member.played.index, turn]).generate_state(1, np.uint32)[0])


def observation_ids(observation: Observation, codec: TextCodec, *, first: bool) -> np.ndarray:
    if observation.messages is not None:
        return np.asarray(codec.render(observation.messages, first=first), np.uint32)
    return np.asarray(observation.ids, np.uint32)


def action_of(output: SampleOutput, codec: TextCodec) -> Action:
    ids = tuple(output.ids.tolist())
    return Action(ids=ids, text=codec.decode(ids), finish=output.finish)
