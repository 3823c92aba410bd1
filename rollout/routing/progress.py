"""What the router has received of one group, and how to go on from there.

Owns the merge: a group that ran on several engines, one after another, leaves as if it had run
on one. Every delta that was absorbed counts as acknowledged; a continuation starts after it.
Positions (`SampleDelta.start`, spans) count a sample's new tokens from the very first, including
those a caller resumed from; columns start with the first new token of the call.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.errors import InternalError
from engine.types import (
    CacheHit,
    FinishReason,
    GroupOutput,
    GroupRequest,
    LogprobDefinition,
    SampleDelta,
    SampleOutput,
    SampleResume,
    Span,
)
from rollout.protocol import Delta, Event, GroupEnd, Origin, SampleEnd

_COLUMNS = ("ids", "logprobs", "top_ids", "top_logprobs", "entropy")


@dataclass(slots=True, eq=False)
class _Acknowledged:
    """One sample: what the caller brought, and the deltas received since."""

    brought: SampleResume | None
    deltas: list[SampleDelta] = field(default_factory=list)
    carried: int = 0
    """How many of `deltas` came from engines before the present one."""
    finished: bool = False

    @property
    def base(self) -> int:
        return 0 if self.brought is None else len(self.brought.ids)

    @property
    def end(self) -> int:
        return self.deltas[-1].start + len(self.deltas[-1].ids) if self.deltas else self.base

    def spans(self, count: int) -> list[Span]:
        brought = [] if self.brought is None else self.brought.spans
        return join_spans([*brought, *(span for delta in self.deltas[:count] for span in delta.spans)])


class GroupProgress:
    """Absorbs the events of one group. `request` must carry explicit per-sample seeds."""

    def __init__(self, request: GroupRequest) -> None:
        assert request.sampling.seeds is not None, "a continuation is exact only with known seeds"
        self.request = request
        brought = {resume.index: resume for resume in request.resume or []}
        indices = sorted(brought) if request.resume is not None else range(request.n)
        self._samples = {index: _Acknowledged(brought.get(index)) for index in indices}
        self.moved = 0
        """How often the group went on elsewhere."""

    @property
    def unfinished(self) -> list[int]:
        return [index for index, sample in self._samples.items() if not sample.finished]

    @property
    def acknowledged_tokens(self) -> int:
        """New tokens received of samples that have not ended."""
        return sum(sample.end - sample.base for sample in self._samples.values() if not sample.finished)

    def absorb(self, event: Event) -> Event:
        """Take an engine's event and return what the caller is to see of it."""
        if isinstance(event, Delta):
            for delta in event.samples:
                sample = self._samples[delta.index]
                if sample.finished or delta.start != sample.end:
                    where = f"sample {delta.index}"
                    raise InternalError(field=where, expected=f"a delta from {sample.end}", actual=delta.start)
                sample.deltas.append(delta)
            return event
        if isinstance(event, SampleEnd):
            sample = self._samples[event.sample.index]
            if sample.finished:
                raise InternalError(f"sample {event.sample.index} ended twice")
            sample.finished = True
            merged = self._merge(sample, event.sample)
            sample.deltas = []
            return SampleEnd(sample=merged)
        return event

    def continuation(self) -> GroupRequest:
        """The request that runs what is left, from the last acknowledged token of each sample."""
        self.moved += 1
        resumes = []
        for index in self.unfinished:
            sample = self._samples[index]
            sample.carried = len(sample.deltas)
            brought = [] if sample.brought is None else [sample.brought.ids]
            ids = [*brought, *(delta.ids for delta in sample.deltas)]
            resumes.append(
                SampleResume(
                    index=index,
                    ids=np.concatenate(ids) if ids else np.empty(0, np.uint32),
                    spans=sample.spans(sample.carried),
                )
            )
        return msgspec.structs.replace(self.request, resume=resumes)

    def _merge(self, sample: _Acknowledged, last: SampleOutput) -> SampleOutput:
        carried = sample.deltas[: sample.carried]
        if not carried:
            return last
        joined = {name: _join([getattr(piece, name) for piece in (*carried, last)]) for name in _COLUMNS}
        extra = {
            name: np.concatenate([piece.extra_logprobs[name] for piece in (*carried, last)])
            for name in last.extra_logprobs
        }
        boundary = carried[-1].start + len(carried[-1].ids)
        spans = [
            *(span for delta in carried for span in delta.spans),
            *(clipped for span in last.spans if (clipped := clip_span(span, boundary)) is not None),
        ]
        return msgspec.structs.replace(last, **joined, extra_logprobs=extra, spans=join_spans(spans))

    def close(self, finish: FinishReason, origin: Origin, definition: LogprobDefinition) -> list[Event]:
        """End everything left without an engine, keeping all acknowledged tokens."""
        events: list[Event] = []
        for index in self.unfinished:
            sample = self._samples[index]
            sample.carried = len(sample.deltas)
            sample.finished = True
            assert self.request.sampling.seeds is not None
            empty = _nothing(index, self.request, definition, finish)
            events.append(SampleEnd(sample=self._merge(sample, empty)))
        group = GroupOutput(
            group_id=self.request.group_id,
            samples=[],
            prompt_tokens=len(self.request.prompt_ids),
            hit=CacheHit(),
            policy_version=origin.policy_version,
        )
        return [*events, GroupEnd(group=group, origin=origin)]


def _nothing(index: int, request: GroupRequest, definition: LogprobDefinition, finish: FinishReason) -> SampleOutput:
    """A well-formed sample of no tokens."""
    want, floats = request.want, np.empty(0, np.float32)
    assert request.sampling.seeds is not None
    return SampleOutput(
        index=index,
        ids=np.empty(0, np.uint32),
        logprobs=floats,
        logprob_definition=definition,
        spans=[],
        finish=finish,
        seed=request.sampling.seeds[index],
        extra_logprobs={name: floats for name in want.extra_logprobs},
        top_ids=np.empty((0, want.top_logprobs), np.uint32) if want.top_logprobs else None,
        top_logprobs=np.empty((0, want.top_logprobs), np.float32) if want.top_logprobs else None,
        entropy=floats if want.entropy else None,
    )


def _join(pieces: list[np.ndarray | None]) -> np.ndarray | None:
    """Concatenate a column; an engine leaves out columns nobody asked for, and empty ones may be
    missing from a piece without tokens."""
    present = [piece for piece in pieces if piece is not None]
    return np.concatenate(present) if present else None


def clip_span(span: Span, start: int) -> Span | None:
    """The part of `span` from `start` on."""
    if span.end <= start:
        return None
    return span if span.start >= start else msgspec.structs.replace(span, start=start)


def join_spans(spans: list[Span]) -> list[Span]:
    """Adjacent spans under the same labels become one."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].end == span.start and _labels(joined[-1]) == _labels(span):
            joined[-1] = msgspec.structs.replace(joined[-1], end=span.end)
        else:
            joined.append(span)
    return joined


def _labels(span: Span) -> tuple[int, int, int, bool]:
    return span.policy_version, span.adapter_rev, span.drafter_version, span.mixed_kv
