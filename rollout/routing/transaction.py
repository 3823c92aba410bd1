"""A weight update of the whole fleet.

Owns the order: begin everywhere, stage everywhere, commit everywhere. A failure before the
commit rolls every engine back. A commit that some engines fail leaves the others at the new
version and fences those that failed, so that no mix is ever served; if none took the new
version and all still stand by the old one, the update simply failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import msgspec

from engine.errors import Conflict, Corrupt, NotFound, SparkrollError, Unsupported
from engine.types import AdapterUpdate, AdapterUpdateReport, NamedTensor, UpdateBegin, UpdateProgress, UpdateReport
from engine.weights.folder import open_update_folder
from rollout.protocol import VersionReport
from rollout.routing.adapters import FleetAdapters
from rollout.routing.errors import Behind, EngineLost
from rollout.routing.fanout import everyone, outcomes
from rollout.routing.recipe import PolicyRecipe
from rollout.routing.replica import Membership, Replica

logger = logging.getLogger(__name__)


class FleetUpdates:
    """At most one transaction at a time; its engines are those routable when it began."""

    def __init__(
        self, membership: Membership, recipe: PolicyRecipe, adapters: FleetAdapters, update_root: Path | None
    ) -> None:
        self._membership = membership
        self._recipe = recipe
        self._adapters = adapters
        self._with: list[AdapterUpdate] = []
        """LoRA policies' revisions that the open transaction's commit publishes."""
        self._update_root = update_root
        self._begin: UpdateBegin | None = None
        self._engines: list[Replica] = []
        self._last_call = 0.0
        self._lock = asyncio.Lock()
        self.refused = 0
        """Updates refused because they would not raise the version or named another base."""

    @property
    def pending(self) -> str | None:
        return None if self._begin is None or self._silent(self._begin) else self._begin.txn

    async def begin(self, begin: UpdateBegin) -> UpdateProgress:
        async with self._lock:
            await self._drop_silent()
            if self._begin is not None:
                raise Conflict(field="txn", expected=f"no open update, but {self._begin.txn} is", actual=begin.txn)
            self._check_version(begin)
            engines = self._membership.routable()
            try:
                progress = await everyone(self._membership, engines, lambda service: service.update_begin(begin))
            except SparkrollError:
                await self._roll_back(engines, begin.txn)
                raise
            self._begin, self._engines, self._last_call = begin, list(progress), time.monotonic()
            self._recipe.begin()
            return next(iter(progress.values()))

    async def stage_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        async with self._lock:
            self._require(txn)
            progress = await self._stage(lambda service: service.update_tensors(txn, tensors))
            await asyncio.to_thread(self._recipe.add_tensors, tensors)
            return progress

    async def stage_disk(self, txn: str, uri: str) -> UpdateProgress:
        async with self._lock:
            self._require(txn)
            folder = open_update_folder(uri, self._update_root)
            progress = await self._stage(lambda service: service.update_disk(txn, str(folder)))
            await asyncio.to_thread(self._recipe.add_folder, folder)
            return progress

    async def stage_adapter(self, txn: str, update: AdapterUpdate) -> AdapterUpdateReport:
        """A revision to be published by the commit. One that is refused leaves the transaction as it was."""
        async with self._lock:
            self._require(txn)
            update, staged = await self._adapters.stage(update, self._present(), txn)
            self._with.append(update)
            self._last_call = time.monotonic()
            return next(iter(staged.values()))

    async def commit(self, txn: str) -> UpdateReport:
        async with self._lock:
            begin = self._require(txn)
            engines, adapters = self._present(), self._with
            try:
                results = await outcomes(self._membership, engines, lambda service: service.update_commit(txn))
            finally:
                self._begin, self._engines, self._with = None, [], []
            reports = {engine: result for engine, result in results.items() if isinstance(result, UpdateReport)}
            if reports:
                report = await self._committed(begin, results, reports)
                for update in adapters:
                    await self._adapters.published(update, list(reports), list(reports))
                return report
            for update in adapters:
                self._adapters.forget(update)
            failures = {engine: result for engine, result in results.items() if isinstance(result, SparkrollError)}
            self._recipe.rollback()
            await self._fence_movers(failures)
            raise next(iter(failures.values()))

    async def rollback(self, txn: str) -> None:
        async with self._lock:
            self._require(txn)
            await self._abandon()

    def _check_version(self, begin: UpdateBegin) -> None:
        """The policy's version only ever rises."""
        if begin.module != "policy":
            raise Unsupported(field="module", expected="policy (a fleet cannot replay others)", actual=begin.module)
        current = self._membership.policy_version
        if begin.new_version <= current:
            self.refused += 1
            raise Conflict(field="new_version", expected=f"more than {current}", actual=begin.new_version)
        if begin.base_version != current:
            self.refused += 1
            raise Conflict(field="base_version", expected=current, actual=begin.base_version)

    def _require(self, txn: str) -> UpdateBegin:
        if self._begin is None or self._begin.txn != txn:
            raise NotFound(field="txn", expected=self.pending or "no update is open", actual=txn)
        self._last_call = time.monotonic()
        return self._begin

    def _present(self) -> list[Replica]:
        return [engine for engine in self._engines if engine.routable]

    async def _stage(self, call) -> UpdateProgress:
        try:
            progress = await everyone(self._membership, self._present(), call)
        except SparkrollError:
            await self._abandon()
            raise
        self._last_call = time.monotonic()
        return next(iter(progress.values()))

    async def _committed(
        self,
        begin: UpdateBegin,
        results: dict[Replica, UpdateReport | SparkrollError],
        reports: dict[Replica, UpdateReport],
    ) -> UpdateReport:
        """Some engine switched, so the fleet has; whoever did not, or holds other bytes, is out."""
        await asyncio.to_thread(self._recipe.commit)
        digest = next(iter(reports.values())).digest
        self._membership.policy_version, self._membership.digest = begin.new_version, digest
        fenced = []
        for engine, result in results.items():
            if isinstance(result, SparkrollError):
                reason = result
            elif (result.policy_version, result.digest) == (begin.new_version, digest):
                engine.policy_version = begin.new_version
                continue
            else:
                reason = Corrupt(field=f"{engine.name} digest", expected=digest, actual=result.digest)
            fenced.append(engine.engine_id)
            self._membership.take_out(engine, reason, fence=True)
            reports.pop(engine, None)
        for engine in self._membership.routable():
            if engine.policy_version != begin.new_version:
                self._membership.take_out(engine, Behind(f"{engine.name} joined after {begin.txn} began"))
        return self._report(reports, fenced)

    def _report(self, reports: dict[Replica, UpdateReport], fenced: list[str]) -> UpdateReport:
        first = next(iter(reports.values()))
        return msgspec.structs.replace(
            first,
            pause_ms=max(report.pause_ms for report in reports.values()),
            flushed_tokens=sum(report.flushed_tokens for report in reports.values()),
            retracted=sum(report.retracted for report in reports.values()),
            engines={engine.engine_id: report.policy_version for engine, report in reports.items()},
            fenced=fenced,
        )

    async def _fence_movers(self, failures: dict[Replica, SparkrollError]) -> None:
        """After a commit that nobody made: keep the engines that still hold the old policy."""
        answers = await outcomes(self._membership, list(failures), lambda service: service.version())
        for engine, answer in answers.items():
            if not isinstance(answer, VersionReport) or answer.policy_version != self._membership.policy_version:
                self._membership.take_out(engine, failures[engine], fence=True)

    def _silent(self, begin: UpdateBegin) -> bool:
        return time.monotonic() - self._last_call > begin.timeout_s

    async def _drop_silent(self) -> None:
        if self._begin is not None and self._silent(self._begin):
            logger.warning("update %s was silent for %.1f s and is rolled back", self._begin.txn, self._begin.timeout_s)
            await self._abandon()

    async def _abandon(self) -> None:
        assert self._begin is not None
        begin, engines = self._begin, self._present()
        for update in self._with:
            self._adapters.forget(update)
        self._begin, self._engines, self._with = None, [], []
        self._recipe.rollback()
        await self._roll_back(engines, begin.txn)

    async def _roll_back(self, engines: list[Replica], txn: str) -> None:
        """Best effort: an engine that never opened the transaction, or timed it out, is fine."""
        try:
            answers = await outcomes(self._membership, engines, lambda service: service.update_rollback(txn))
        except EngineLost:
            return
        for engine, answer in answers.items():
            if isinstance(answer, SparkrollError) and not isinstance(answer, (Conflict, NotFound)):
                self._membership.take_out(engine, answer, fence=True)
