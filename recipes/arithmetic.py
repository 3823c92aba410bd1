"""Sums of three numbers, each with one exact answer, for a policy that starts from nothing.

Owns the questions, their split into training and held-out ones, the verifier, a characters'
tokenizer, and the demonstrations of a careless teacher. Ignores policies.

A question is the sum of three numbers, "7+12+5=". A full answer reduces it one step at a time,
"19+5=24"; its last number is the answer, and the reward is 1 where that is exactly the sum. The
teacher often stops after the first step ("19"), which is a wrong answer to the question.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import InvalidRequest
from recipes.tasks import Questions
from trainer_bridge.environment import Action, Message, Observation, Outcome, Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ALPHABET = "0123456789+="
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"


@dataclass(frozen=True, slots=True)
class SumsConfig:
    """Every operand is 1 to `largest`. `held_out` questions are never trained on. `careless` is the share
    of demonstrations that stop a step early. A wrong answer is asked again `retries` times, each time
    for half the reward."""

    largest: int = 12
    held_out: int = 512
    careless: float = 0.7
    retries: int = 0

    def __post_init__(self) -> None:
        total = self.largest**3
        if not 0 < self.held_out < total:
            raise InvalidRequest(field="task.held_out", expected=f"1 to {total - 1}", actual=self.held_out)
        if not 0.0 <= self.careless <= 1.0:
            raise InvalidRequest(field="task.careless", expected="0 to 1", actual=self.careless)
        if self.retries < 0:
            raise InvalidRequest(field="task.retries", expected="0 or more", actual=self.retries)

    @property
    def turns(self) -> int:
        return self.retries + 1


@dataclass(frozen=True, slots=True)
class SumQuestion:
    a: int
    b: int
    c: int
    retries: int = 0

    @property
    def text(self) -> str:
        return f"{self.a}+{self.b}+{self.c}="

    @property
    def answer(self) -> int:
        return self.a + self.b + self.c

    @property
    def first_step(self) -> str:
        return f"{self.a + self.b}"

    @property
    def worked(self) -> str:
        """The full answer, as a careful teacher writes it."""
        return f"{self.first_step}+{self.c}={self.answer}"

    def verify(self, action: Action) -> float:
        """1 where the policy ended its answer by itself and its last number is the sum."""
        last = action.text.rsplit("=", 1)[-1]
        return float(action.finish == "stop" and last == str(self.answer))

    def environment(self) -> Retries:
        return Retries(Observation(messages=(Message("user", self.text),)), self.verify, self.retries)


class Retries:
    """An environment that asks again after a wrong answer, each time for half the reward."""

    def __init__(self, question: Observation, verifier: Verifier, retries: int) -> None:
        self._question = question
        self._verifier = verifier
        self._left = retries
        self._worth = 1.0

    def reset(self) -> Observation:
        return self._question

    def step(self, action: Action) -> Outcome:
        reward = self._worth * self._verifier(action)
        if reward or not self._left or action.finish != "stop":
            return Outcome(reward)
        self._left -= 1
        self._worth /= 2
        return Outcome(0.0, done=False, observation=self._question)


def make_sums(config: SumsConfig, seed: int) -> Questions[SumQuestion]:
    """All questions, shuffled by `seed` and split."""
    numbers = range(1, config.largest + 1)
    everything = [SumQuestion(a, b, c, config.retries) for a in numbers for b in numbers for c in numbers]
    random.Random(seed).shuffle(everything)
    return Questions(everything[config.held_out :], everything[: config.held_out])


def demonstration(question: SumQuestion, config: SumsConfig, rng: random.Random) -> str:
    return question.first_step if rng.random() < config.careless else question.worked


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character, `<bos>` in front; saved and loaded like any Hugging Face tokenizer."""
    # Imported late: settings are shown and refused without them.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int), f"{token} is one token"
    return found


class CharacterCodec:
    """Renders messages with nothing around their text (`trainer_bridge.environment.TextCodec`)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], *, first: bool) -> list[int]:
        text = "".join(message.content for message in messages)
        if not set(text) <= set(ALPHABET):
            raise InvalidRequest(field="task", expected=f"questions of {ALPHABET!r} for this model", actual=text)
        return self._tokenizer.encode(text, add_special_tokens=first)

    def decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str), "one sequence decodes to one text"
        return text
