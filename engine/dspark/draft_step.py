"""What passes through a step that speculates.

Owns that record. Ignores who fills it: the serial loop as it goes, or the host of rounds that the device
ran, afterwards.

Shapes: B rows, G drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from engine.dspark.acceptance import Verdict
from engine.dspark.cost_model import StepShape
from engine.dspark.drafter import Proposal
from engine.dspark.planner import StepPlan
from engine.request import Sample


@dataclass(slots=True)
class DraftStep:
    """One step's rows, those with drafts first.

    `drafts[b]` go through the target behind row b's anchor; at most `keep[b]` of them may be kept, fewer
    than all in mode `cap_accept` alone. `survival_BG` are chances of the rows that drafted. `keys[b]` is
    the incarnation of row b's sequence, `known[b]` how many new tokens it had, and `emitted[b]` how many it
    took in, None until they are with their samples. Each verified draft has to bring `price` tokens for the step to
    bring as much as plain steps would, without end where nobody compared them, and `promised` of all are expected to be
    kept. By then `chances_BG` holds the verdict's
    chances of the rows that drafted, NaN where they are not known.
    """

    samples: list[Sample]
    keys: list[int]
    known: list[int]
    anchors: list[int]
    plan: StepPlan
    shape: StepShape
    price: float = math.inf
    promised: float = 0.0
    drafts: list[list[int]] = field(default_factory=list)
    keep: list[int] = field(default_factory=list)
    proposal: Proposal | None = None
    survival_BG: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    verdict: Verdict | None = None
    chances_BG: np.ndarray | None = None
    emitted: list[int] | None = None

    @property
    def drafting(self) -> bool:
        """Whether any row has drafts to verify."""
        return any(self.drafts)

    def emitted_by(self, row: int) -> tuple[list[int], list[float]]:
        """The tokens that a row took in, and their log-probabilities."""
        assert self.emitted is not None
        return self.samples[row].taken(self.known[row], self.emitted[row])

    def tokens(self) -> list[list[int]]:
        """What each row feeds: its anchor and its drafts."""
        return [[sample.ids[-1], *drafts] for sample, drafts in zip(self.samples, self.drafts, strict=True)]
