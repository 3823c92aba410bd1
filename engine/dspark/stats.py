"""What speculation counts.

Owns numerators and denominators; whoever shows them divides. Ignores predictions
(`engine.dspark.reliability`) and times (`engine.dspark.cost_model`).

`num_accepted` excludes the bonus token, an accept length includes it. A token that a stop or a length
cut off was never emitted and counts nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class DraftStats:
    """Sums over requests' verify steps, of one request, class or engine.

    `verify_rows` counts 1 + drafts verified, `plain_steps` steps without drafts. `accepted_at[k]` counts
    steps that kept more than k drafts, `windows[n]` those that might keep n, `lengths[n]` those that
    emitted n tokens.
    """

    max_drafts: int
    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    verify_rows: int = 0
    accepted_at: np.ndarray = field(init=False)
    windows: np.ndarray = field(init=False)
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.accepted_at = np.zeros(self.max_drafts, dtype=np.int64)
        self.windows = np.zeros(self.max_drafts + 1, dtype=np.int64)
        self.lengths = np.zeros(self.max_drafts + 2, dtype=np.int64)

    def observe(self, drafted: int, verified: int, accepted: int, emitted: int, window: int | None = None) -> None:
        """One request's verify step: drafts made, verified, accepted, and tokens that were kept, which
        a stop may have cut below accepted + 1. `window` is what may have been kept where that is less
        than what was verified."""
        assert 0 <= accepted <= verified <= drafted <= self.max_drafts and 0 <= emitted <= accepted + 1
        kept = min(accepted, emitted)
        self.steps += 1
        self.drafted += drafted
        self.proposed += verified
        self.accepted += kept
        self.emitted += emitted
        self.verify_rows += 1 + verified
        self.accepted_at[:kept] += 1
        self.windows[verified if window is None else window] += 1
        self.lengths[emitted] += 1

    def add(self, other: DraftStats) -> None:
        for name in ("steps", "plain_steps", "drafted", "proposed", "accepted", "emitted", "verify_rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("accepted_at", "windows", "lengths"):
            getattr(self, name).__iadd__(getattr(other, name))

    @property
    def accept_length(self) -> float:
        """Tokens per verify step; NaN before the first."""
        return self.emitted / self.steps if self.steps else float("nan")
