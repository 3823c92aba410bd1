"""A scoring request from its sequences to its reply.

Owns the gathering of results. Ignores how and when each sequence runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from engine.adapters import Lease
from engine.scheduler.prefill import Prefill, Scorer
from engine.types import ScoredSequence, ScoreOutput, ScoreRequest


class ScoreJob:
    """`output` is set, and `on_done(output)` called, when the last sequence has run; `lease` ends then."""

    def __init__(self, on_done: Callable[[ScoreOutput], None] | None = None) -> None:
        self.output: ScoreOutput | None = None
        self.lease: Lease | None = None
        self._on_done = on_done

    def start(
        self, request: ScoreRequest, policy_version: Callable[[], int]
    ) -> Iterator[tuple[np.ndarray, Callable[[], Scorer], Callable[[Prefill], None]]]:
        """(ids, scorer factory, callback) for each sequence."""
        self._results: list[ScoredSequence | None] = [None] * len(request.sequences)
        self._policy_version = policy_version
        for number, ids in enumerate(request.sequences):
            make = partial(Scorer, request.start, len(ids), request.temperature, request.top_logprobs)
            yield ids, make, partial(self._collect, number)

    def _collect(self, number: int, prefill: Prefill) -> None:
        scorer = prefill.scorer
        assert scorer is not None
        top = scorer.top()
        self._results[number] = ScoredSequence(
            logprobs=scorer.column(),
            policy_version=self._policy_version(),
            adapter_rev=0 if self.lease is None else self.lease.version.rev,
            top_ids=top[0] if top else None,
            top_logprobs=top[1] if top else None,
            cached_tokens=prefill.hit.usable,
        )
        done = [result for result in self._results if result is not None]
        if len(done) == len(self._results):
            self.output = ScoreOutput(sequences=done, policy_version=self._policy_version())
            if self.lease is not None:
                self.lease.release()
            if self._on_done is not None:
                self._on_done(self.output)
