"""One engine behind the asynchronous service interface.

Owns the bridge between callers on an event loop and the engine on its thread: admission, text,
deadlines, cancellation, health. Ignores other engines and how callers got here (in process,
through a Ray actor, over HTTP).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

from engine.engine import Engine
from engine.errors import Conflict, Corrupt, DeadlineExceeded, SparkrollError
from engine.memory.residency import TAGS
from engine.scheduler.jobs import ScoreJob
from engine.types import (
    AbortOutcome,
    AdapterReport,
    AdapterUpdate,
    AdapterUpdateReport,
    NamedTensor,
    PauseMode,
    PauseReport,
    ScoreOutput,
    ScoreRequest,
    UpdateBegin,
    UpdateProgress,
    UpdateReport,
)
from engine.weights.folder import open_update_folder
from rollout.actors.engine_thread import EngineThread
from rollout.actors.hosted_adapters import HostedAdapters
from rollout.actors.streams import EventQueue, GroupStream, Push
from rollout.actors.text_front import TextFront
from rollout.draft_metrics import draft_exposition
from rollout.metrics import exposition, plan_exposition
from rollout.protocol import AdapterSource, Event, GenerateCall, GroupEnd, Health, MemoryReport, Origin, VersionReport
from rollout.routing.sessions import SessionTable


@dataclasses.dataclass(slots=True, frozen=True)
class _Snapshot:
    """What the engine's thread last said about itself."""

    state: str
    policy_version: int
    pending: str | None
    running: int
    waiting: int
    drafter_version: int = 0


