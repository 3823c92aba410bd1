"""The table of routes: the whole HTTP surface in one place.

Owns names, paths, access levels, bodies and the call each route makes on a `RolloutService`.
Ignores how bytes move (`rollout.server`) and repeats (`rollout.idempotency`). The application
is built from `ROUTES`, and so is the test that tries every route with every key.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import InvalidRequest
from engine.types import AdapterUpdateReport, GroupOutput, PauseReport, ScoreOutput, UpdateProgress, UpdateReport
from rollout.auth import Access
from rollout.protocol import (
    PROTOCOL,
    AbortCall,
    AbortReport,
    AdapterList,
    AdapterTensorsCall,
    Call,
    Done,
    Event,
    FlushCall,
    FlushReport,
    GenerateCall,
    Health,
    MemoryCall,
    MemoryReport,
    PauseCall,
    ResumeCall,
    ScoreCall,
    SessionCloseCall,
    SessionOpenCall,
    UnloadAdapterCall,
    UpdateAdapterCall,
    UpdateBeginCall,
    UpdateDiskCall,
    UpdateEndCall,
    UpdateTensorsCall,
    VersionReport,
)
from rollout.service import RolloutService

LIVE_WITHIN_MS = 30_000.0
_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. `request` is the body's type (None: a GET without one), `reply` the type of
    `Reply.result` (str: plain text). `run` makes the call; for a `stream` route it gives the
    events. An `abortable` operation ends when its last caller is gone. `check` refuses a body before
    anything runs. `status` turns a result into the HTTP status."""

    name: str
    path: str
    access: Access
    request: type | None
    reply: Any
    run: Callable[[RolloutService, Any], Awaitable[Any] | AsyncIterator[Event]]
    method: Literal["GET", "POST"] = "POST"
    abortable: bool = False
    stream: bool = False
    check: Callable[[Any], None] = lambda call: None
    status: Callable[[Any], int] = lambda result: 200


def check_name(field: str, value: str) -> None:
    """Ids are 1 to 256 printable characters: they end up in logs and headers."""
    if not 0 < len(value) <= _NAME_CHARACTERS or not value.isprintable():
        expected = f"1 to {_NAME_CHARACTERS} printable characters"
        raise InvalidRequest(field=field, expected=expected, actual=value[:_NAME_CHARACTERS])


def check_call(call: Call | GenerateCall) -> None:
    """What every body must satisfy whatever its route."""
    check_name("op_id", call.op_id)
    if call.proto != PROTOCOL:
        raise InvalidRequest(field="proto", expected=PROTOCOL, actual=call.proto)
    if call.deadline_ms is not None and call.deadline_ms <= 0:
        raise InvalidRequest(field="deadline_ms", expected="a positive number", actual=call.deadline_ms)


def _generate(service: RolloutService, call: GenerateCall) -> AsyncIterator[Event]:
    return service.generate(call)


def _check_continue(call: GenerateCall) -> None:
    _check_prompt(call)
    if not call.request.resume:
        raise InvalidRequest(field="request.resume", expected="at least one sample to continue", actual="none")


def _check_prompt(call: GenerateCall) -> None:
    check_name("request.group_id", call.request.group_id)
    if call.request.session_id is not None:
        check_name("request.session_id", call.request.session_id)
    given = {"request.prompt_ids": len(call.request.prompt_ids) > 0}
    given |= {"text": call.text is not None, "messages": call.messages is not None}
    named = [field for field, present in given.items() if present]
    if len(named) != 1:
        field = named[1] if len(named) > 1 else "request.prompt_ids"
        actual = f"{' and '.join(named)}" if named else "an empty prompt"
        raise InvalidRequest(field=field, expected="one non-empty prompt: prompt_ids, text or messages", actual=actual)
    for field, value in (("text", call.text), ("messages", call.messages)):
        if value is not None and not value:
            raise InvalidRequest(field=field, expected="a non-empty prompt", actual="an empty one")
    if any(not text for text in call.stop):
        raise InvalidRequest(field="stop", expected="non-empty stop strings", actual="an empty one")


async def _score(service: RolloutService, call: ScoreCall) -> ScoreOutput:
    for i, sequence in enumerate(call.request.sequences):
        if len(sequence) == 0:
            raise InvalidRequest(field=f"request.sequences[{i}]", expected="at least one id", actual="none")
    return await service.score(call.request)


async def _abort(service: RolloutService, call: AbortCall) -> AbortReport:
    return AbortReport(groups=await service.abort(call.group_ids))


async def _pause(service: RolloutService, call: PauseCall) -> PauseReport:
    if call.timeout_ms <= 0:
        raise InvalidRequest(field="timeout_ms", expected="a positive number", actual=call.timeout_ms)
    return await service.pause(call.mode, call.timeout_ms / 1000)


async def _resume(service: RolloutService, call: ResumeCall) -> Done:
    await service.resume(call.expected_policy_version)
    return Done()


async def _update_begin(service: RolloutService, call: UpdateBeginCall) -> UpdateProgress:
    check_name("update.txn", call.update.txn)
    if not (math.isfinite(call.update.timeout_s) and call.update.timeout_s > 0):
        raise InvalidRequest(field="update.timeout_s", expected="a positive time", actual=call.update.timeout_s)
    return await service.update_begin(call.update)


async def _update_disk(service: RolloutService, call: UpdateDiskCall) -> UpdateProgress:
    return await service.update_disk(call.txn, call.uri)


async def _update_tensors(service: RolloutService, call: UpdateTensorsCall) -> UpdateProgress:
    return await service.update_tensors(call.txn, call.tensors)


