"""From the queue to a prefill: whose turn it is, and what it finds in the cache.

Owns admission: rows, pages, adapters and what the host still has to bring, asked in the queue's order. Ignores what
becomes of a prefill (`engine.scheduler.scheduler`).

A prompt is computed once for all samples waiting for it; a request whose prompt begins as one that is being computed
waits for that and then hits the cache, unless so little is the same that it is sooner computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.adapters import Adapters, Lease
from engine.cache.key import Namespace
from engine.cache.prefix_cache import Match
from engine.metrics import EngineCounters
from engine.request import Group, Sample, SampleState
from engine.scheduler.pages import PageManager
from engine.scheduler.prefetch import AHEAD, Prefetch
from engine.scheduler.prefill import Prefill, Scorer, ScoreTask
from engine.scheduler.queues import Queues
from engine.types import CacheHit

_SPARE_TOKENS = 256
"""Tokens of a batch of prompts that are computed more than once, at most, rather than one after another."""


class Admitter:
    def __init__(
        self,
        queues: Queues,
        pages: PageManager,
        counters: EngineCounters,
        namespace_of: Callable[[Group], Namespace],
        adapters: Adapters | None,
    ) -> None:
        self._queues = queues
        self._pages = pages
        self._counters = counters
        self._namespace_of = namespace_of
        self._adapters = adapters
        self._adapter_missing = False
        self._spare_tokens = 0
        """Tokens that may yet be computed although another prompt's prefill has them."""
        self._prefetch = Prefetch(pages, namespace_of)

    def ahead(self, samples: list[Sample]) -> None:
        """Ask the host for what these will hit."""
        self._prefetch.ahead(samples)

    def admit(self) -> None:
        """Turn waiting samples into prefills while rows, pages, adapters and the queue's order allow."""
        restores = self._pages.restores
        if restores is None:
            self._admit_all()
            return
        restores.pump()
        self._admit_all()
        if restores.busy and not (self._queues.running or self._queues.prefills):
            # Nobody computes meanwhile, and what is on its way may hold the pages that are wanted.
            restores.finish()
            self._prefetch.waits = False
            self._admit_all()
            self._prefetch.waits = True
        self._prefetch.ahead(self._queues.waiting[:AHEAD])

    def _admit_all(self) -> None:
        queues, self._adapter_missing, self._spare_tokens = self._queues, False, _SPARE_TOKENS
        while queues.scoring and queues.has_row:
            if not self._admit_scoring(queues.scoring[0]):
                return
            queues.scoring.popleft()
        position = 0
        while position < len(queues.waiting) and queues.has_row:
            sample = queues.waiting[position]
            if not queues.may_begin(sample):
                position += 1
                continue
            verdict = self._admit(sample)
            if verdict is None:
                return
            if not verdict:
                position += 1

    def _has_adapter(self, lease: Lease | None) -> bool:
        """Whether the device has what the lease is on. Once somebody found no room in this round, nobody
        behind takes any: adapters come in the queue's order too."""
        if lease is None or self._adapters is None or lease.version.slot is not None:
            return True
        if self._adapter_missing:
            return False
        self._adapter_missing = not self._adapters.make_resident(lease.version)
        return not self._adapter_missing

    def _admit_scoring(self, task: ScoreTask) -> bool:
        if not self._has_adapter(task.lease):
            return False
        scorer, namespace = task.make_scorer(), task.namespace_of()
        limit = min(len(task.tokens) - 1, scorer.match_limit)
        match = self._prefetch.restored(self._pages.match(namespace, task.tokens, limit))
        if match is None:
            return False
        prefill = self._open(task.tokens, namespace, match, len(task.tokens))
        if prefill is None:
            return False
        prefill.task, prefill.scorer = task, scorer
        return True

    def _open(self, tokens: np.ndarray, namespace: Namespace, match: Match, reserve: int) -> Prefill | None:
        sequence = self._pages.open(match, reserve, self._queues.spare)
        if sequence is None:
            return None
        hit = CacheHit(structural=match.structural, usable=sequence.computed, limited_by=match.limited_by)
        prefill = Prefill(tokens, namespace, sequence, hit)
        if self._pages.states is not None:
            # Who repeats this prompt resumes from the last state that is kept; who diverges, where others did.
            pool = self._pages.states.pool
            prefill.stops = {depth // pool.grid * pool.grid for depth in (len(tokens) - 1, match.structural)}
            prefill.grid = pool.layout.grid
        self._queues.prefills.append(prefill)
        self._counters.lookup_tokens += len(tokens)
        self._counters.hit_tokens += sequence.computed
        return prefill

    def _admit(self, sample: Sample) -> bool | None:
        """True: left the queue. False: waits for another's prefill or for its adapter. None: no room, stop
        here."""
        group = sample.group
        if not self._has_adapter(group.lease):
            return False
        namespace = self._namespace_of(group)
        fresh = not sample.ids
        if fresh:
            for prefill in self._queues.prefills:
                if prefill.group is group and not prefill.samples[0].ids and prefill.namespace == namespace:
                    self._queues.attach(sample, prefill)
                    return True
        tokens = sample.tokens()
        scorer = self._prompt_scorer(group)
        limit = min(len(tokens) - 1, scorer.match_limit) if scorer else len(tokens) - 1
        match = self._pages.match(namespace, tokens, limit)
        shared, nearest = match.usable, None
        for prefill in self._queues.prefills:
            if not prefill.done and prefill.namespace == namespace:
                common = min(prefill.common_prefix(tokens), limit) // self._pages.hit_grid * self._pages.hit_grid
                if common > shared:
                    shared, nearest = common, prefill
        if nearest is not None and not self._computes_again(shared - match.usable, limit - match.usable):
            if self._pages.states is not None:
                nearest.stops.add(shared)
            return False
        match = self._prefetch.restored(match)
        if match is None:
            return False
        prefill = self._open(tokens, namespace, match, self._queues.target_length(sample))
        if prefill is None:
            return None
        prefill.group, prefill.scorer = group, scorer
        self._queues.attach(sample, prefill)
        if fresh:
            for sibling in [s for s in group.samples if s.state is SampleState.WAITING and not s.ids]:
                self._queues.attach(sibling, prefill)
        return True

    def _computes_again(self, shared: int, missing: int) -> bool:
        """Whether to compute the `shared` ones of the tokens that are `missing` beside another that computes them, as
        a second launch takes longer than a few tokens do: the smaller part of a prompt, and no more in all than may
        be."""
        if self._pages.states is not None or 2 * shared > missing or shared > self._spare_tokens:
            return False
        self._spare_tokens -= shared
        return True

    def _prompt_scorer(self, group: Group) -> Scorer | None:
        """For the one prefill of a group that also scores its prompt, where that is wanted."""
        start = group.request.want.prompt_logprobs_from
        if start is None or group.prompt_logprobs is not None:
            return None
        if any(prefill.group is group and prefill.scorer is not None for prefill in self._queues.prefills):
            return None
        return Scorer(start, len(group.prompt))
