"""What a recipe trains on: questions that open environments, some of them held out.

Owns the seam between a run and its task. Ignores particular tasks, which are modules of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from trainer_bridge.environment import Environment


class Question(Protocol):
    """`environment` opens a new episode; all episodes of a question begin with the same words."""

    @property
    def text(self) -> str: ...

    def environment(self) -> Environment: ...


Q = TypeVar("Q", bound=Question, covariant=True)


@dataclass(frozen=True, slots=True)
class Questions(Generic[Q]):
    training: list[Q]
    held_out: list[Q]
