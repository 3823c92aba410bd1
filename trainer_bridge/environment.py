"""Where rewards come from.

Owns the interface between a policy and a task: what the policy is shown, what it answers, what
that is worth, whether the episode goes on. One turn is the case of a verifier; several turns are
an environment that keeps state. Ignores how answers are sampled (`episodes` runs the loop) and
how they are trained on (`samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import InvalidRequest
from engine.types import FinishReason


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment says: token ids, run as they are, or messages to be rendered."""

    ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None

    def __post_init__(self) -> None:
        if (self.ids is None) == (self.messages is None):
            raise InvalidRequest(field="observation", expected="ids or messages, not both", actual=self)


@dataclass(frozen=True, slots=True)
class Action:
    """One answer of the policy. `text` is the decoded ids without special tokens."""

    ids: tuple[int, ...]
    text: str
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reward` is added to the episode's. An episode that is not `done` needs an observation."""

    reward: float
    done: bool = True
    observation: Observation | None = None

    def __post_init__(self) -> None:
        if self.done == (self.observation is not None):
            raise InvalidRequest(field="outcome", expected="an observation exactly while not done", actual=self)


class Environment(Protocol):
    """One episode; `reset` gives its first observation and may be called once."""

    def reset(self) -> Observation: ...

    def step(self, action: Action) -> Outcome: ...


Verifier = Callable[[Action], float]


class SingleTurn:
    """An environment of one question and a verifier for its answer."""

    def __init__(self, question: Observation, verifier: Verifier) -> None:
        self._question = question
        self._verifier = verifier

    def reset(self) -> Observation:
        return self._question

    def step(self, action: Action) -> Outcome:
        return Outcome(self._verifier(action))


class TextCodec(Protocol):
    """Text to ids and back. `render` must be called on new messages only: what has been sampled
    or shown once stays as the ids it was and is never tokenised again."""

    def render(self, messages: Sequence[Message], *, first: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...