class EngineHost:
    """Implements `EngineService` over one `Engine`. Make and use it in one event loop::

        host = EngineHost(lambda: Engine.from_pretrained(folder, config))
        await host.start()
        async for event in host.generate(call): ...
        await host.stop()

    `update_root` is the only folder that disk updates and adapters may come from (None: none are taken).
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        text: TextFront | None = None,
        engine_id: str = "engine",
        incarnation: int = 1,
        delta_interval_s: float = 0.03,
        update_root: Path | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.incarnation = incarnation
        self._text = text or TextFront(None)
        self._update_root = update_root
        self._streams: dict[str, GroupStream] = {}
        self._sessions = SessionTable()
        self._snapshot = _Snapshot("starting", 0, None, 0, 0)
        self._limits: dict[str, object] = {}
        self._digest: tuple[int, str] | None = None
        self._thread = EngineThread(
            load,
            delta_interval_s=delta_interval_s,
            on_turn=self._observe,
            on_end=self._fail_streams,
            name=engine_id,
        )
        self._adapters = HostedAdapters(self._thread, engine_id, update_root)

    async def start(self) -> None:
        await self._thread.start()
        self._limits = await self._thread.call(_describe)

    async def stop(self) -> None:
        """Every open stream and call ends with `Draining`."""
        await self._thread.stop()

    # --- generation ---------------------------------------------------------------------------

    async def open(self, call: GenerateCall, push: Push) -> None:
        """Admit a group; its events go to `push`, some perhaps before this returns.

        The engine's thread is told before anything is awaited, so that calls made one after
        another take effect in that order. Raises what the engine refuses.
        """
        text = self._text.read(call)
        request = text.request
        if request.group_id in self._streams:
            raise Conflict(field="group_id", expected="an id no live group has", actual=request.group_id)
        self._sessions.use(request.session_id)
        stream = GroupStream(text, push, self._thread.emit, self._origin_at, self._forget)
        admitted = self._thread.call(lambda engine: engine.add_group(request, stream, dict(text.watchers)))
        self._streams[request.group_id] = stream
        try:
            await admitted
        except BaseException:
            stream.close()
            self.cancel(request.group_id)
            raise
        if call.deadline_ms is not None and not stream.closed:
            asyncio.get_running_loop().call_later(call.deadline_ms / 1000, self._expire, stream, call.deadline_ms)

    def cancel(self, group_id: str) -> None:
        """Nobody reads the group any more: end it."""
        stream = self._streams.get(group_id)
        if stream is not None:
            stream.close()
        self._thread.post(lambda engine: engine.abort([group_id]))

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event, None]:
        queue = EventQueue()
        await self.open(call, queue.push)
        ended = False
        try:
            while not ended:
                for item in await queue.take():
                    if isinstance(item, SparkrollError):
                        ended = True
                        raise item
                    ended = isinstance(item, GroupEnd)
                    yield item
        finally:
            if not ended:
                self.cancel(call.request.group_id)

    async def score(self, request: ScoreRequest) -> ScoreOutput:
        job = ScoreJob()
        await self._thread.call(lambda engine: engine.add_score(request, job))
        return await self._thread.poll(partial(_scored, job=job))

    async def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        return await self._thread.call(lambda engine: engine.abort(group_ids))

    # --- control ------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, timeout_s: float) -> PauseReport:
        """A pause that is not quiescent in time is taken back, so that nothing stays half shut."""
        before = await self._thread.call(partial(_pause, mode=mode))
        report = self._thread.poll(lambda engine: engine.pause_report if engine.quiescent else None)
        try:
            async with asyncio.timeout(timeout_s):
                return await report
        except TimeoutError:
            late = await self._thread.call(partial(_take_back, before=before))
            if late is not None:
                return late
            raise DeadlineExceeded(
                field="timeout_s", expected=f"quiescent within {timeout_s} s", actual="samples still running"
            ) from None

    async def resume(self, expected_policy_version: int | None) -> None:
        await self._thread.call(lambda engine: engine.resume(expected_policy_version))

    async def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        return await self._thread.call(lambda engine: engine.update_begin(begin))

    async def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        folder = open_update_folder(uri, self._update_root)
        return await self._thread.call(lambda engine: engine.update_stage_folder(txn, folder))

    async def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return await self._thread.call(lambda engine: engine.update_stage(txn, tensors))

    async def update_commit(self, txn: str) -> UpdateReport:
        report = await self._thread.call(lambda engine: engine.update_commit(txn))
        if "policy" in report.loaded:
            self._digest = (report.policy_version, report.digest)
        return report

    async def update_rollback(self, txn: str) -> None:
        await self._thread.call(lambda engine: engine.update_rollback(txn))

    async def adapter_tensors(self, upload: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._adapters.sources.add(upload, tensors)

    async def update_adapter(self, source: AdapterSource) -> AdapterUpdateReport:
        return await self._adapters.update(source)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.retire(name)

    async def adapters(self) -> list[AdapterReport]:
        return await self._adapters.reports()

    async def stage_adapter(self, update: AdapterUpdate, txn: str | None) -> AdapterUpdateReport:
        return await self._adapters.stage(update, txn)

    async def publish_adapter(self, name: str, rev: int) -> AdapterUpdateReport:
        return await self._adapters.publish(name, rev)

    async def discard_adapter(self, name: str, rev: int) -> None:
        await self._adapters.discard(name, rev)

    async def retire_adapter(self, name: str, rev: int) -> None:
        await self._adapters.retire(name, rev)

    async def version(self) -> VersionReport:
        def look(engine: Engine) -> tuple[int, str, int, dict[str, int]]:
            # Hashing all weights takes a while, so it is done once for each version, if ever.
            known = self._digest
            version = engine.policy.version
            digest = known[1] if known is not None and known[0] == version else engine.digest()
            return version, digest, engine.drafter_version, engine.adapters.current

        version, digest, drafter_version, adapters = await self._thread.call(look)
        self._digest = version, digest
        return VersionReport(
            policy_version=version,
            drafter_version=drafter_version,
            adapters=adapters,
            digest=digest,
            engines={self.engine_id: version},
        )

    async def flush(self, scope: str) -> int:
        return await self._thread.call(lambda engine: engine.flush(scope))

    async def release_memory(self, tags: list[str]) -> MemoryReport:
        before, after = await self._thread.call(lambda engine: engine.release_memory(tags or list(TAGS)))
        return MemoryReport(before=before, after=after)

    async def resume_memory(self, tags: list[str]) -> MemoryReport:
        before, after = await self._thread.call(lambda engine: engine.resume_memory(tags or list(TAGS)))
        return MemoryReport(before=before, after=after)

    async def session_open(self, session_id: str, ttl_s: float) -> None:
        self._sessions.open(session_id, ttl_s)

    async def session_close(self, session_id: str) -> None:
        self._sessions.close(session_id)

    # --- looking ------------------------------------------------------------------------------

    async def origin(self) -> Origin:
        return self._origin_at(self._snapshot.policy_version)

    async def health(self) -> Health:
        """Never waits for the engine's thread: a stuck engine is what it is there to show."""
        seen = self._snapshot
        return Health(
            state="fenced" if self._thread.ended is not None else seen.state,  # type: ignore[arg-type]
            last_step_age_ms=(time.monotonic() - self._thread.last_turn) * 1e3,
            policy_version=seen.policy_version,
            drafter_version=seen.drafter_version,
            pending_update=seen.pending,
            running=seen.running,
            waiting=seen.waiting,
        )

    async def metrics(self) -> str:
        labels = {"engine": self.engine_id, "incarnation": str(self.incarnation)}
        counters, gauges, drafts, plan = await self._thread.call(
            lambda engine: (
                dataclasses.asdict(engine.counters),
                dataclasses.asdict(engine.gauges()),
                engine.draft_report(),
                engine.memory_plan.to_dict(),
            )
        )
        backend = {name: str(self._limits[name]) for name in ("device", "dtype", "attention", "loop")}
        info = exposition("engine", {}, {"info": 1}, labels | backend)
        shown = exposition("engine", counters, gauges, labels) + plan_exposition(plan, labels)
        return shown + draft_exposition(drafts, labels) + info

    async def capabilities(self) -> dict[str, object]:
        text = {"text": self._text.available, "chat": self._text.chat}
        return {**self._limits, **text, "adapters": True}

    # --- inside -------------------------------------------------------------------------------

    def _origin_at(self, policy_version: int) -> Origin:
        return Origin(
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            policy_version=policy_version,
            drafter_version=self._snapshot.drafter_version,
        )

    def _observe(self, engine: Engine) -> None:
        gauges = engine.gauges()
        self._snapshot = _Snapshot(
            engine.state,
            engine.policy.version,
            engine.pending,
            gauges.running + gauges.prefilling,
            gauges.waiting,
            engine.drafter_version,
        )

    def _forget(self, stream: GroupStream) -> None:
        if self._streams.get(stream.group_id) is stream:
            del self._streams[stream.group_id]

    def _expire(self, stream: GroupStream, deadline_ms: int) -> None:
        if not stream.closed:
            stream.push(DeadlineExceeded(field="deadline_ms", expected=f"done in {deadline_ms} ms", actual="running"))
            self.cancel(stream.group_id)

    def _fail_streams(self, reason: SparkrollError) -> None:
        for stream in list(self._streams.values()):
            stream.push(reason)


def _pause(engine: Engine, mode: PauseMode) -> PauseMode | None:
    before = engine.paused
    engine.pause(mode)
    return before


def _take_back(engine: Engine, before: PauseMode | None) -> PauseReport | None:
    """Undo a pause that is not quiescent, back to the one `before`; the report of one that is."""
    if engine.quiescent:
        return engine.pause_report
    if before is None:
        engine.resume()
    else:
        engine.pause(before)
    return None


def _describe(engine: Engine) -> dict[str, object]:
    limits = dataclasses.asdict(engine.limits)
    config = engine.config
    drafter = {"drafter": config.dspark.enabled}
    return limits | drafter | {name: getattr(config, name) for name in ("device", "dtype", "attention", "loop")}


def _scored(engine: Engine, job: ScoreJob) -> ScoreOutput | None:
    if job.output is None and engine.policy.fenced:
        raise Corrupt(f"this engine is fenced: {engine.policy.fenced}")
    return job.output
