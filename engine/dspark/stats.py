"""What speculation counts.

Owns numerators and denominators; whoever shows them divides. Ignores predictions
(`engine.dspark.reliability`) and times (`engine.dspark.cost_model`).

`num_accepted` excludes the bonus token, an accept length includes it. A token that a stop or a length
cut off was never emitted and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def observe(
        self,
        drafted: Sequence[int] | np.ndarray,
        verified: Sequence[int] | np.ndarray,
        accepted: Sequence[int] | np.ndarray,
        emitted: Sequence[int] | np.ndarray,
        windows: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Verify steps, an entry each: drafts made, verified, accepted, and tokens that were kept, which a
        stop may have cut below accepted + 1. `windows` are what may have been kept where that is less than
        what was verified."""
        values_4N = np.array((accepted, verified, drafted, emitted), dtype=np.int64)
        accepted_N, verified_N, _, emitted_N = values_4N
        ordered = values_4N.min() >= 0 and (values_4N[:2] <= values_4N[1:3]).all()
        assert ordered, "accepted at most verified, verified at most drafted"
        assert values_4N[2].max() <= self.max_drafts and (emitted_N <= accepted_N + 1).all()
        kept_N = np.minimum(accepted_N, emitted_N)
        _, num_verified, num_drafted, num_emitted = values_4N.sum(1).tolist()
        self.steps += len(kept_N)
        self.drafted += num_drafted
        self.proposed += num_verified
        self.accepted += int(kept_N.sum())
        self.emitted += num_emitted
        self.verify_rows += len(kept_N) + num_verified
        kept_by_count = np.bincount(kept_N, minlength=self.max_drafts + 1)
        self.accepted_at += np.cumsum(kept_by_count[::-1])[::-1][1:]
        self.windows += np.bincount(verified_N if windows is None else windows, minlength=self.max_drafts + 1)
        self.lengths += np.bincount(emitted_N, minlength=self.max_drafts + 2)

    def add(self, other: DraftStats) -> None:
        for name in ("steps", "plain_steps", "drafted", "proposed", "accepted", "emitted", "verify_rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("accepted_at", "windows", "lengths"):
            getattr(self, name).__iadd__(getattr(other, name))

    @property
    def accept_length(self) -> float:
        """Tokens per verify step; NaN before the first."""
        return self.emitted / self.steps if self.steps else float("nan")
