"""What became of drafts, as arrays over the rows of one step or of several.

Owns that form. Ignores what is made of it (`engine.dspark.record`).

Shapes: N rows that drafted, G drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.dspark.draft_step import DraftStep
from engine.request import Sample


@dataclass(frozen=True, slots=True)
class Outcomes:
    """By row: drafts made, verified, kept at most and accepted, tokens emitted, where its anchor stood, and the price
    of a verified draft: what each had to bring, in tokens, for plain steps not to bring more. Survivals are those
    that were predicted; chances are NaN where they are not known. Row n is one of `samples[sample_N[n]]`, in one of so
    many `steps`, the last of which was planned as number `step`."""

    made_N: np.ndarray
    verified_N: np.ndarray
    keep_N: np.ndarray
    accepted_N: np.ndarray
    emitted_N: np.ndarray
    anchors_N: np.ndarray
    price_N: np.ndarray
    survival_NG: np.ndarray
    chances_NG: np.ndarray
    confidence_NG: np.ndarray | None
    sample_N: np.ndarray
    samples: list[Sample]
    step: int
    steps: int

    @staticmethod
    def of(step: DraftStep) -> Outcomes:
        """A step that was verified, as far as its rows drafted."""
        assert step.verdict is not None and step.proposal is not None and step.emitted is not None
        assert step.chances_BG is not None
        rows, confidence_BG = len(step.survival_BG), step.proposal.confidence_BG
        verified = [len(drafts) for drafts in step.drafts[:rows]]
        counts = step.keep[:rows], step.verdict.num_accepted[:rows], step.emitted[:rows], step.anchors[:rows]
        return Outcomes(
            *np.array((step.proposal.lens, verified, *counts), dtype=np.int64),
            price_N=np.full(rows, step.price),
            survival_NG=step.survival_BG,
            chances_NG=step.chances_BG,
            confidence_NG=None if confidence_BG is None else confidence_BG.double().cpu().numpy(),
            sample_N=np.arange(rows),
            samples=step.samples[:rows],
            step=step.plan.step,
            steps=1,
        )

    @staticmethod
    def joined(parts: Sequence[Outcomes]) -> Outcomes:
        """Those of one drafter, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        firsts = np.cumsum([0, *(len(part.samples) for part in parts)]).tolist()
        confidences = [part.confidence_NG for part in parts if part.confidence_NG is not None]
        return Outcomes(
            **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS},
            confidence_NG=np.concatenate(confidences) if confidences else None,
            sample_N=np.concatenate([first + part.sample_N for first, part in zip(firsts, parts, strict=False)]),
            samples=[sample for part in parts for sample in part.samples],
            step=parts[-1].step,
            steps=sum(part.steps for part in parts),
        )


_COLUMNS = (
    "made_N",
    "verified_N",
    "keep_N",
    "accepted_N",
    "emitted_N",
    "anchors_N",
    "price_N",
    "survival_NG",
    "chances_NG",
)
