"""A group and its samples while the engine holds them.

Owns the mutable state of live work and the two interfaces through which results leave and text
looks in. Ignores pages (`engine.scheduler.pages`) and the order of work (`engine.scheduler`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.errors import SparkrollError
from engine.types import (
    CacheHit,
    DraftUse,
    ErrorInfo,
    FinishReason,
    GroupOutput,
    GroupRequest,
    LogprobDefinition,
    SampleDelta,
    SampleOutput,
    Span,
    Want,
)

if TYPE_CHECKING:
    from engine.adapters import Lease
    from engine.sampling.params import RowSampling
    from engine.scheduler.pages import Sequence


class StopWatcher(Protocol):
    """Looks at one sample's tokens as they are committed, for stops that ids cannot express."""

    def observe(self, new_ids: list[int]) -> tuple[int, str] | None:
        """Take the next ids in order. A match ends the sample: (ids of this call to keep, what
        matched)."""
        ...


class GroupSink(Protocol):
    """Receives a group's results, on the engine's thread. No method may raise."""

    wants_deltas: bool

    def on_delta(self, deltas: list[SampleDelta]) -> None: ...

    def on_sample(self, sample: SampleOutput) -> None: ...

    def on_group(self, group: GroupOutput) -> None: ...

    def on_error(self, error: SparkrollError) -> None:
        """Instead of `on_group`: the group ended without a reply."""
        ...


class SampleState(enum.Enum):
    WAITING = enum.auto()
    """Holds nothing; needs its prompt (and what it has sampled) computed."""
    PREFILLING = enum.auto()
    """Served by a prefill that is under way, or done and waiting for room to start samples."""
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class Columns:
    """Per-token results of one sample since the start of this call, all of one length."""

    logprobs: list[float] = field(default_factory=list)
    extra: dict[LogprobDefinition, list[float]] = field(default_factory=dict)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)

    def truncate(self, length: int) -> None:
        for column in (self.logprobs, self.top_ids, self.top_logprobs, self.entropy, *self.extra.values()):
            del column[length:]

    def part(self, start: int, end: int) -> Columns:
        return Columns(
            self.logprobs[start:end],
            {name: column[start:end] for name, column in self.extra.items()},
            self.top_ids[start:end],
            self.top_logprobs[start:end],
            self.entropy[start:end],
        )

    def extend(self, more: Columns) -> None:
        self.logprobs += more.logprobs
        self.top_ids += more.top_ids
        self.top_logprobs += more.top_logprobs
        self.entropy += more.entropy
        for name, column in more.extra.items():
            self.extra.setdefault(name, []).extend(column)


@dataclass(slots=True, eq=False)
class Sample:
    """One sample. `ids` holds every new token, the first `resumed` of which came with the
    request and are not replied again; columns start after them."""

    group: Group
    index: int
    seed: int
    row: RowSampling
    ids: list[int]
    resumed: int
    watcher: StopWatcher | None = None
    state: SampleState = SampleState.WAITING
    sequence: Sequence | None = None
    columns: Columns = field(default_factory=Columns)
    spans: list[Span] = field(default_factory=list)
    delivered: int = 0
    """New tokens already sent as deltas, counted like `ids`."""
    retractions: int = 0
    cached_tokens: int | None = None
    mixed_kv: bool = False
    finish: FinishReason | None = None
    matched: int | str | None = None
    error: ErrorInfo | None = None
    draft_use: DraftUse = field(default_factory=DraftUse)

    @property
    def order(self) -> tuple[int, int]:
        return self.group.arrival, self.index

    @property
    def held(self) -> Sequence:
        """Its sequence, which it has."""
        assert self.sequence is not None, f"sample {self.order} has no sequence"
        return self.sequence

    @property
    def length(self) -> int:
        """Prompt and new tokens."""
        return len(self.group.prompt) + len(self.ids)

    @property
    def remaining(self) -> int:
        return self.group.request.sampling.max_new - len(self.ids)

    def taken(self, start: int, count: int) -> tuple[list[int], list[float]]:
        """`count` new tokens from number `start` on, none of which came with the request, and their
        log-probabilities."""
        end, shift = start + count, self.resumed
        return self.ids[start:end], self.columns.logprobs[start - shift : end - shift]

    def tokens(self) -> np.ndarray:
        """int32 [length]: prompt then new tokens."""
        return np.concatenate([self.group.prompt, np.asarray(self.ids, dtype=np.int32)])

    def label(self, policy_version: int, drafter_version: int = 0, count: int = 1) -> None:
        """Record that the newest `count` tokens were sampled by `policy_version`, under `drafter_version`."""
        start, end = len(self.ids) - count, len(self.ids)
        adapter_rev = self.group.adapter_rev
        last = self.spans.pop() if self.spans else None
        if (
            last is not None
            and last.policy_version == policy_version
            and last.adapter_rev == adapter_rev
            and last.drafter_version == drafter_version
            and last.mixed_kv == self.mixed_kv
        ):
            start = last.start
        elif last is not None:
            self.spans.append(last)
        self.spans.append(
            Span(
                start=start,
                end=end,
                policy_version=policy_version,
                adapter_rev=adapter_rev,
                drafter_version=drafter_version,
                mixed_kv=self.mixed_kv,
            )
        )

    def truncate(self, length: int) -> None:
        """Drop new tokens from `length` on, in every column and span."""
        assert length >= self.delivered, "delivered tokens are never taken back"
        del self.ids[length:]
        self.columns.truncate(length - self.resumed)
        self.spans = clip_spans(self.spans, 0, length)

    def delta(self) -> SampleDelta | None:
        """Tokens since the last delta, or None."""
        start, end = self.delivered, len(self.ids)
        if start >= end:
            return None
        self.delivered = end
        lo, hi = start - self.resumed, end - self.resumed
        return SampleDelta(
            index=self.index,
            start=start,
            ids=_ids(self.ids[start:end]),
            spans=clip_spans(self.spans, start, end),
            **_columns(self.columns, self.row.want, lo, hi),
        )

    def output(self, definition: LogprobDefinition) -> SampleOutput:
        assert self.finish is not None, "only finished samples are replied"
        return SampleOutput(
            index=self.index,
            ids=_ids(self.ids[self.resumed :]),
            logprob_definition=definition,
            spans=self.spans,
            finish=self.finish,
            seed=self.seed,
            matched=self.matched,
            error=self.error,
            retractions=self.retractions,
            cached_tokens=self.cached_tokens or 0,
            draft_use=self.draft_use if self.draft_use.steps else None,
            **_columns(self.columns, self.row.want, 0, len(self.ids) - self.resumed),
        )


