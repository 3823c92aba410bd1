"""Sums and products of two one-digit numbers, for a small model that speaks English.

Owns the questions, their split and the verifier. Ignores policies. A pair and its mirror image
(3 + 8, 8 + 3) are on the same side of the split, with the sum and the product alike: no held-out
answer can be copied from training. Several of them may be asked at once, whose answers are longer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

from engine.errors import InvalidRequest
from recipes.tasks import Questions
from trainer_bridge.environment import Action, Message, Observation, SingleTurn

Operation = Literal["+", "*"]


@dataclass(frozen=True, slots=True)
class DigitPairsConfig:
    """Both numbers are 1 to 9: 45 pairs, of which `held_out` are never trained on. `prompt` is what
    the policy is asked, with `{a}`, `{op}` (a sign) and `{b}`, `begun` the beginning of its answer.
    With `chain` more than 1 a question is so many of them, `{all}` in `prompt`, to be written out one a line."""

    held_out: int = 12
    prompt: str = "What is {a} {op} {b}?"
    begun: str = "{a} {op} {b} = "
    chain: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.chain <= 32:
            raise InvalidRequest(field="task.chain", expected="1 to 32", actual=self.chain)
        if not 0 < self.held_out < 45:
            raise InvalidRequest(field="task.held_out", expected="1 to 44", actual=self.held_out)

    @property
    def turns(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class PairQuestion:
    a: int
    op: Operation
    b: int
    prompt: str
    begun: str
    others: tuple[PairQuestion, ...] = ()
    """Asked after it in the same question."""

    @property
    def term(self) -> str:
        return f"{self.a} {self.op} {self.b}"

    @property
    def text(self) -> str:
        every = ", ".join(one.term for one in (self, *self.others))
        return self.prompt.format(a=self.a, op=self.op, b=self.b, all=every)

    @property
    def answer(self) -> int:
        return self.a + self.b if self.op == "+" else self.a * self.b

    def verify(self, action: Action) -> float:
        """1 where the policy says exactly the result and then ends its answer by itself. Of several, the share of
        lines that are right; each line too many is a wrong one."""
        if not self.others:
            return float(action.finish == "stop" and action.text == str(self.answer))
        written = f"{self._beginning}{action.text}".split("\n")
        expected = [f"{one.term} = {one.answer}" for one in (self, *self.others)]
        right = sum(line == wanted for line, wanted in zip(written, expected, strict=False))
        return right / max(len(written), len(expected))

    def environment(self) -> SingleTurn:
        begun = Message("assistant", self._beginning)
        return SingleTurn(Observation(messages=(Message("user", self.text), begun)), self.verify)

    @property
    def _beginning(self) -> str:
        return self.begun.format(a=self.a, op=self.op, b=self.b)


def make_digit_pairs(config: DigitPairsConfig, seed: int) -> Questions[PairQuestion]:
    """All questions, split by pair."""
    pairs = [(a, b) for a in range(1, 10) for b in range(a, 10)]
    random.Random(seed).shuffle(pairs)

    def questions(chosen: list[tuple[int, int]]) -> list[PairQuestion]:
        orders = [order for a, b in chosen for order in sorted({(a, b), (b, a)})]
        singles = [PairQuestion(a, op, b, config.prompt, config.begun) for a, b in orders for op in ("+", "*")]
        if config.chain == 1:
            return singles
        rng = random.Random(f"{seed}/{config.chain}")
        return [replace(one, others=tuple(rng.choices(singles, k=config.chain - 1))) for one in singles]

    return Questions(questions(pairs[config.held_out :]), questions(pairs[: config.held_out]))
