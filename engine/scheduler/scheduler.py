"""Who runs next: admission, starting of samples, growth and retraction.

Owns the queues. Ignores tensors and sampling (`engine.scheduler.loop`), and how pages change
hands (`engine.scheduler.pages`).

Order is by arrival, then sample index, and a retracted sample keeps its place, so nobody is
overtaken for ever. A prompt is computed once for all samples waiting for it; a request whose
prompt is being computed for another waits for it and then hits the cache.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable

import numpy as np

from engine.adapters import Adapters, Lease
from engine.cache.key import Namespace
from engine.cache.prefix_cache import Match
from engine.config import SchedulerConfig, number
from engine.metrics import EngineCounters
from engine.request import Group, Sample, SampleState
from engine.scheduler.pages import PageManager, Sequence
from engine.scheduler.prefetch import AHEAD, Prefetch
from engine.scheduler.prefill import Prefill, Scorer, ScoreTask
from engine.types import CacheHit
from lora.versions import AdapterVersion


class Scheduler:
    """`waiting` and `running` are sorted by `Sample.order`; siblings of a group are adjacent."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageManager,
        counters: EngineCounters,
        namespace_of: Callable[[Group], Namespace],
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters
        self._adapter_missing = False
        self.config = config
        self.max_running = number(config.max_running)
        self.prefill_tokens = number(config.prefill_tokens)
        self.pages = pages
        self.counters = counters
        self.namespace_of = namespace_of
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.prefills: list[Prefill] = []
        self.scoring: deque[ScoreTask] = deque()
        self.draining = False
        self._prefetch = Prefetch(pages, namespace_of)

    # --- entering -------------------------------------------------------------------------

    def add(self, samples: list[Sample]) -> None:
        for sample in samples:
            self._enqueue(sample)
        self._prefetch.ahead(samples[:1])

    def add_scoring(self, tasks: list[ScoreTask]) -> None:
        self.scoring.extend(tasks)

    @property
    def idle(self) -> bool:
        return not (self.running or self.prefills or self.waiting or self.scoring)

    @property
    def has_begun_work(self) -> bool:
        """Whether anything is left that a drain must see to its end."""
        if self.running or self.prefills or self.scoring:
            return True
        return any(_begun(sample.group) for sample in self.waiting)

    # --- one step's decisions ---------------------------------------------------------------

    def start_ready(self) -> list[tuple[Sample, Prefill]]:
        """Start samples of finished prefills as far as there is room, oldest first."""
        started = []
        for prefill in [p for p in self.prefills if p.done]:
            started += self.start_samples(prefill)
        return started

    def start_samples(self, prefill: Prefill) -> list[tuple[Sample, Prefill]]:
        """Fork the finished prefill for its samples; the last one takes its pages over."""
        started: list[tuple[Sample, Prefill]] = []
        while prefill.samples and len(self.running) < self.max_running:
            sample = prefill.samples[0]
            target = self._target_length(sample)
            if len(prefill.samples) == 1:
                if not self.pages.reserve(prefill.sequence, target) and self.running:
                    break
                sequence = prefill.sequence
            else:
                sequence = self.pages.fork(prefill.sequence, target, self._spare())
                if sequence is None and not self.running:
                    # Nobody will ever make room: the first goes on with the pages at hand, the
                    # rest come back to the queue and find the prompt in the cache.
                    sequence = prefill.sequence
                    self._requeue_samples(prefill.samples[1:])
                    del prefill.samples[1:]
                elif sequence is None:
                    break
            prefill.samples.pop(0)
            self._begin(sample, sequence, prefill, first=not started)
            started.append((sample, prefill))
        if not prefill.samples:
            self.prefills.remove(prefill)
        return started

    def admit(self) -> None:
        """Turn waiting samples into prefills while rows, pages, adapters and the queue's order allow."""
        restores = self.pages.restores
        if restores is None:
            self._admit_all()
            return
        restores.pump()
        self._admit_all()
        if restores.busy and not (self.running or self.prefills):
            # Nobody computes meanwhile, and what is on its way may hold the pages that are wanted.
            restores.finish()
            self._prefetch.waits = False
            self._admit_all()
            self._prefetch.waits = True
        self._prefetch.ahead(self.waiting[:AHEAD])

    def _admit_all(self) -> None:
        self._adapter_missing = False
        while self.scoring and self._has_row():
            if not self._admit_scoring(self.scoring[0]):
                return
            self.scoring.popleft()
        position = 0
        while position < len(self.waiting) and self._has_row():
            sample = self.waiting[position]
            if self.draining and not _begun(sample.group):
                position += 1
                continue
            verdict = self._admit(sample)
            if verdict is None:
                return
            if not verdict:
                position += 1

    def grow(self) -> None:
        """Make sure every running sample has room for its next token, retracting the youngest
        when pages run out. It cannot fail: admission bounds each sample by the pool."""
        for sample in list(self.running):
            if sample.state is SampleState.RUNNING:
                self._make_room(sample)

    def reserve_ahead(self, samples: list[Sample], steps: list[int]) -> bool:
        """Room for each sample's next `steps` tokens, never beyond its end. False if there is
        not enough; what was reserved stays with its samples."""
        for sample, count in zip(samples, steps, strict=True):
            assert sample.sequence is not None
            end = len(sample.group.prompt) + sample.row.params.max_new
            if not self.pages.reserve(sample.sequence, min(sample.length + count, end)):
                return False
        return True

    @property
    def wants_prefill(self) -> bool:
        """Whether prefilling or starting samples may be possible now."""
        if self.scoring or any(not p.done for p in self.prefills):
            return True
        if len(self.running) >= self.max_running:
            return False
        if self.draining:
            return bool(self.prefills) or any(_begun(sample.group) for sample in self.waiting)
        return bool(self.prefills or self.waiting)

    def chunks(self) -> list[tuple[Prefill, int]]:
        """Prefills to work on in this step and how many tokens of each."""
        chosen = self._chunks()
        while not (chosen or self.running) and self._drop_prefill():
            chosen = self._chunks()
        return chosen

    def _chunks(self) -> list[tuple[Prefill, int]]:
        budget = self.prefill_tokens
        chosen = []
        for prefill in self.prefills:
            if prefill.done or budget <= 0:
                continue
            count = self.pages.prefillable(prefill.sequence, prefill.chunk(budget), self._spare())
            if count:
                chosen.append((prefill, count))
                budget -= count
        return chosen

    # --- leaving ------------------------------------------------------------------------------

    def retract(self, sample: Sample, publish: bool = True) -> None:
        """Back to the queue; what it computed goes to the cache so that resuming is a hit."""
        self._leave(sample, publish)
        sample.state = SampleState.WAITING
        sample.mixed_kv = False
        sample.retractions += 1
        self.counters.retractions += 1
        self._enqueue(sample)

    def remove(self, sample: Sample) -> None:
        """Take a sample out wherever it stands; its computed tokens are published."""
        if sample.state is SampleState.WAITING:
            self.waiting.remove(sample)
        elif sample.state is SampleState.PREFILLING:
            prefill = next(p for p in self.prefills if sample in p.samples)
            prefill.samples.remove(sample)
            if not prefill.samples:
                self.prefills.remove(prefill)
                self.pages.close(prefill.sequence, prefill.tokens)
        elif sample.state is SampleState.RUNNING:
            self._leave(sample, publish=True)
        sample.state = SampleState.FINISHED

    def finish_scoring(self, prefill: Prefill) -> None:
        self.prefills.remove(prefill)
        self.pages.close(prefill.sequence, prefill.tokens)

    def reset_prefills(self, which: Callable[[Prefill], bool] = lambda prefill: True) -> None:
        """Forget all prefills, or some: their pages or logits belong to a version that ends. What they were
        for goes back to the queue."""
        for prefill in [p for p in self.prefills if which(p)]:
            self._requeue(prefill)

    # --- inside ---------------------------------------------------------------------------------

    def _has_row(self) -> bool:
        """Room in the batch, and not so much prefill ahead that reserving more would only
        keep others from finding it in the cache."""
        ahead = sum(p.remaining for p in self.prefills)
        return len(self.running) + len(self.prefills) < self.max_running and (ahead < 2 * self.prefill_tokens)

    def busy_adapters(self) -> set[AdapterVersion]:
        """Those that running samples and prefills compute with."""
        leases = [sample.group.lease for sample in self.running] + [prefill.lease for prefill in self.prefills]
        return {lease.version for lease in leases if lease is not None}

    def adapter_order(self) -> dict[AdapterVersion, int]:
        """Adapters of those who wait, by who comes first."""
        leases = [task.lease for task in self.scoring] + [sample.group.lease for sample in self.waiting]
        versions = dict.fromkeys(lease.version for lease in leases if lease is not None)
        return {version: place for place, version in enumerate(versions)}

    def _has_adapter(self, lease: Lease | None) -> bool:
        """Whether the device has what the lease is on. Once somebody found no room in this round, nobody
        behind takes any: adapters come in the queue's order too."""
        if lease is None or self.adapters is None or lease.version.slot is not None:
            return True
        if self._adapter_missing:
            return False
        self._adapter_missing = not self.adapters.make_resident(lease.version)
        return not self._adapter_missing

    def _admit_scoring(self, task: ScoreTask) -> bool:
        if not self._has_adapter(task.lease):
            return False
        scorer, namespace = task.make_scorer(), task.namespace_of()
        limit = min(len(task.tokens) - 1, scorer.match_limit)
        match = self._prefetch.restored(self.pages.match(namespace, task.tokens, limit))
        if match is None:
            return False
        prefill = self._open(task.tokens, namespace, match, len(task.tokens))
        if prefill is None:
            return False
        prefill.task, prefill.scorer = task, scorer
        return True

    def _open(self, tokens: np.ndarray, namespace: Namespace, match: Match, reserve: int) -> Prefill | None:
        sequence = self.pages.open(match, reserve, self._spare())
        if sequence is None:
            return None
        hit = CacheHit(structural=match.structural, usable=sequence.computed, limited_by=match.limited_by)
        prefill = Prefill(tokens, namespace, sequence, hit)
        if self.pages.states is not None:
            # Who repeats this prompt resumes from the last state that is kept; who diverges, where others did.
            pool = self.pages.states.pool
            prefill.stops = {depth // pool.grid * pool.grid for depth in (len(tokens) - 1, match.structural)}
            prefill.grid = pool.layout.grid
        self.prefills.append(prefill)
        self.counters.lookup_tokens += len(tokens)
        self.counters.hit_tokens += sequence.computed
        return prefill

    def _admit(self, sample: Sample) -> bool | None:
        """True: left the queue. False: waits for another's prefill or for its adapter. None: no room, stop
        here."""
        group = sample.group
        if not self._has_adapter(group.lease):
            return False
        namespace = self.namespace_of(group)
        fresh = not sample.ids
        if fresh:
            for prefill in self.prefills:
                if prefill.group is group and not prefill.samples[0].ids and prefill.namespace == namespace:
                    self._attach(sample, prefill)
                    return True
        tokens = sample.tokens()
        scorer = self._prompt_scorer(group)
        limit = min(len(tokens) - 1, scorer.match_limit) if scorer else len(tokens) - 1
        match = self.pages.match(namespace, tokens, limit)
        for prefill in self.prefills:
            if not prefill.done and prefill.namespace == namespace:
                shared = min(prefill.common_prefix(tokens), limit) // self.pages.hit_grid * self.pages.hit_grid
                if shared > match.usable:
                    if self.pages.states is not None:
                        prefill.stops.add(shared)
                    return False
        match = self._prefetch.restored(match)
        if match is None:
            return False
        prefill = self._open(tokens, namespace, match, self._target_length(sample))
        if prefill is None:
            return None
        prefill.group, prefill.scorer = group, scorer
        self._attach(sample, prefill)
        if fresh:
            for sibling in [s for s in group.samples if s.state is SampleState.WAITING and not s.ids]:
                self._attach(sibling, prefill)
        return True

    def _prompt_scorer(self, group: Group) -> Scorer | None:
        """For the one prefill of a group that also scores its prompt, where that is wanted."""
        start = group.request.want.prompt_logprobs_from
        if start is None or group.prompt_logprobs is not None:
            return None
        if any(prefill.group is group and prefill.scorer is not None for prefill in self.prefills):
            return None
        return Scorer(start, len(group.prompt))

    def _attach(self, sample: Sample, prefill: Prefill) -> None:
        self.waiting.remove(sample)
        sample.state = SampleState.PREFILLING
        prefill.samples.append(sample)

    def _begin(self, sample: Sample, sequence: Sequence, prefill: Prefill, first: bool) -> None:
        group = sample.group
        prompt_tokens = len(group.prompt)
        if sample.cached_tokens is None:
            computed_it = first and prefill.group is group and group.hit is None
            own = computed_it or bool(sample.ids)
            sample.cached_tokens = min(prefill.hit.usable, prompt_tokens) if own else prompt_tokens
            self.counters.prompt_tokens += prompt_tokens
            self.counters.cached_tokens += sample.cached_tokens
        if group.hit is None:
            group.hit = prefill.hit
        sample.sequence = sequence
        sample.state = SampleState.RUNNING
        sample.mixed_kv = False
        bisect.insort(self.running, sample, key=_order)

    def _leave(self, sample: Sample, publish: bool) -> None:
        assert sample.sequence is not None
        self.running.remove(sample)
        self.pages.close(sample.sequence, sample.tokens() if publish else None)
        sample.sequence = None

    def _make_room(self, sample: Sample) -> None:
        sequence, pages = sample.sequence, self.pages
        assert sequence is not None
        if pages.has_room(sequence, sample.length):
            return
        # Several pages at once, so that a sample's pages tend to be neighbours.
        plenty = pages.allocator.num_free > len(self.running) + self.config.lookahead
        if plenty and pages.reserve(sequence, self._target_length(sample)):
            return
        while not pages.reserve(sequence, sample.length):
            if self._drop_ready():
                continue
            victim = self.running[-1]
            if victim is self.running[0] and self._drop_prefill(keep=0):
                continue
            self.retract(victim)
            if victim is sample:
                return

    def _drop_ready(self) -> bool:
        """Give back the pages of the youngest finished prefill that still holds samples."""
        for prefill in reversed(self.prefills):
            if prefill.done and prefill.samples:
                self._requeue(prefill)
                return True
        return False

    def _drop_prefill(self, keep: int = 1) -> bool:
        """Give back the pages of the youngest prefill under way, unless only `keep` are."""
        unfinished = [prefill for prefill in self.prefills if not prefill.done]
        if len(unfinished) <= keep:
            return False
        self._requeue(unfinished[-1])
        return True

    def _requeue(self, prefill: Prefill) -> None:
        self.prefills.remove(prefill)
        self.pages.close(prefill.sequence, prefill.tokens)
        self._requeue_samples(prefill.samples)
        if prefill.task is not None:
            self.scoring.appendleft(prefill.task)

    def _requeue_samples(self, samples: list[Sample]) -> None:
        for sample in samples:
            sample.state = SampleState.WAITING
            self._enqueue(sample)

    def _enqueue(self, sample: Sample) -> None:
        bisect.insort(self.waiting, sample, key=_order)

    def _target_length(self, sample: Sample) -> int:
        """Tokens to reserve room for: what exists plus the look-ahead, never beyond the end."""
        return sample.length + min(self.config.lookahead, sample.remaining)

    def _spare(self) -> int:
        """Pages left to running samples when somebody new comes in: one each."""
        return len(self.running)


def _order(sample: Sample) -> tuple[int, int]:
    return sample.order


def _begun(group: Group) -> bool:
    return any(s.ids or s.state is not SampleState.WAITING for s in group.samples)
