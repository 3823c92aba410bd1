"""LoRA policies of one engine on its thread.

Owns what may run beside the engine's steps (reading, checking, laying out) and what runs between two of them,
with its time. Ignores other engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from engine.adapters import PreparedAdapter
from engine.engine import Engine
from engine.types import AdapterReport, AdapterUpdate, AdapterUpdateReport
from rollout.actors.engine_thread import EngineThread
from rollout.adapter_source import AdapterSources
from rollout.protocol import AdapterSource


class HostedAdapters:
    def __init__(self, thread: EngineThread, engine_id: str, root: Path | None) -> None:
        self._thread = thread
        self._engine_id = engine_id
        self.sources = AdapterSources(root)

    async def update(self, source: AdapterSource) -> AdapterUpdateReport:
        """Stage and publish, or stage for an open update."""
        update = await self.sources.read(source)
        staged = await self._stage(update, source.txn, keep_previous=False)
        if source.txn is not None:
            return staged
        published = await self._between(lambda engine: engine.adapters.publish(update.name, staged.adapter.rev))
        return self._report(published.adapter, staged.pause_ms + published.pause_ms)

    async def stage(self, update: AdapterUpdate, txn: str | None) -> AdapterUpdateReport:
        return await self._stage(update, txn, keep_previous=True)

    async def publish(self, name: str, rev: int) -> AdapterUpdateReport:
        return await self._between(lambda engine: engine.adapters.publish(name, rev, keep_previous=True))

    async def discard(self, name: str, rev: int) -> None:
        await self._thread.call(lambda engine: engine.adapters.discard(name, rev))

    async def retire(self, name: str, rev: int | None = None) -> None:
        await self._thread.call(lambda engine: engine.adapters.retire(name, rev))

    async def reports(self) -> list[AdapterReport]:
        return await self._thread.call(lambda engine: engine.adapters.reports())

    async def _stage(self, update: AdapterUpdate, txn: str | None, keep_previous: bool) -> AdapterUpdateReport:
        adapters = await self._thread.call(lambda engine: engine.adapters)
        prepared = await asyncio.to_thread(adapters.prepare_update, update)
        return await self._between(lambda engine: _stage(engine, update, prepared, txn, keep_previous))

    async def _between(self, run: Callable[[Engine], AdapterReport]) -> AdapterUpdateReport:
        """Run between two steps, and say how long they waited."""

        def timed(engine: Engine) -> AdapterUpdateReport:
            began = time.perf_counter()
            report = run(engine)
            return self._report(report, (time.perf_counter() - began) * 1e3)

        return await self._thread.call(timed)

    def _report(self, adapter: AdapterReport, pause_ms: float) -> AdapterUpdateReport:
        return AdapterUpdateReport(adapter=adapter, pause_ms=pause_ms, engines={self._engine_id: adapter.rev})


def _stage(
    engine: Engine, update: AdapterUpdate, prepared: PreparedAdapter, txn: str | None, keep_previous: bool
) -> AdapterReport:
    if txn is not None:
        return engine.update_stage_adapter(txn, update.name, prepared, update.rev, keep_previous)
    return engine.adapters.stage(update.name, prepared, update.rev)
