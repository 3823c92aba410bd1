"""What became of drafts, as arrays over the rows of one step or of several.

Owns that form. Ignores what is made of it (`engine.dspark.record`).

Shapes: N rows that drafted, G drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.dspark.draft_step import DraftStep


@dataclass(frozen=True, slots=True)
class Outcomes:
    """By row: drafts made, verified, kept at most and accepted, tokens emitted, and where its anchor stood. Survivals
    are those that were predicted; chances are NaN where they are not known."""

    made_N: np.ndarray
    verified_N: np.ndarray
    keep_N: np.ndarray
    accepted_N: np.ndarray
    emitted_N: np.ndarray
    anchors_N: np.ndarray
    survival_NG: np.ndarray
    chances_NG: np.ndarray
    confidence_NG: np.ndarray | None

    @staticmethod
    def of(steps: Sequence[DraftStep]) -> Outcomes:
        """Steps that were verified, as far as their rows drafted."""
        parts: list[tuple[Iterable[int], ...]] = []
        chances, confidences = [], []
        for step in steps:
            assert step.verdict is not None and step.proposal is not None and step.emitted is not None
            assert step.chances_BG is not None
            rows = len(step.survival_BG)
            verified = [len(drafts) for drafts in step.drafts[:rows]]
            accepted = step.verdict.num_accepted[:rows]
            counts = verified, step.keep[:rows], accepted, step.emitted[:rows], step.anchors[:rows]
            parts.append((step.proposal.lens, *counts))
            chances.append(step.chances_BG)
            if step.proposal.confidence_BG is not None:
                confidences.append(step.proposal.confidence_BG.double().cpu().numpy())
        return Outcomes(
            *np.concatenate([np.array(part, dtype=np.int64) for part in parts], axis=1),
            survival_NG=np.concatenate([step.survival_BG for step in steps]),
            chances_NG=np.concatenate(chances),
            confidence_NG=np.concatenate(confidences) if confidences else None,
        )
