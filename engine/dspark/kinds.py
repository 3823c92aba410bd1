"""Which kind each of some rows is of.

Owns that form: the kinds that occur, once each, and every row's place among them, so that what is worked out by kind
is worked out once. Ignores what kinds are.

Shapes: N rows, U kinds, P parts, G drafts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

K = TypeVar("K", bound=Hashable)
K_co = TypeVar("K_co", bound=Hashable, covariant=True)


@dataclass(frozen=True, slots=True)
class Kinds(Generic[K_co]):
    """Row n is of `names[place_N[n]]`. After `take` some names may have no rows."""

    names: Sequence[K_co]
    place_N: np.ndarray

    @staticmethod
    def of(kinds: Sequence[K]) -> Kinds[K]:
        names = list(dict.fromkeys(kinds))
        if len(names) == 1:
            return Kinds(names, np.zeros(len(kinds), dtype=np.int64))
        places = {name: place for place, name in enumerate(names)}
        return Kinds(names, np.array([places[kind] for kind in kinds], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.place_N)

    def take(self, rows: np.ndarray | slice) -> Kinds[K_co]:
        """Those of other rows: any of these, any number of times."""
        return Kinds(self.names, self.place_N[rows])

    def each(self, values_U: np.ndarray) -> np.ndarray:
        """Values by kind as values by row."""
        return values_U[self.place_N]

    def members(self) -> list[tuple[K_co, slice | np.ndarray]]:
        """Each kind that has rows, and which those are."""
        if len(self.names) == 1:
            return [(self.names[0], slice(None))] if len(self) else []
        found = [(name, np.flatnonzero(self.place_N == place)) for place, name in enumerate(self.names)]
        return [(name, rows) for name, rows in found if len(rows)]

    def sums(self, parts_PNG: np.ndarray) -> list[tuple[K_co, int, np.ndarray]]:
        """Each kind that has rows, how many, and their sums [P, G]."""
        own = [(name, parts_PNG[:, rows]) for name, rows in self.members()]
        return [(name, own_PMG.shape[1], own_PMG.sum(1)) for name, own_PMG in own]
