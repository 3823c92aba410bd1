"""Answers written by the target itself: what a drafter has to imitate.

Owns asking an engine for them, conversation by conversation, in portions that are safe on disk before the
next begins. User turns are given; every assistant turn is sampled anew, and later turns follow the
target's own words. Ignores where conversations come from and templates (a `TextCodec`'s business).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine import Engine
from engine.errors import InvalidRequest
from engine.types import GroupOutput, GroupRequest, SamplingParams
from trainer_bridge.drafter.config import SamplingConfig
from trainer_bridge.drafter.examples import DraftExample, ExampleLog, from_sample
from trainer_bridge.environment import Action, Message, Observation, Outcome, TextCodec
from trainer_bridge.episodes import Turn, play


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One side of a conversation: what is said before the first answer, then what follows each answer. `given` are
    answers of somebody else, from the first on, which the target never hears."""

    key: str
    domain: str
    opening: tuple[Message, ...]
    following: tuple[Message, ...] = ()
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.opening or not any(message.content for message in self.opening):
            raise InvalidRequest(field=f"conversation {self.key}", expected="something said", actual="nothing")


class _Scripted:
    """An environment that says its lines whatever it hears."""

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self._said = 0

    def reset(self) -> Observation:
        return Observation(messages=self._dialogue.opening)

    def step(self, action: Action) -> Outcome:
        following = self._dialogue.following
        if action.finish != "stop" or self._said == len(following):
            return Outcome(0.0)
        self._said += 1
        return Outcome(0.0, done=False, observation=Observation(messages=(following[self._said - 1],)))


class Answers(Protocol):
    """Where examples come from."""

    def respond(self, dialogues: Sequence[Dialogue]) -> list[DraftExample]: ...


class Responder:
    """Samples answers in one process. `stop_ids` end an answer beside the model's own."""

    def __init__(self, engine: Engine, codec: TextCodec, config: SamplingConfig, stop_ids: Sequence[int] = ()) -> None:
        self._engine, self._codec, self._config, self._stop_ids = engine, codec, config, list(stop_ids)

    def respond(self, dialogues: Sequence[Dialogue]) -> list[DraftExample]:
        """`samples` examples a dialogue. Dialogues whose prompt is too long for the engine yield none, and
        answers that failed are left out."""
        fitting = [dialogue for dialogue in dialogues if self._room(dialogue) >= 1]
        cold = [_share(self._seed(dialogue)) < self._config.greedy for dialogue in fitting]
        found: dict[str, list[DraftExample]] = {}
        for greedy, temperature in ((True, 0.0), (False, self._config.temperature)):
            part = [dialogue for dialogue, is_cold in zip(fitting, cold, strict=True) if is_cold == greedy]
            if part:
                found |= self._answer(part, temperature)
        return [example for dialogue in fitting for example in found[dialogue.key]]

    def _answer(self, dialogues: Sequence[Dialogue], temperature: float) -> dict[str, list[DraftExample]]:
        """Examples by key."""
        groups = [
            (dialogue.key, self._seed(dialogue), [_Scripted(dialogue) for _ in range(self._config.samples)])
            for dialogue in dialogues
        ]

        def generate(turns: list[Turn]) -> list[GroupOutput]:
            return self._engine.generate([self._request(turn, temperature) for turn in turns])

        turns = 1 + max(len(dialogue.following) for dialogue in dialogues)
        played = play(groups, generate, self._codec, temperature=temperature, max_turns=turns)
        return {
            dialogue.key: [
                from_sample(one.sample, dialogue.domain)
                for one in members
                if one.sample is not None and one.sample.num_trained
            ]
            for dialogue, members in zip(dialogues, played, strict=True)
        }

    def _request(self, turn: Turn, temperature: float) -> GroupRequest:
        config, limits = self._config, self._engine.limits
        room = min(limits.context_len, limits.pool_tokens) - len(turn.prompt_ids)
        return GroupRequest(
            group_id=turn.group_id,
            prompt_ids=turn.prompt_ids,
            n=turn.n,
            sampling=SamplingParams(
                temperature=temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                max_new=max(1, min(config.max_new, room)),
                stop_ids=self._stop_ids,
                seed=turn.seed,
            ),
        )

    def _room(self, dialogue: Dialogue) -> int:
        limits = self._engine.limits
        return min(limits.context_len, limits.pool_tokens) - len(self._codec.render(dialogue.opening, first=True))

    def _seed(self, dialogue: Dialogue) -> int:
        digest = hashlib.sha256(f"{self._config.seed}/{dialogue.key}".encode()).digest()
        return int.from_bytes(digest[:4], "little")


def _share(seed: int) -> float:
    """In [0, 1), of a conversation's seed."""
    digest = hashlib.sha256(f"greedy/{seed}".encode()).digest()
    return int.from_bytes(digest[:4], "little") / (1 << 32)


def regenerate(
    responder: Answers,
    dialogues: Sequence[Dialogue],
    log: ExampleLog,
    portion: int,
    observe: Callable[[int, list[DraftExample]], bool],
) -> bool:
    """Fill `log` with answers to the dialogues that it has none of. After every `portion` of dialogues
    `observe` gets how many are done, and what is new; where it returns false the rest is left for later.
    True once nothing is left."""
    answered = {key.rsplit("/", 1)[0] for key in log.keys}
    left = [dialogue for dialogue in dialogues if dialogue.key not in answered]
    done = len(dialogues) - len(left)
    for part in portions(left, portion):
        fresh = responder.respond(part)
        log.append(fresh)
        done += len(part)
        if not observe(done, fresh) and done < len(dialogues):
            return False
    return True


def portions(items: Sequence[Dialogue], size: int) -> Iterator[list[Dialogue]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])


def mean_length(examples: Sequence[DraftExample]) -> float:
    return float(np.mean([example.num_tokens for example in examples])) if examples else float("nan")
