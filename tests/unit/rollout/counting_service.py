"""A whole rollout service whose "model" is arithmetic, so that routers can be tested exactly.

Token t of a sample is a function of (prompt, seed, t, policy version); engines agree on it. It
streams, pauses, updates and dies as an engine does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from engine.errors import Conflict, Corrupt, NotFound, Paused, SparkrollError
from engine.types import (
    AbortOutcome,
    CacheHit,
    GroupOutput,
    NamedTensor,
    PauseMode,
    PauseReport,
    SampleDelta,
    SampleOutput,
    ScoredSequence,
    ScoreOutput,
    ScoreRequest,
    Span,
    UpdateBegin,
    UpdateProgress,
    UpdateReport,
)
from rollout.protocol import (
    Delta,
    Event,
    GenerateCall,
    GroupEnd,
    Health,
    MemoryReport,
    Origin,
    SampleEnd,
    VersionReport,
)
from rollout.routing.errors import EngineLost


def expected_id(prompt: np.ndarray, seed: int, position: int) -> int:
    return (int(prompt.astype(np.uint64).sum()) * 31 + seed % 1009 * 7 + position * 13) % 509


class CountingService:
    def __init__(self, name: str, version: int = 0) -> None:
        self.name = name
        self.policy_version = version
        self.dead = False
        self.fenced = False
        self.paused: PauseMode | None = None
        self.refuse_pause: SparkrollError | None = None
        self.refuse_commit: SparkrollError | None = None
        self.refuse_stage: SparkrollError | None = None
        self.decoded = 0
        self.groups: dict[str, bool] = {}
        self.open: UpdateBegin | None = None
        self.staged: list[str] = []
        self.calls: list[str] = []
        self.chunk = 3

    def kill(self) -> None:
        self.dead = True

    def _alive(self) -> None:
        if self.dead:
            raise EngineLost(f"{self.name} is gone")

    async def origin(self) -> Origin:
        return Origin(engine_id=self.name, incarnation=1, policy_version=self.policy_version)

    async def generate(self, call: GenerateCall) -> AsyncIterator[Event]:
        self._alive()
        if self.fenced:
            raise Corrupt(f"{self.name} is fenced")
        if self.paused:
            raise Paused(f"{self.name} is paused")
        request = call.request
        self.calls.append(request.group_id)
        self.groups[request.group_id] = False
        seeds, sampling = request.sampling.seeds, request.sampling
        assert seeds is not None
        resumes = {resume.index: resume for resume in request.resume or []}
        live = {index: len(resumes[index].ids) if index in resumes else 0 for index in (resumes or range(request.n))}
        begun = dict(live)
        columns: dict[int, list[int]] = {index: [] for index in live}
        spans: dict[int, list[Span]] = {index: [] for index in live}
        try:
            while live:
                await asyncio.sleep(0)
                self._alive()
                deltas, ends = [], []
                for index, start in list(live.items()):
                    limit = sampling.max_new - index % 3  # samples end at different times
                    aborted = self.groups[request.group_id]
                    end = start if aborted else min(start + self.chunk, limit)
                    ids = [expected_id(request.prompt_ids, seeds[index], t) for t in range(start, end)]
                    self.decoded += len(ids)
                    columns[index] += ids
                    if ids:
                        spans[index].append(Span(start=start, end=end, policy_version=self.policy_version))
                    live[index] = end
                    if end >= limit or aborted:
                        del live[index]
                        ends.append(self._end(index, begun[index], columns[index], spans[index], seeds[index], aborted))
                    else:
                        deltas.append(self._delta(index, start, ids))
                if deltas:
                    yield Delta(samples=deltas)
                for event in ends:
                    yield event
            yield GroupEnd(
                group=GroupOutput(
                    group_id=request.group_id,
                    samples=[],
                    prompt_tokens=len(request.prompt_ids),
                    hit=CacheHit(),
                    policy_version=self.policy_version,
                ),
                origin=await self.origin(),
            )
        finally:
            self.groups.pop(request.group_id, None)

    def _delta(self, index: int, start: int, ids: list[int]) -> SampleDelta:
        span = Span(start=start, end=start + len(ids), policy_version=self.policy_version)
        return SampleDelta(index=index, start=start, ids=np.array(ids, np.uint32), logprobs=_lp(ids), spans=[span])

    def _end(self, index, begun, ids, spans, seed, aborted) -> SampleEnd:
        return SampleEnd(
            sample=SampleOutput(
                index=index,
                ids=np.array(ids, np.uint32),
                logprobs=_lp(ids),
                logprob_definition="processed",
                spans=[span for span in spans if span.start >= begun],
                finish="abort" if aborted else "length",
                seed=seed,
            )
        )

    async def score(self, request: ScoreRequest) -> ScoreOutput:
        self._alive()
        scored = [ScoredSequence(logprobs=_lp(ids)) for ids in request.sequences]
        return ScoreOutput(sequences=scored, policy_version=self.policy_version)

    async def abort(self, group_ids: list[str] | None) -> list[AbortOutcome]:
        self._alive()
        found = []
        for group_id in list(self.groups) if group_ids is None else group_ids:
            outcome = "aborted" if group_id in self.groups else "unknown"
            if group_id in self.groups:
                self.groups[group_id] = True
            found.append(AbortOutcome(group_id=group_id, outcome=outcome))
        return found

    async def pause(self, mode, timeout_s: float) -> PauseReport:
        self._alive()
        if self.refuse_pause is not None:
            refusal, self.refuse_pause = self.refuse_pause, None
            raise refusal
        self.paused = mode
        aborted = 0
        if mode == "abort":
            aborted = len(await self.abort(None))
        return PauseReport(in_flight=0, retracted=0, aborted=aborted)

    async def resume(self, expected_policy_version: int | None) -> None:
        self._alive()
        self.paused = None

    async def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        self._alive()
        if begin.base_version != self.policy_version:
            raise Conflict(field="base_version", expected=self.policy_version, actual=begin.base_version)
        self.open, self.staged = begin, []
        return UpdateProgress(txn=begin.txn, staged=0, announced=len(begin.manifest), staged_bytes=0)

    def _require(self, txn: str) -> UpdateBegin:
        self._alive()
        if self.open is None or self.open.txn != txn:
            raise NotFound(field="txn", expected="the open one", actual=txn)
        return self.open

    async def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        raise NotImplementedError

    async def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        begin = self._require(txn)
        if self.refuse_stage is not None:
            raise self.refuse_stage
        self.staged += [tensor.name for tensor in tensors]
        return UpdateProgress(txn=txn, staged=len(self.staged), announced=len(begin.manifest), staged_bytes=0)

    async def update_commit(self, txn: str) -> UpdateReport:
        begin = self._require(txn)
        self.open = None
        if self.refuse_commit is not None:
            raise self.refuse_commit
        self.policy_version, self.fenced = begin.new_version, False
        return UpdateReport(
            policy_version=self.policy_version,
            drafter_version=0,
            loaded={"policy": len(self.staged)},
            pause_ms=1.0,
            flushed_tokens=0,
            retracted=0,
            digest=f"digest-{self.policy_version}",
        )

    async def update_rollback(self, txn: str) -> None:
        self._require(txn)
        self.open = None

    async def version(self) -> VersionReport:
        self._alive()
        return VersionReport(
            policy_version=self.policy_version, drafter_version=0, adapters={}, digest=f"digest-{self.policy_version}"
        )

    async def flush(self, scope: str) -> int:
        self._alive()
        return 10

    async def release_memory(self, tags: list[str]) -> MemoryReport:
        return MemoryReport(before=dict.fromkeys(tags, 5), after=dict.fromkeys(tags, 0))

    async def resume_memory(self, tags: list[str]) -> MemoryReport:
        return MemoryReport(before=dict.fromkeys(tags, 0), after=dict.fromkeys(tags, 5))

    async def session_open(self, session_id: str, ttl_s: float) -> None: ...

    async def session_close(self, session_id: str) -> None: ...

    async def health(self) -> Health:
        self._alive()
        state = "fenced" if self.fenced else "paused" if self.paused else "ready"
        return Health(state=state, last_step_age_ms=1.0, policy_version=self.policy_version, running=len(self.groups))

    async def metrics(self) -> str:
        return f'# TYPE decoded counter\ndecoded_total{{engine="{self.name}"}} {self.decoded}\n'

    async def capabilities(self) -> dict[str, object]:
        return {"context_len": 256}


def _lp(ids) -> np.ndarray:
    return -np.asarray(ids, np.float32) / 100
