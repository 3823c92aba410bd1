"""Plays environments against a policy, turn by turn.

Owns the loop of one episode and the mask it leaves behind. Ignores who samples: `generate` is
any function from prompt ids to one sample (a client, an engine, a table in a test).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import InvalidRequest
from engine.types import SampleOutput
from trainer_bridge.environment import Action, Environment, Observation, TextCodec
from trainer_bridge.samples import Episode, TrainingSample, is_trainable

Generate = Callable[[np.ndarray], SampleOutput]


def play(
    environment: Environment,
    generate: Generate,
    codec: TextCodec,
    *,
    group_id: str,
    index: int,
    temperature: float,
    max_turns: int,
) -> TrainingSample | None:
    """One episode as a sample, or None where the policy's turn failed or was aborted.

    An episode still running after `max_turns` ends with the reward it has.
    """
    if max_turns < 1:
        raise InvalidRequest(field="max_turns", expected="at least 1", actual=max_turns)
    first = observation_ids(environment.reset(), codec, first=True)
    episode = Episode(group_id, index, first, temperature)
    total = 0.0
    for turn in range(max_turns):
        output = generate(episode.context_ids)
        if not is_trainable(output):
            return None
        episode.record(output)
        outcome = environment.step(action_of(output, codec))
        total += outcome.reward
        if outcome.observation is None:
            break
        if turn + 1 < max_turns:
            episode.observe(observation_ids(outcome.observation, codec, first=False))
    return episode.close(total)


def observation_ids(observation: Observation, codec: TextCodec, *, first: bool) -> np.ndarray:
    if observation.messages is not None:
        return np.asarray(codec.render(observation.messages, first=first), np.uint32)
    return np.asarray(observation.ids, np.uint32)


def action_of(output: SampleOutput, codec: TextCodec) -> Action:
    ids = tuple(int(i) for i in output.ids)
    return Action(ids=ids, text=codec.decode(ids), finish=output.finish)
