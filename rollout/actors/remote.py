"""The owner's side of an engine actor: an `EngineService` that lives in another process.

Owns translating calls and streams. When the process ends, every call and stream ends with
`EngineLost`, in the order of what had arrived before. Ignores restarts (`rollout.fleet`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray
from ray.exceptions import RayError

from engine.errors import SparkrollError
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
from rollout.actors.engine_actor import ORDERED, StreamItem
from rollout.actors.streams import EventQueue
from rollout.protocol import AdapterSource, Event, GenerateCall, GroupEnd, Health, MemoryReport, Origin, VersionReport
from rollout.routing.errors import EngineLost

logger = logging.getLogger(__name__)


class SharedPut:
    """Puts what several engines are sent into the object store once: the newest value only."""

    def __init__(self) -> None:
        self._value: Any = None
        self._ref: ray.ObjectRef | None = None

    def __call__(self, value: Any) -> ray.ObjectRef:
        if self._ref is None or self._value is not value:
            self._value, self._ref = value, ray.put(value)
        return self._ref


class ActorService:
    """`on_lost` is called once, when the actor turns out to be gone."""

    def __init__(self, name: str, handle: Any, put: SharedPut, on_lost: Callable[[EngineLost], None]) -> None:
        self.name = name
        self.handle = handle
        self._put = put
        self._on_lost = on_lost
        self._numbers = itertools.count()
        self._turns = itertools.count()
        self._queues: dict[int, EventQueue] = {}
        self._lost: EngineLost | None = None
        self._pump = asyncio.get_running_loop().create_task(self._receive(), name=f"events of {name}")

    async def close(self) -> None:
        """Stop listening; open streams end with `EngineLost`."""
        self._on_lost = lambda error: None
        self._fail(EngineLost(f"{self.name} was let go"))
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Event, None]:
        if self._lost is not None:
            raise self._lost
        number, queue = next(self._numbers), EventQueue()
        self._queues[number] = queue
        ended = False
        # The turn is taken before anything is awaited, so that order here is order there.
        admitted = self.handle.open.remote(next(self._turns), number, call)
        try:
            await self._value(admitted)
            while not ended:
                for item in await queue.take():
                    if isinstance(item, SparkrollError):
                        ended = True
                        raise item
                    ended = isinstance(item, GroupEnd)
                    yield item
        except SparkrollError:
            ended = True
            raise
        finally:
            self._queues.pop(number, None)
            if not ended and self._lost is None:
                self.handle.cancel.remote(next(self._turns), call.request.group_id)

    async def _receive(self) -> None:
        """Sort the actor's events into their streams until it ends."""
        try:
            async for ref in self.handle.events.options(num_returns="streaming").remote():
                items: list[StreamItem] = await ref
                for number, item in items:
                    queue = self._queues.get(number)
                    if queue is not None:
                        queue.push(item)
            self._fail(EngineLost(f"{self.name} stopped sending"))
        except RayError as error:
            self._fail(EngineLost(f"{self.name} is gone: {type(error).__name__}"))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("receiving from %s failed", self.name)
            self._fail(EngineLost(f"{self.name} cannot be understood: {error}"))

    def _fail(self, error: EngineLost) -> None:
        if self._lost is not None:
            return
        self._lost = error
        for queue in self._queues.values():
            queue.push(error)
        self._on_lost(error)

    async def _call(self, method: str, *args: Any) -> Any:
        if self._lost is not None:
            raise self._lost
        turn = next(self._turns) if method in ORDERED else None
        return await self._value(self.handle.invoke.remote(turn, method, *args))

    async def _value(self, ref: Any) -> Any:
        try:
            accepted, value = await ref
        except RayError as error:
            lost = EngineLost(f"{self.name} is gone: {type(error).__name__}")
            self._fail(lost)
            raise lost from error
        if not accepted:
            raise value
        return value

    async def origin(self) -> Origin:
        return await self._call("origin")

    async def score(self, request: ScoreRequest) -> ScoreOutput:
        return await self._call("score", request)

    async def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        return await self._call("abort", group_ids)

    async def pause(self, mode: PauseMode, timeout_s: float) -> PauseReport:
        return await self._call("pause", mode, timeout_s)

    async def resume(self, expected_policy_version: int | None) -> None:
        await self._call("resume", expected_policy_version)

    async def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        return await self._call("update_begin", begin)

    async def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        return await self._call("update_disk", txn, uri)

    async def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return await self._call("update_tensors", txn, self._put(tensors))

    async def update_commit(self, txn: str) -> UpdateReport:
        return await self._call("update_commit", txn)

    async def update_rollback(self, txn: str) -> None:
        await self._call("update_rollback", txn)

    async def adapter_tensors(self, upload: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return await self._call("adapter_tensors", upload, tensors)

    async def update_adapter(self, source: AdapterSource) -> AdapterUpdateReport:
        return await self._call("update_adapter", source)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    async def adapters(self) -> list[AdapterReport]:
        return await self._call("adapters")

    async def stage_adapter(self, update: AdapterUpdate, txn: str | None) -> AdapterUpdateReport:
        return await self._call("stage_adapter", self._put(update), txn)

    async def publish_adapter(self, name: str, rev: int) -> AdapterUpdateReport:
        return await self._call("publish_adapter", name, rev)

    async def discard_adapter(self, name: str, rev: int) -> None:
        await self._call("discard_adapter", name, rev)

    async def retire_adapter(self, name: str, rev: int) -> None:
        await self._call("retire_adapter", name, rev)

    async def version(self) -> VersionReport:
        return await self._call("version")

    async def flush(self, scope: str) -> int:
        return await self._call("flush", scope)

    async def release_memory(self, tags: list[str]) -> MemoryReport:
        return await self._call("release_memory", tags)

    async def resume_memory(self, tags: list[str]) -> MemoryReport:
        return await self._call("resume_memory", tags)

    async def session_open(self, session_id: str, ttl_s: float) -> None:
        await self._call("session_open", session_id, ttl_s)

    async def session_close(self, session_id: str) -> None:
        await self._call("session_close", session_id)

    async def health(self) -> Health:
        return await self._call("health")

    async def metrics(self) -> str:
        return await self._call("metrics")

    async def capabilities(self) -> dict[str, object]:
        return await self._call("capabilities")