async def _update_commit(service: RolloutService, call: UpdateEndCall) -> UpdateReport:
    return await service.update_commit(call.txn)


async def _update_rollback(service: RolloutService, call: UpdateEndCall) -> Done:
    await service.update_rollback(call.txn)
    return Done()


async def _adapter_tensors(service: RolloutService, call: AdapterTensorsCall) -> UpdateProgress:
    check_name("upload", call.upload)
    return await service.adapter_tensors(call.upload, call.tensors)


async def _update_adapter(service: RolloutService, call: UpdateAdapterCall) -> AdapterUpdateReport:
    check_name("adapter.name", call.adapter.name)
    return await service.update_adapter(call.adapter)


async def _unload_adapter(service: RolloutService, call: UnloadAdapterCall) -> Done:
    check_name("adapter", call.adapter)
    await service.unload_adapter(call.adapter)
    return Done()


async def _adapters(service: RolloutService, _: None) -> AdapterList:
    return AdapterList(adapters=await service.adapters())


async def _flush(service: RolloutService, call: FlushCall) -> FlushReport:
    return FlushReport(tokens=await service.flush(call.scope))


async def _release(service: RolloutService, call: MemoryCall) -> MemoryReport:
    return await service.release_memory(call.tags)


async def _resume_memory(service: RolloutService, call: MemoryCall) -> MemoryReport:
    return await service.resume_memory(call.tags)


async def _session_open(service: RolloutService, call: SessionOpenCall) -> Done:
    check_name("session_id", call.session_id)
    if not (math.isfinite(call.ttl_s) and call.ttl_s > 0):
        raise InvalidRequest(field="ttl_s", expected="a positive time", actual=call.ttl_s)
    await service.session_open(call.session_id, call.ttl_s)
    return Done()


async def _session_close(service: RolloutService, call: SessionCloseCall) -> Done:
    check_name("session_id", call.session_id)
    await service.session_close(call.session_id)
    return Done()


async def _version(service: RolloutService, _: None) -> VersionReport:
    return await service.version()


async def _health(service: RolloutService, _: None) -> Health:
    return await service.health()


async def _metrics(service: RolloutService, _: None) -> str:
    return await service.metrics()


async def _capabilities(service: RolloutService, _: None) -> dict[str, object]:
    return await service.capabilities()


def _live_status(health: Health) -> int:
    return 200 if health.last_step_age_ms < LIVE_WITHIN_MS else 503


def _ready_status(health: Health) -> int:
    return 200 if health.state == "ready" else 503


ROUTES: tuple[Route, ...] = (
    Route(
        "generate_group",
        "/v1/generate_group",
        "user",
        GenerateCall,
        GroupOutput,
        _generate,
        "POST",
        True,
        True,
        _check_prompt,
    ),
    Route(
        "continue", "/v1/continue", "user", GenerateCall, GroupOutput, _generate, "POST", True, True, _check_continue
    ),
    Route("score", "/v1/score", "user", ScoreCall, ScoreOutput, _score, abortable=True),
    Route("abort", "/v1/abort", "admin", AbortCall, AbortReport, _abort),
    Route("pause", "/v1/pause", "admin", PauseCall, PauseReport, _pause),
    Route("resume", "/v1/resume", "admin", ResumeCall, Done, _resume),
    Route("update_begin", "/v1/update_begin", "admin", UpdateBeginCall, UpdateProgress, _update_begin),
    Route("update_disk", "/v1/update_disk", "admin", UpdateDiskCall, UpdateProgress, _update_disk),
    Route("update_tensors", "/v1/update_tensors", "admin", UpdateTensorsCall, UpdateProgress, _update_tensors),
    Route("update_commit", "/v1/update_commit", "admin", UpdateEndCall, UpdateReport, _update_commit),
    Route("update_rollback", "/v1/update_rollback", "admin", UpdateEndCall, Done, _update_rollback),
    Route("adapter_tensors", "/v1/adapter_tensors", "admin", AdapterTensorsCall, UpdateProgress, _adapter_tensors),
    Route("update_adapter", "/v1/update_adapter", "admin", UpdateAdapterCall, AdapterUpdateReport, _update_adapter),
    Route("unload_adapter", "/v1/unload_adapter", "admin", UnloadAdapterCall, Done, _unload_adapter),
    Route("adapters", "/v1/adapters", "user", None, AdapterList, _adapters, "GET"),
    Route("flush", "/v1/flush", "admin", FlushCall, FlushReport, _flush),
    Route("release_memory", "/v1/release_memory", "admin", MemoryCall, MemoryReport, _release),
    Route("resume_memory", "/v1/resume_memory", "admin", MemoryCall, MemoryReport, _resume_memory),
    Route("session_open", "/v1/session_open", "admin", SessionOpenCall, Done, _session_open),
    Route("session_close", "/v1/session_close", "admin", SessionCloseCall, Done, _session_close),
    Route("version", "/v1/version", "user", None, VersionReport, _version, "GET"),
    Route("capabilities", "/v1/capabilities", "user", None, dict[str, Any], _capabilities, "GET"),
    Route("metrics", "/metrics", "user", None, str, _metrics, "GET"),
    Route("health", "/health", "open", None, Health, _health, "GET"),
    Route("live", "/live", "open", None, Health, _health, "GET", status=_live_status),
    Route("ready", "/ready", "open", None, Health, _health, "GET", status=_ready_status),
)

ROUTES_BY_NAME: dict[str, Route] = {route.name: route for route in ROUTES}
