"""Control calls to a whole fleet: every engine answers, and the answers become one.

Owns pausing, updates, LoRA policies, memory and looking. Ignores generation (`rollout.router`). Every way out
of a call that failed half way ends with engines that agree: reopened, rolled back or fenced.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from engine.errors import Conflict, Corrupt, SparkrollError
from engine.types import (
    AdapterReport,
    AdapterUpdateReport,
    NamedTensor,
    PauseMode,
    PauseReport,
    UpdateBegin,
    UpdateProgress,
    UpdateReport,
)
from engine.validation import check_id
from rollout.adapter_source import AdapterSources
from rollout.metrics import RouterCounters
from rollout.protocol import AdapterSource, MemoryReport, VersionReport
from rollout.routing.adapters import FleetAdapters
from rollout.routing.errors import EngineLost
from rollout.routing.fanout import everyone, outcomes
from rollout.routing.recipe import PolicyRecipe
from rollout.routing.replica import Membership, Replica
from rollout.routing.transaction import FleetUpdates


class FleetControl:
    """The control half of a `RolloutService` over many engines."""

    def __init__(
        self, membership: Membership, recipe: PolicyRecipe, adapters: FleetAdapters, update_root: Path | None
    ) -> None:
        self._membership = membership
        self._adapters = adapters
        self._sources = AdapterSources(update_root)
        self._updates = FleetUpdates(membership, recipe, adapters, update_root)
        self.counters = RouterCounters()

    async def pause(self, mode: PauseMode, timeout_s: float) -> PauseReport:
        previous, self._membership.paused = self._membership.paused, mode
        try:
            reports = await everyone(
                self._membership, self._membership.routable(), lambda service: service.pause(mode, timeout_s)
            )
        except BaseException:
            await self._take_back(previous, timeout_s)
            raise
        return PauseReport(
            in_flight=sum(report.in_flight for report in reports.values()),
            retracted=sum(report.retracted for report in reports.values()),
            aborted=sum(report.aborted for report in reports.values()),
        )

    async def _take_back(self, previous: PauseMode | None, timeout_s: float) -> None:
        """After a pause that some engine refused: all are as they were before it."""
        if previous is None:
            results = await self._reopen(None)
            pending = self._updates.pending
            if pending is not None and any(isinstance(result, Conflict) for result in results.values()):
                # Engines that did pause stay so while an update is open, and would hold what is sent to them.
                await self._updates.rollback(pending)
                await self._reopen(None)
            return
        self._membership.paused = previous
        with contextlib.suppress(EngineLost):
            await outcomes(
                self._membership, self._membership.routable(), lambda service: service.pause(previous, timeout_s)
            )

    async def resume(self, expected_policy_version: int | None) -> None:
        current = self._membership.policy_version
        if expected_policy_version is not None and expected_policy_version != current:
            raise Conflict(field="expected_policy_version", expected=current, actual=expected_policy_version)
        if self._updates.pending is not None:
            raise Conflict(field="update", expected="no open update", actual=self._updates.pending)
        for result in (await self._reopen(expected_policy_version)).values():
            if isinstance(result, SparkrollError):
                raise result

    async def _reopen(self, expected_policy_version: int | None) -> dict[Replica, SparkrollError | None]:
        """Resume every engine, then let groups in; an engine that will not resume is fenced, so
        that nobody waits on it."""
        replicas = self._membership.routable()
        try:
            results = await outcomes(
                self._membership, replicas, lambda service: service.resume(expected_policy_version)
            )
        except EngineLost:
            results = {}
        for replica, result in results.items():
            if isinstance(result, Corrupt):
                self._membership.take_out(replica, result, fence=True)
        self._membership.paused = None
        self._membership.notify()
        return results

    async def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        try:
            return await self._updates.begin(begin)
        finally:
            self.counters.updates_refused = self._updates.refused

    async def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        return await self._updates.stage_disk(txn, uri)

    async def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return await self._updates.stage_tensors(txn, tensors)

    async def update_commit(self, txn: str) -> UpdateReport:
        return await self._updates.commit(txn)

    async def update_rollback(self, txn: str) -> None:
        await self._updates.rollback(txn)

    async def adapter_tensors(self, upload: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._sources.add(upload, tensors)

    async def update_adapter(self, source: AdapterSource) -> AdapterUpdateReport:
        check_id("adapter.name", source.name)
        update = await self._sources.read(source)
        if source.txn is not None:
            return await self._updates.stage_adapter(source.txn, update)
        return await self._adapters.update(update)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)

    async def adapters(self) -> list[AdapterReport]:
        return await self._adapters.reports()

    async def version(self) -> VersionReport:
        reports = await everyone(self._membership, self._membership.routable(), lambda service: service.version())
        first = next(iter(reports.values()))
        engines = {replica.engine_id: report.policy_version for replica, report in reports.items()}
        return msgspec.structs.replace(
            first,
            policy_version=self._membership.policy_version,
            adapters=self._adapters.current,
            engines=engines,
        )

    async def flush(self, scope: str) -> int:
        freed = await everyone(self._membership, self._membership.routable(), lambda service: service.flush(scope))
        return sum(freed.values())

    async def release_memory(self, tags: list[str]) -> MemoryReport:
        """All release or none: where an engine refuses, the others take theirs back."""
        replicas = self._membership.routable()
        results = await outcomes(self._membership, replicas, lambda service: service.release_memory(tags))
        refusals = [result for result in results.values() if isinstance(result, SparkrollError)]
        released = {replica: result for replica, result in results.items() if isinstance(result, MemoryReport)}
        if refusals:
            if released:
                await everyone(self._membership, list(released), lambda service: service.resume_memory(tags))
            raise refusals[0]
        return _sum_memory(released)

    async def resume_memory(self, tags: list[str]) -> MemoryReport:
        replicas = self._membership.routable()
        return _sum_memory(await everyone(self._membership, replicas, lambda service: service.resume_memory(tags)))


def _sum_memory(reports: dict[Replica, MemoryReport]) -> MemoryReport:
    def total(pick: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        for report in reports.values():
            for tag, size in getattr(report, pick).items():
                sums[tag] = sums.get(tag, 0) + size
        return sums

    return MemoryReport(before=total("before"), after=total("after"))
