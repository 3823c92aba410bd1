"""What the device did in rounds that it ran by itself, and what became of their drafts.

Owns that as columns, and as steps such as the serial loop tells of for whoever looks at one: with hundreds of rows a
host has no time to take all of them apart. Ignores what is learnt (`engine.dspark.record`) and how the columns came
about (`engine.scheduler.rounds`).

Shapes: N rows in rounds, D of them with drafts, R rounds, B rows that were planned, G drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from engine.dspark.acceptance import Verdict
from engine.dspark.cost_model import StepShape
from engine.dspark.draft_step import DraftStep
from engine.dspark.drafter import Proposal
from engine.dspark.outcomes import Outcomes
from engine.request import Sample
from engine.sampling.columns import SampleResult

_NOTHING = SampleResult(torch.empty(0), torch.empty(0), torch.empty(0))
"""Tokens of a verdict are with their samples before anybody reads it, and chances with the step."""


@dataclass(slots=True)
class ToldRounds:
    """Rounds of the plan `foreseen`, as `shape` without their contexts. Entry n is row `row_N[n]` of the plan in round
    `round_N[n]`; entries of a round lie side by side, those that `drew_N` drafts first. Each had `starts_N` new tokens
    before it; what it fed ends at `anchors_N`. `outcomes` are of those with drafts, in order, and
    `log_q_DG` what drafts were drawn with, None where nobody asks."""

    foreseen: DraftStep
    shape: StepShape
    round_N: np.ndarray
    row_N: np.ndarray
    drew_N: np.ndarray
    starts_N: np.ndarray
    anchors_N: np.ndarray
    emitted_N: np.ndarray
    ids_NG: np.ndarray
    verified_N: np.ndarray
    keep_N: np.ndarray
    accepted_N: np.ndarray
    outcomes: Outcomes
    log_q_DG: np.ndarray | None
    _ends_R: np.ndarray = field(init=False)
    _drawn_R: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self._ends_R = np.cumsum(np.bincount(self.round_N))
        self._drawn_R = np.bincount(self.round_N, self.drew_N).astype(np.int64)

    def __len__(self) -> int:
        return len(self._ends_R)

    def __iter__(self) -> Iterator[DraftStep]:
        return (self.step(number) for number in range(len(self)))

    @property
    def samples(self) -> list[Sample]:
        """Those that took part in any."""
        return [self.foreseen.samples[row] for row in np.unique(self.row_N).tolist()]

    def mean_shape(self) -> StepShape:
        """With the contexts of all: those grew from one round to the next, and rounds were measured as one."""
        queries = ((self.anchors_N + 1 + self.emitted_N) * (1 + self.verified_N)).sum() / len(self)
        return replace(self.shape, context_queries=float(queries))

    def without_drafts(self) -> list[tuple[Sample, int]]:
        """Samples, and in how many rounds each had none."""
        if self.drew_N.all():
            return []
        count_B = np.bincount(self.row_N[~self.drew_N])
        return [(self.foreseen.samples[row], int(count_B[row])) for row in np.flatnonzero(count_B).tolist()]

    def promised_and_kept(self) -> tuple[float, float]:
        """Drafts that the plan expected to be kept of the rows that there were, and those that were."""
        outcomes, planned = self.outcomes, len(self.foreseen.samples) * len(self)
        kept = np.minimum(outcomes.accepted_N, outcomes.keep_N).sum()
        return self.foreseen.promised * len(self.row_N) / planned, float(kept)

    def drawing(self, number: int) -> int:
        """Rows of a round with drafts."""
        return int(self._drawn_R[number])

    def newest_survivals(self) -> tuple[list[Sample], list[int], np.ndarray] | None:
        """Samples, keys and survivals [M, G] of the last round that drafted; None where none did."""
        drawing = np.flatnonzero(self._drawn_R)
        if not len(drawing):
            return None
        last = int(drawing[-1])
        first, drafted = self._first(last), self.drawing(last)
        rows = self.row_N[first : first + drafted].tolist()
        behind = int(self._drawn_R[: last + 1].sum())
        survival_MG = self.outcomes.survival_NG[behind - drafted : behind]
        return [self.foreseen.samples[b] for b in rows], [self.foreseen.keys[b] for b in rows], survival_MG

    def tokens(self, number: int, rows: Iterable[int]) -> Iterator[tuple[int, list[int], list[float]]]:
        """Of those of these rows that took part in a round: key, and the tokens it took in with their
        log-probabilities."""
        first, end = self._first(number), int(self._ends_R[number])
        places = {row: place for place, row in enumerate(self.row_N[first:end].tolist(), start=first)}
        for row in rows:
            place = places.get(row)
            if place is not None:
                known, emitted = int(self.starts_N[place]), int(self.emitted_N[place])
                yield self.foreseen.keys[row], *self.foreseen.samples[row].taken(known, emitted)

    def step(self, number: int) -> DraftStep:
        """A round as one step."""
        first, end, drafted = self._first(number), int(self._ends_R[number]), self.drawing(number)
        own, behind = slice(first, end), int(self._drawn_R[:number].sum())
        of_drafts, outcomes = slice(behind, behind + drafted), self.outcomes
        rows, verified = self.row_N[own].tolist(), self.verified_N[own].tolist()
        confidence_DG = outcomes.confidence_NG
        confidence_MG = None if confidence_DG is None else torch.from_numpy(confidence_DG[of_drafts])
        proposal = Proposal(
            torch.from_numpy(self.ids_NG[first : first + drafted]),
            outcomes.made_N[of_drafts].tolist(),
            None,
            confidence_MG,
        )
        if self.log_q_DG is not None:
            proposal.log_q_BG = self.log_q_DG[of_drafts]
        queries = ((self.anchors_N[own] + 1 + self.emitted_N[own]) * (1 + self.verified_N[own])).sum()
        return DraftStep(
            samples=[self.foreseen.samples[b] for b in rows],
            keys=[self.foreseen.keys[b] for b in rows],
            known=self.starts_N[own].tolist(),
            anchors=self.anchors_N[own].tolist(),
            plan=self.foreseen.plan,
            shape=replace(self.shape, context_queries=float(queries)),
            price=self.foreseen.price,
            emitted=self.emitted_N[own].tolist(),
            drafts=[ids[:count] for ids, count in zip(self.ids_NG[own].tolist(), verified, strict=True)],
            keep=self.keep_N[own].tolist(),
            proposal=proposal,
            survival_BG=outcomes.survival_NG[of_drafts],
            verdict=Verdict(self.accepted_N[own].tolist(), _NOTHING, []),
            chances_BG=outcomes.chances_NG[of_drafts],
        )

    def _first(self, number: int) -> int:
        return int(self._ends_R[number - 1]) if number else 0
