"""What an engine offers to the layers above it, whether one engine, a Ray actor or a fleet.

Owns the asynchronous interface that `EngineHost` (one engine and its thread), the Ray actor's
handle and the `Router` (many of them) all implement, so that the server needs to know one thing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

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
from rollout.protocol import AdapterSource, Event, GenerateCall, Health, MemoryReport, Origin, VersionReport


class RolloutService(Protocol):
    """Every method may raise a `SparkrollError`; cancellation of a stream aborts its group."""

    async def origin(self) -> Origin: ...

    def generate(self, call: GenerateCall) -> AsyncIterator[Event]: ...

    async def score(self, request: ScoreRequest) -> ScoreOutput: ...

    async def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        """Exact ids; None means all. Returns once their pages are free."""
        ...

    async def pause(self, mode: PauseMode, timeout_s: float) -> PauseReport: ...

    async def resume(self, expected_policy_version: int | None) -> None: ...

    async def update_begin(self, begin: UpdateBegin) -> UpdateProgress: ...

    async def update_disk(self, txn: str, uri: str) -> UpdateProgress: ...

    async def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress: ...

    async def update_commit(self, txn: str) -> UpdateReport: ...

    async def update_rollback(self, txn: str) -> None: ...

    async def adapter_tensors(self, upload: str, tensors: list[NamedTensor]) -> UpdateProgress: ...

    async def update_adapter(self, source: AdapterSource) -> AdapterUpdateReport:
        """Take a revision of a LoRA policy everywhere and let its name lead to it, or do neither."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """No further request finds the policy; those under way end with what they have."""
        ...

    async def adapters(self) -> list[AdapterReport]: ...

    async def version(self) -> VersionReport: ...

    async def flush(self, scope: str) -> int:
        """Tokens freed; `scope` is "all" or "stale" (epochs before the present one)."""
        ...

    async def release_memory(self, tags: list[str]) -> MemoryReport: ...

    async def resume_memory(self, tags: list[str]) -> MemoryReport: ...

    async def session_open(self, session_id: str, ttl_s: float) -> None: ...

    async def session_close(self, session_id: str) -> None: ...

    async def health(self) -> Health: ...

    async def metrics(self) -> str:
        """Prometheus text."""
        ...

    async def capabilities(self) -> dict[str, object]: ...


class EngineService(RolloutService, Protocol):
    """One engine, with what a fleet needs to publish a LoRA policy in two phases."""

    async def stage_adapter(self, update: AdapterUpdate, txn: str | None) -> AdapterUpdateReport:
        """Check and take a revision that nobody sees yet: until `publish_adapter`, or the commit of `txn`."""
        ...

    async def publish_adapter(self, name: str, rev: int) -> AdapterUpdateReport:
        """Let the name lead to the staged revision. Earlier ones stay addressable until retired."""
        ...

    async def discard_adapter(self, name: str, rev: int) -> None: ...

    async def retire_adapter(self, name: str, rev: int) -> None: ...
