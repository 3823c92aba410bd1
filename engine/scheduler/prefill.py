"""A prompt (or a sample's tokens so far) on its way through the model.

Owns one computation that several samples may start from. Ignores who else is running.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.adapters import Lease
from engine.cache.key import Namespace
from engine.request import Group, Sample
from engine.scheduler.pages import Sequence
from engine.types import CacheHit


@dataclass(slots=True)
class Scorer:
    """Collects log-probabilities of given tokens [start, end) as their prefix is computed.

    Position p is scored from the hidden state at p - 1, so the cache may serve at most
    `start - 1` tokens. Rows arrive in order.
    """

    start: int
    end: int
    temperature: float = 1.0
    top_logprobs: int = 0
    logprobs: list[np.ndarray] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_values: list[np.ndarray] = field(default_factory=list)

    @property
    def match_limit(self) -> int:
        return max(self.start - 1, 0)

    def column(self) -> np.ndarray:
        """float32 over [start, end); NaN at position 0, which nothing predicts."""
        head = np.full(int(self.start == 0), np.nan, dtype=np.float32)
        return np.concatenate([head, *self.logprobs])

    def top(self) -> tuple[np.ndarray, np.ndarray] | None:
        """uint32 and float32 [end - start, K]; id 0 and NaN at position 0."""
        if not self.top_logprobs:
            return None
        head = int(self.start == 0), self.top_logprobs
        ids = np.zeros(head, dtype=np.uint32)
        values = np.full(head, np.nan, dtype=np.float32)
        return np.concatenate([ids, *self.top_ids]), np.concatenate([values, *self.top_values])


@dataclass(slots=True, eq=False)
class ScoreTask:
    """One sequence of a scoring request: `tokens` int32 [L], `make_scorer` for a fresh start, and
    `on_scored(prefill)` when its tokens have run. `lease` is the request's, on its adapter."""

    tokens: np.ndarray
    namespace_of: Callable[[], Namespace]
    make_scorer: Callable[[], Scorer]
    on_scored: Callable[[Prefill], None]
    lease: Lease | None = None


@dataclass(slots=True, eq=False)
class Prefill:
    """`tokens` int32 [L] under computation in `sequence`.

    `samples` start from its end, in order; once every token is computed `logits_1V` holds the
    next-token logits until the last of them has started. A prefill for a `task` starts nobody.
    """

    tokens: np.ndarray
    namespace: Namespace
    sequence: Sequence
    hit: CacheHit
    group: Group | None = None
    task: ScoreTask | None = None
    samples: list[Sample] = field(default_factory=list)
    scorer: Scorer | None = None
    logits_1V: torch.Tensor | None = None
    stops: set[int] = field(default_factory=set)
    """Depths at which a chunk ends because the state there is worth keeping."""
    grid: int = 1
    """Chunks that do not reach the end stop at multiples of it where they can, as recurrent layers compute the
    same bits only from there."""

    def chunk(self, budget: int) -> int:
        """Tokens to compute next, `budget` at most."""
        done = self.sequence.computed
        end = min([len(self.tokens), done + budget, *(stop for stop in self.stops if stop > done)])
        on_grid = end // self.grid * self.grid
        return (on_grid if done < on_grid and end < len(self.tokens) else end) - done

    @property
    def keeps_state(self) -> bool:
        return self.done or self.sequence.computed in self.stops

    @property
    def lease(self) -> Lease | None:
        """On the adapter it is computed with."""
        holder = self.group or self.task
        return None if holder is None else holder.lease

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.sequence.computed

    @property
    def done(self) -> bool:
        return self.remaining == 0

    def common_prefix(self, tokens: np.ndarray) -> int:
        """Tokens shared with another prompt."""
        length = min(len(self.tokens), len(tokens))
        differs = np.flatnonzero(self.tokens[:length] != tokens[:length])
        return int(differs[0]) if len(differs) else length
