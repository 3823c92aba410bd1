"""Answers that somebody else wrote, as examples: what learning off policy is.

Owns the cut between what is asked and what is answered. Ignores where conversations come from and what the
target would have said (`trainer_bridge.drafter.responses`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.responses import Dialogue
from trainer_bridge.environment import Message, TextCodec


class GivenAnswers:
    """Stands where a `Responder` does. An answer ends with `end_id`, or where it is cut after `max_new` tokens, and
    so does the conversation then."""

    def __init__(self, codec: TextCodec, end_id: int, max_new: int) -> None:
        self._codec, self._end_id, self._max_new = codec, end_id, max_new

    def respond(self, dialogues: Sequence[Dialogue]) -> list[DraftExample]:
        """An example of each dialogue that has a first answer."""
        return [example for dialogue in dialogues if (example := self._example(dialogue)) is not None]

    def _example(self, dialogue: Dialogue) -> DraftExample | None:
        ids: list[int] = []
        mask: list[bool] = []
        turns = [dialogue.opening, *((message,) for message in dialogue.following)]
        for number, (asked, text) in enumerate(zip(turns, dialogue.given, strict=False)):
            question = self._codec.render(asked, first=number == 0)
            both = self._codec.render([*asked, Message("assistant", text)], first=number == 0)
            if both[: len(question)] != question or len(both) == len(question):
                break  # The first words of the answer belong to a token of the template.
            answer = both[len(question) :]
            whole = len(answer) < self._max_new
            answer = [*answer, self._end_id] if whole else answer[: self._max_new]
            ids += question + answer
            mask += [False] * len(question) + [True] * len(answer)
            if not whole:
                break
        if not any(mask):
            return None
        return DraftExample(f"{dialogue.key}/0", dialogue.domain, np.array(ids, np.uint32), np.array(mask, bool))
