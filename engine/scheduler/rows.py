"""Samples that decode together, as columns.

Owns what a launch reads of every row: gathered once, and what stays as long as a row does is kept by its slot.
A host has about as long to launch a round as it takes. Ignores what is made of it.

Shapes: B rows, S slots, C columns.
"""

from __future__ import annotations

import numpy as np

from engine.request import Sample
from engine.scheduler.pages import Sequence

_KEY, _SLOT, _PROMPT, _MAX_NEW, _ARRIVAL, _MOST, _LEAST, _ORDINARY, _BASE = range(9)
_UNBOUNDED = 1 << 31


class Rows:
    """`samples` with columns int64 [B]: `known_B` new tokens, as of when these rows were gathered, and what is said of
    them by name below."""

    def __init__(self, samples: list[Sample], facts_BC: np.ndarray, known_B: np.ndarray) -> None:
        self.samples = samples
        self._facts_BC = facts_BC
        self.known_B = known_B
        self.length_B = facts_BC[:, _PROMPT] + known_B
        """Prompt and new tokens."""

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, places: np.ndarray) -> Rows:
        samples = self.samples
        return Rows([samples[b] for b in places.tolist()], self._facts_BC[places], self.known_B[places])

    def sequence(self, row: int) -> Sequence:
        sequence = self.samples[row].sequence
        assert sequence is not None
        return sequence

    @property
    def keys_B(self) -> np.ndarray:
        """Incarnations of their sequences."""
        return self._facts_BC[:, _KEY]

    @property
    def slots_B(self) -> np.ndarray:
        return self._facts_BC[:, _SLOT]

    @property
    def remaining_B(self) -> np.ndarray:
        return self._facts_BC[:, _MAX_NEW] - self.known_B

    @property
    def end_B(self) -> np.ndarray:
        """Tokens that there will be at most."""
        return self._facts_BC[:, _PROMPT] + self._facts_BC[:, _MAX_NEW]

    @property
    def least_B(self) -> np.ndarray:
        """Drafts that the requests want at least."""
        return self._facts_BC[:, _LEAST]

    @property
    def most_B(self) -> np.ndarray:
        """Drafts that the requests want at most."""
        return self._facts_BC[:, _MOST]

    @property
    def particular(self) -> list[Sample]:
        """Those whose logits are truncated or edited, or who want more than a token's log-probability."""
        places = np.flatnonzero(self._facts_BC[:, _ORDINARY] == 0).tolist()
        return [self.samples[b] for b in places]

    @property
    def adapted(self) -> bool:
        """Whether any has an adapter."""
        return not self._facts_BC[:, _BASE].all()

    @property
    def distinct_tokens(self) -> float:
        """Tokens in all contexts, a group's prompt counted once."""
        arrivals, prompts = self._facts_BC[:, _ARRIVAL].tolist(), self._facts_BC[:, _PROMPT].tolist()
        return float(int(self.known_B.sum()) + sum(dict(zip(arrivals, prompts, strict=True)).values()))


def drafting_first(rows: Rows, most_B: np.ndarray) -> tuple[Rows, np.ndarray]:
    """Those without drafts behind the others."""
    if most_B.all():
        return rows, most_B
    order = np.argsort(most_B == 0, kind="stable")
    return rows.take(order), most_B[order]


class RowColumns:
    """Gathers rows. What it keeps of a slot holds for the sequence whose key it has, 0 for none."""

    def __init__(self, num_slots: int) -> None:
        self._facts_SC = np.zeros((num_slots, 9), dtype=np.int64)

    def rows(self, samples: list[Sample]) -> Rows:
        """Of samples that have sequences."""
        sequences = [sample.sequence for sample in samples]
        slots = np.array([sequence.slot for sequence in sequences if sequence is not None], dtype=np.int64)
        keys = np.array([sequence.key for sequence in sequences if sequence is not None], dtype=np.int64)
        assert len(slots) == len(samples), "a row without a sequence"
        for b in np.flatnonzero(self._facts_SC[slots, _KEY] != keys).tolist():
            self._facts_SC[slots[b]] = _facts(samples[b])
        known_B = np.array([len(sample.ids) for sample in samples], dtype=np.int64)
        return Rows(list(samples), self._facts_SC[slots], known_B)


def _facts(sample: Sample) -> list[int]:
    """What stays as it is while the sample has this sequence."""
    sequence, group, row = sample.sequence, sample.group, sample.row
    assert sequence is not None
    asked = group.request.draft_window
    most = _UNBOUNDED if asked is None or asked.most is None else asked.most
    least = 0 if asked is None else asked.least
    ordinary = row.bare and not (row.truncates or row.may_edit)
    places = (sequence.key, sequence.slot, len(group.prompt), row.params.max_new, group.arrival)
    return [*places, most, least, int(ordinary), int(group.lease is None)]
