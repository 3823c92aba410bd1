"""The order in which training questions are asked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Q = TypeVar("Q")


class Order:
    """Epochs of seeded permutations. `asked` alone is the state, so a resumed run goes on exactly."""

    def __init__(self, seed: int, asked: int = 0) -> None:
        self._seed = seed
        self.asked = asked

    def take(self, questions: Sequence[Q], count: int) -> list[Q]:
        """The next `count` questions; a question comes again only after all others have."""
        taken = []
        for place in range(self.asked, self.asked + count):
            epoch, offset = divmod(place, len(questions))
            taken.append(questions[self._permutation(epoch, len(questions))[offset]])
        self.asked += count
        return taken

    def _permutation(self, epoch: int, size: int) -> list[int]:
        indices = list(range(size))
        random.Random(f"{self._seed}/{epoch}").shuffle(indices)
        return indices
