"""Who waits, whose prompt is computed, who runs.

Owns the queues, their order and their limits, and how somebody goes from one to another. Ignores who goes next
(`engine.scheduler.scheduler`, `engine.scheduler.admitter`) and pages.

Order is by arrival, then sample index, and a retracted sample keeps its place, so nobody is
overtaken for ever.
"""

from __future__ import annotations

import bisect
from collections import deque

from engine.config import SchedulerConfig, number
from engine.request import Group, Sample, SampleState
from engine.scheduler.prefill import Prefill, ScoreTask
from lora.versions import AdapterVersion


class Queues:
    """`waiting` and `running` are sorted by `Sample.order`; siblings of a group are adjacent."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.max_running = number(config.max_running)
        self.prefill_tokens = number(config.prefill_tokens)
        self.lookahead = config.lookahead
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.prefills: list[Prefill] = []
        self.scoring: deque[ScoreTask] = deque()
        self.draining = False

    @property
    def idle(self) -> bool:
        return not (self.running or self.prefills or self.waiting or self.scoring)

    @property
    def has_begun_work(self) -> bool:
        """Whether anything is left that a drain must see to its end."""
        if self.running or self.prefills or self.scoring:
            return True
        return any(begun(sample.group) for sample in self.waiting)

    @property
    def wants_prefill(self) -> bool:
        """Whether prefilling or starting samples may be possible now."""
        if self.scoring or any(not p.done for p in self.prefills):
            return True
        if len(self.running) >= self.max_running:
            return False
        if self.draining:
            return bool(self.prefills) or any(begun(sample.group) for sample in self.waiting)
        return bool(self.prefills or self.waiting)

    def busy_adapters(self) -> set[AdapterVersion]:
        """Those that running samples and prefills compute with."""
        leases = [sample.group.lease for sample in self.running] + [prefill.lease for prefill in self.prefills]
        return {lease.version for lease in leases if lease is not None}

    def adapter_order(self) -> dict[AdapterVersion, int]:
        """Adapters of those who wait, by who comes first."""
        leases = [task.lease for task in self.scoring] + [sample.group.lease for sample in self.waiting]
        versions = dict.fromkeys(lease.version for lease in leases if lease is not None)
        return {version: place for place, version in enumerate(versions)}

    @property
    def has_row(self) -> bool:
        """Room in the batch, and not so much prefill ahead that reserving more would only
        keep others from finding it in the cache."""
        ahead = sum(p.remaining for p in self.prefills)
        return len(self.running) + len(self.prefills) < self.max_running and (ahead < 2 * self.prefill_tokens)

    @property
    def spare(self) -> int:
        """Pages left to running samples when somebody new comes in: one each."""
        return len(self.running)

    def target_length(self, sample: Sample) -> int:
        """Tokens to reserve room for: what exists plus the look-ahead, never beyond the end."""
        return sample.length + min(self.lookahead, sample.remaining)

    def may_begin(self, sample: Sample) -> bool:
        """While draining, only who belongs to a group that has begun."""
        return not self.draining or begun(sample.group)

    def enqueue(self, sample: Sample) -> None:
        bisect.insort(self.waiting, sample, key=_order)

    def requeue(self, samples: list[Sample]) -> None:
        for sample in samples:
            sample.state = SampleState.WAITING
            self.enqueue(sample)

    def attach(self, sample: Sample, prefill: Prefill) -> None:
        self.waiting.remove(sample)
        sample.state = SampleState.PREFILLING
        prefill.samples.append(sample)

    def set_running(self, sample: Sample) -> None:
        sample.state = SampleState.RUNNING
        bisect.insort(self.running, sample, key=_order)


def _order(sample: Sample) -> tuple[int, int]:
    return sample.order


def begun(group: Group) -> bool:
    return any(s.ids or s.state is not SampleState.WAITING for s in group.samples)
