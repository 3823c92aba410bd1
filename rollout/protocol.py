"""The messages of the rollout service.

Owns every body that crosses HTTP or Ray. Ignores bytes (`rollout.codec`) and routes
(`rollout.routes`). Bodies are maps, unknown fields are refused; generation types are the
engine's own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.types import GroupOutput, GroupRequest, SampleDelta, SampleOutput

PROTOCOL = 1


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
