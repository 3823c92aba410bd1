"""The messages of the rollout service.

Owns every body that crosses HTTP or Ray. Ignores bytes (`rollout.codec`) and routes
(`rollout.routes`). Bodies are maps, unknown fields are refused; generation types are the
engine's own.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

from engine.errors import ErrorCode
from engine.types import (
    AbortOutcome,
    AdapterReport,
    GroupOutput,
    GroupRequest,
    NamedTensor,
    PauseMode,
    SampleDelta,
    SampleOutput,
    ScoreRequest,
    UpdateBegin,
)

PROTOCOL = 1
BODY_TYPE = "application/x-msgpack"
STREAM_TYPE = "application/x-msgpack-stream"
RESUME_HEADER = "sparkroll-resume-from"
"""Request header of a repeated stream call: the first sequence number still wanted."""

T = TypeVar("T")


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str


class GenerateCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """One `generate_group` call: the engine's request plus what the text layer needs.

    The prompt is given once: as `request.prompt_ids` (then used as they are, never re-tokenised),
    or as `text`, or as `messages` (then `request.prompt_ids` is empty). `stop` are stop strings;
    ids always end with the token that completes the match, and text ends before the match unless
    `keep_stop` is set. `op_id` makes the call idempotent: a repeat attaches to the first.
    """

    op_id: str
    request: GroupRequest
    text: str | None = None
    messages: list[ChatMessage] | None = None
    stop: list[str] = msgspec.field(default_factory=list)
    keep_stop: bool = False
    want_text: bool = False
    deadline_ms: int | None = None
    proto: int = PROTOCOL


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who answered. `incarnation` rises with every process start of an engine."""

    engine_id: str
    incarnation: int
    policy_version: int
    drafter_version: int = 0


class Delta(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, eq=False, tag="delta"):
    """New tokens of several samples of one group."""

    samples: list[SampleDelta]


class SampleEnd(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, eq=False, tag="sample"):
    """A whole finished sample (columns from its first new token of this call)."""

    sample: SampleOutput


class GroupEnd(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, eq=False, tag="group"):
    """The last event of a stream; samples have been sent before and are not repeated
    (`group.samples` is empty)."""

    group: GroupOutput
    origin: Origin


Event = Delta | SampleEnd | GroupEnd
"""What a generation stream carries, in order; an exception ends it instead."""

HealthState = Literal["starting", "ready", "paused", "updating", "released", "fenced", "draining"]


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`last_step_age_ms` is the age of the engine loop's last tick (it ticks while paused)."""

    state: HealthState
    last_step_age_ms: float
    policy_version: int
    drafter_version: int = 0
    pending_update: str | None = None
    running: int = 0
    waiting: int = 0


class VersionReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    policy_version: int
    drafter_version: int
    adapters: dict[str, int]
    digest: str
    engines: dict[str, int] = msgspec.field(default_factory=dict)
    """Policy version of each engine that serves, for a fleet."""


class MemoryReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Bytes held by each tag before and after a release or resume."""

    before: dict[str, int]
    after: dict[str, int]


class Reply(msgspec.Struct, Generic[T], forbid_unknown_fields=True, kw_only=True, eq=False):
    """Every successful body: the operation's result and who gave it."""

    result: T
    origin: Origin


class ErrorReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Every refusal. `field`, `expected` and `actual` name what was wrong where there is such a
    thing; `state` is the service's health state, "" where it was not asked."""

    code: ErrorCode
    message: str
    retryable: bool
    state: str = ""
    retry_after_ms: int | None = None
    field: str | None = None
    expected: str | None = None
    actual: str | None = None


class StreamHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The first frame of a stream. A frame comes at least every `ping_s` seconds."""

    op_id: str
    group_id: str
    origin: Origin
    ping_s: float
    proto: int = PROTOCOL


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """What every operation's body holds. A repeat of `op_id` with the same body attaches to the
    first call or gets its stored reply; with another body it is refused. `deadline_ms` counts
    from the first arrival."""

    op_id: str
    deadline_ms: int | None = None
    proto: int = PROTOCOL


class ScoreCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    request: ScoreRequest


class AbortCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """Exact group ids; null means every group."""

    group_ids: list[str] | None


class AbortReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    groups: list[AbortOutcome]


class PauseCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    mode: PauseMode
    timeout_ms: int = 60_000


class ResumeCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    expected_policy_version: int | None = None


class UpdateBeginCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    update: UpdateBegin


class UpdateDiskCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    txn: str
    uri: str


class UpdateTensorsCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """One bucket. Buckets come in any number and order; a fused parameter may straddle them."""

    txn: str
    tensors: list[NamedTensor]


class UpdateEndCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """Commits or rolls back, by route."""

    txn: str


class AdapterSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """A revision of the LoRA policy `name`, which need not exist yet, and where it is.

    Either `uri` names a folder that peft saved, under the root that disk updates may come from, or `config` is
    peft's configuration and `tensors` the factors under the names peft saves. Those that do not fit one body
    come before, by `adapter_tensors` under the name `upload`. With `txn` the revision belongs to that open
    update, and its commit publishes it; otherwise it is published at once. `rev` None is the next one.
    """

    name: str
    config: dict[str, Any] | None = None
    tensors: list[NamedTensor] = msgspec.field(default_factory=list)
    uri: str | None = None
    upload: str | None = None
    rev: int | None = None
    txn: str | None = None


class UpdateAdapterCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    adapter: AdapterSource


class AdapterTensorsCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """Some of an adapter's tensors, kept under `upload` until `update_adapter` names that."""

    upload: str
    tensors: list[NamedTensor]


class UnloadAdapterCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    adapter: str


class AdapterList(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Revisions that are there, by name and number; requests that name no revision get a name's newest
    `live` one."""

    adapters: list[AdapterReport]


class FlushCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    scope: Literal["all", "stale"] = "all"


class FlushReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    tokens: int


class MemoryCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """Releases or resumes, by route. No tags means every tag."""

    tags: list[str] = msgspec.field(default_factory=list)


class SessionOpenCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    session_id: str
    ttl_s: float = 3600.0


class SessionCloseCall(Call, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    session_id: str


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of an operation that has nothing to tell."""