@dataclass(slots=True, eq=False)
class Group:
    """One live request and its samples. `prompt` is int32 [P]."""

    request: GroupRequest
    prompt: np.ndarray
    sink: GroupSink
    arrival: int
    samples: list[Sample] = field(default_factory=list)
    hit: CacheHit | None = None
    prompt_logprobs: np.ndarray | None = None
    unfinished: int = 0
    lease: Lease | None = None
    """On its adapter, until `end`."""

    @property
    def adapter_rev(self) -> int:
        return 0 if self.lease is None else self.lease.version.rev

    def end(self) -> None:
        """Nothing of the group is left in the engine."""
        if self.lease is not None:
            self.lease.release()

    @property
    def definition(self) -> LogprobDefinition:
        """At temperature 0 the sampled distribution is a point, so `raw` is what is reported."""
        return "raw" if self.request.sampling.temperature == 0 else self.request.want.logprobs

    def output(self, policy_version: int) -> GroupOutput:
        return GroupOutput(
            group_id=self.request.group_id,
            samples=[sample.output(self.definition) for sample in self.samples],
            prompt_tokens=len(self.prompt),
            hit=self.hit or CacheHit(),
            policy_version=policy_version,
            prompt_logprobs=self.prompt_logprobs,
        )


def clip_spans(spans: list[Span], start: int, end: int) -> list[Span]:
    """The parts of `spans` within new tokens [start, end)."""
    clipped = []
    for span in spans:
        lo, hi = max(span.start, start), min(span.end, end)
        if lo < hi:
            clipped.append(
                Span(
                    start=lo,
                    end=hi,
                    policy_version=span.policy_version,
                    adapter_rev=span.adapter_rev,
                    drafter_version=span.drafter_version,
                    mixed_kv=span.mixed_kv,
                )
            )
    return clipped


def _ids(ids: list[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.uint32)


def _floats(values: list) -> np.ndarray:
    return np.asarray(values, dtype=np.float32)


def _columns(columns: Columns, want: Want, lo: int, hi: int) -> dict:
    """Every column that is wanted, of tokens [lo, hi); of no tokens too, so that pieces of a sample can be joined."""
    out: dict = {
        "logprobs": _floats(columns.logprobs[lo:hi]),
        "extra_logprobs": {name: _floats(columns.extra.get(name, [])[lo:hi]) for name in want.extra_logprobs},
    }
    if want.top_logprobs:
        nothing = np.empty((0, want.top_logprobs))
        out["top_ids"] = np.asarray(columns.top_ids[lo:hi] or nothing, dtype=np.uint32)
        out["top_logprobs"] = np.asarray(columns.top_logprobs[lo:hi] or nothing, dtype=np.float32)
    if want.entropy:
        out["entropy"] = _floats(columns.entropy[lo:hi])
    return out
