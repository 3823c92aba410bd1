"""A rollout service whose answers are arithmetic, for tests of the wire alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np

from engine.errors import Conflict, InvalidRequest, NotFound, Paused
from engine.types import (
    AbortOutcome,
    AdapterReport,
    AdapterUpdateReport,
    CacheHit,
    GroupOutput,
    PauseReport,
    SampleDelta,
    SampleOutput,
    ScoredSequence,
    ScoreOutput,
    Span,
    UpdateProgress,
    UpdateReport,
)
from rollout.protocol import Delta, GenerateCall, GroupEnd, Health, MemoryReport, Origin, SampleEnd, VersionReport

VOCABULARY = 512


def expected_ids(prompt, index: int, seed: int, start: int, end: int) -> list[int]:
    """Token `t` of a sample is a sum; a continuation goes on where it was left."""
    total = int(np.sum(prompt)) + 31 * index + seed
    return [(total + 7 * t) % VOCABULARY for t in range(start, end)]


class EchoService:
    """`step_s` is the time one token of every sample takes. Counters tell what was really done."""

    def __init__(self, step_s: float = 0.0, per_step: int = 1) -> None:
        self.step_s = step_s
        self.per_step = per_step
        self.policy_version = 1
        self.running: dict[str, asyncio.Event] = {}
        self.started: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.closed: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.paused = False
        self.pending: str | None = None
        self.staged: dict[str, bytes] = {}
        self.uploads: dict[str, list] = {}
        self.adapter_revs: dict[str, int] = {}

    async def origin(self) -> Origin:
        return Origin(engine_id="echo", incarnation=7, policy_version=self.policy_version)

    async def generate(self, call: GenerateCall) -> AsyncIterator:
        request = call.request
        if self.paused:
            raise Paused("generation is paused", retry_after_ms=20)
        if request.group_id in self.running:
            raise Conflict(field="request.group_id", expected="an id that is not live", actual=request.group_id)
        prompt = np.frombuffer((call.text or "").encode(), "u1") if len(request.prompt_ids) == 0 else request.prompt_ids
        if int(prompt.max()) >= VOCABULARY:
            raise InvalidRequest(field="request.prompt_ids", expected=f"ids < {VOCABULARY}", actual=int(prompt.max()))
        aborted = self.running[request.group_id] = asyncio.Event()
        self.started[request.group_id] += 1
        try:
            done = {i: 0 for i in range(request.n)}
            if request.resume:
                done = {item.index: len(item.ids) for item in request.resume}
            begin, version, seed = dict(done), self.policy_version, request.sampling.seed or 0
            end = request.sampling.max_new
            while not aborted.is_set() and any(t < end for t in done.values()):
                await asyncio.sleep(self.step_s)
                self.steps[request.group_id] += 1
                deltas = []
                for index, t in done.items():
                    stop = min(t + self.per_step, end)
                    if stop > t:
                        deltas.append(_delta(prompt, index, seed, t, stop, version))
                        done[index] = stop
                yield Delta(samples=deltas)
            for index, t in done.items():
                yield SampleEnd(sample=_sample(prompt, index, seed, begin[index], t, version, aborted.is_set()))
            group = GroupOutput(
                group_id=request.group_id,
                samples=[],
                prompt_tokens=len(prompt),
                hit=CacheHit(),
                policy_version=self.policy_version,
            )
            yield GroupEnd(group=group, origin=await self.origin())
        finally:
            del self.running[request.group_id]
            self.closed[request.group_id] += 1

    async def score(self, request) -> ScoreOutput:
        await asyncio.sleep(self.step_s)
        rows = [ScoredSequence(logprobs=_logprobs(ids[request.start :])) for ids in request.sequences]
        return ScoreOutput(sequences=rows, policy_version=self.policy_version)

    async def abort(self, group_ids):
        ids = list(self.running) if group_ids is None else group_ids
        for name in ids:
            if name in self.running:
                self.running[name].set()
        return [AbortOutcome(group_id=i, outcome="aborted" if i in self.running else "unknown") for i in ids]

    async def pause(self, mode, timeout_s) -> PauseReport:
        self.calls[f"pause {mode}"] += 1
        self.paused = True
        while mode == "drain" and self.running:
            await asyncio.sleep(0.005)
        return PauseReport(in_flight=len(self.running), retracted=0, aborted=0)

    async def resume(self, expected_policy_version) -> None:
        if expected_policy_version not in (None, self.policy_version):
            raise Conflict(
                field="expected_policy_version", expected=self.policy_version, actual=expected_policy_version
            )
        self.paused = False

    async def update_begin(self, begin) -> UpdateProgress:
        if begin.base_version != self.policy_version:
            raise Conflict(field="base_version", expected=self.policy_version, actual=begin.base_version)
        self.pending = begin.txn
        self.staged = {}
        return self._progress()

    async def update_disk(self, txn, uri) -> UpdateProgress:
        raise NotFound(field="uri", expected="a folder under the allowed root", actual=uri)

    async def update_tensors(self, txn, tensors) -> UpdateProgress:
        self.calls["update_tensors"] += 1
        for item in tensors:
            self.staged[item.name] = item.data.tobytes()
        return self._progress()

    async def update_commit(self, txn) -> UpdateReport:
        if txn != self.pending:
            raise Conflict(field="txn", expected=self.pending, actual=txn)
        await asyncio.sleep(self.step_s)
        self.calls["update_commit"] += 1
        self.policy_version += 1
        self.pending = None
        return UpdateReport(
            policy_version=self.policy_version,
            drafter_version=0,
            loaded={"policy": len(self.staged)},
            pause_ms=0.5,
            flushed_tokens=0,
            retracted=0,
            digest="d",
        )

    async def update_rollback(self, txn) -> None:
        self.pending = None

    def _progress(self) -> UpdateProgress:
        size = sum(map(len, self.staged.values()))
        return UpdateProgress(txn=self.pending or "", staged=len(self.staged), announced=0, staged_bytes=size)

    async def adapter_tensors(self, upload, tensors) -> UpdateProgress:
        self.uploads.setdefault(upload, []).extend(tensors)
        return UpdateProgress(txn=upload, staged=len(self.uploads[upload]), announced=0, staged_bytes=0)

    async def update_adapter(self, source) -> AdapterUpdateReport:
        self.calls["update_adapter"] += 1
        tensors = [*self.uploads.pop(source.upload, []), *source.tensors]
        size = sum(tensor.data.nbytes for tensor in tensors)
        rev = source.rev or self.adapter_revs.get(source.name, 0) + 1
        self.adapter_revs[source.name] = rev
        report = AdapterReport(name=source.name, rev=rev, digest=str(source.config), num_bytes=size, state="live")
        return AdapterUpdateReport(adapter=report, pause_ms=0.5)

    async def unload_adapter(self, name) -> None:
        self.calls[f"unload {name}"] += 1
        if self.adapter_revs.pop(name, None) is None:
            raise NotFound(field="adapter", expected="one that is loaded", actual=name)

    async def adapters(self) -> list[AdapterReport]:
        return [
            AdapterReport(name=name, rev=rev, digest="d", num_bytes=0, state="live")
            for name, rev in self.adapter_revs.items()
        ]

    async def version(self) -> VersionReport:
        return VersionReport(policy_version=self.policy_version, drafter_version=0, adapters={}, digest="d")

    async def flush(self, scope) -> int:
        return 42

    async def release_memory(self, tags) -> MemoryReport:
        return MemoryReport(before={"kv": 10}, after={"kv": 0})

    async def resume_memory(self, tags) -> MemoryReport:
        return MemoryReport(before={"kv": 0}, after={"kv": 10})

    async def session_open(self, session_id, ttl_s) -> None:
        self.calls[f"open {session_id}"] += 1

    async def session_close(self, session_id) -> None:
        self.calls[f"close {session_id}"] += 1

    async def health(self) -> Health:
        state = "paused" if self.paused else "ready"
        return Health(state=state, last_step_age_ms=1.0, policy_version=self.policy_version, running=len(self.running))

    async def metrics(self) -> str:
        return "# TYPE echo_groups counter\necho_groups 3\n"

    async def capabilities(self) -> dict[str, object]:
        return {"vocabulary": VOCABULARY}


def _logprobs(ids) -> np.ndarray:
    return -(1.0 / (1.0 + np.asarray(ids, dtype="f4")))


def _delta(prompt, index, seed, start, end, version) -> SampleDelta:
    ids = np.array(expected_ids(prompt, index, seed, start, end), dtype="u4")
    span = Span(start=start, end=end, policy_version=version)
    return SampleDelta(index=index, start=start, ids=ids, logprobs=_logprobs(ids), spans=[span])


def _sample(prompt, index, seed, start, end, version, aborted) -> SampleOutput:
    delta = _delta(prompt, index, seed, start, end, version)
    return SampleOutput(
        index=index,
        ids=delta.ids,
        logprobs=delta.logprobs,
        logprob_definition="processed",
        spans=delta.spans,
        finish="abort" if aborted else "length",
        seed=seed + index,
    )
