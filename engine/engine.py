"""The engine: one model, its cache and its running samples, in one thread.

Owns how the parts are put together and what callers may do with them between steps. Ignores
HTTP, Ray, text and trainers. Nothing here is thread-safe: whoever made the engine calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.adapter_switch import follow, followers
from engine.adapters import PreparedAdapter
from engine.admission import Admission
from engine.build import Parts, load_parts
from engine.collector import Collector
from engine.config import EngineConfig
from engine.context_parallel import ALONE, ContextParallel
from engine.dspark.report import DraftReport
from engine.dspark.watching import Drafting
from engine.errors import Conflict, InvalidRequest, SparkrollError
from engine.inspection import check, gauges
from engine.loops import make_loop
from engine.memory.plan import MemoryPlan
from engine.metrics import EngineGauges
from engine.namespaces import Namespaces
from engine.pausing import PauseState, check_mode
from engine.policy import Module
from engine.request import Group, GroupSink, SampleState, StopWatcher
from engine.scheduler.commit import Committer
from engine.scheduler.jobs import ScoreJob
from engine.scheduler.loop import SerialLoop
from engine.scheduler.overlapped import OverlappedLoop
from engine.scheduler.scheduler import Scheduler
from engine.types import (
    AbortOutcome,
    AdapterReport,
    GroupOutput,
    GroupRequest,
    NamedTensor,
    PauseMode,
    PauseReport,
    ScoreOutput,
    ScoreRequest,
    UpdateBegin,
    UpdateProgress,
    UpdateReport,
)
from engine.updates import Updates
from lora.versions import AdapterVersion


class Engine:
    """Serves groups of samples from one policy.

    Ten lines are enough::

        engine = Engine.from_pretrained(folder)
        request = GroupRequest(group_id="g", prompt_ids=np.array([1, 2, 3], np.uint32), n=4)
        (group,) = engine.generate([request])

    Every method raises `SparkrollError` subclasses for what callers get wrong, and then has
    changed nothing.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.config = parts.config
        self.limits = parts.limits
        self.counters = parts.counters
        self._groups: dict[str, Group] = {}
        self.adapters = parts.adapters
        self._namespaces = Namespaces(parts.cache, parts.layout, parts.config.cache.prefix_cache)
        self._scheduler = Scheduler(
            parts.config.scheduler, parts.pages, parts.counters, self._namespaces.of_group, parts.adapters
        )
        self.adapters.attach(self._scheduler, self._follow_adapter)
        self._committer = Committer(
            self._scheduler,
            self._groups,
            parts.counters,
            lambda: self.policy.version,
            lambda: self._updates.drafter_version,
        )
        self._pause = PauseState(self._scheduler, self._abort_all)
        self._updates = Updates(parts, self._scheduler, self._pause, lambda: self._loop.settle(), self._fail_all)
        self.policy = self._updates.policy
        self._admission = Admission(parts, self._groups, self._scheduler, self._namespaces, self.policy, self._pause)
        self._loop: SerialLoop | OverlappedLoop = make_loop(parts, self._scheduler, self._committer)
        self.drafting = Drafting(parts.speculation, parts.pages, self._committer, lambda: self._loop.settle())

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, config: EngineConfig | None = None, ranks: ContextParallel = ALONE
    ) -> Engine:
        """Load a Hugging Face folder of a supported architecture (safetensors only). With several `ranks` each of
        them makes the same calls in the same order, and has the same results."""
        return cls(load_parts(Path(folder), config or EngineConfig(), ranks))

    # --- generation ---------------------------------------------------------------------------

    def add_group(self, request: GroupRequest, sink: GroupSink, watchers: dict[int, StopWatcher] | None = None) -> None:
        """Queue a request; results go to `sink` from later steps."""
        try:
            group = self._admission.group(request, sink, watchers or {})
        except SparkrollError:
            self.counters.rejected += 1
            raise
        self._groups[request.group_id] = group
        self.counters.groups_started += 1
        self._scheduler.add(group.samples)

    def generate(self, requests: list[GroupRequest]) -> list[GroupOutput]:
        """Run the engine until these requests are answered, beside whatever else it holds."""
        self._admission.refuse_while_stopped()
        sinks = [Collector() for _ in requests]
        added: list[str] = []
        try:
            for request, sink in zip(requests, sinks, strict=True):
                self.add_group(request, sink)
                added.append(request.group_id)
        except SparkrollError:
            self.abort(added)
            raise
        while not all(sink.ended for sink in sinks):
            progressed = self.step()
            assert progressed, "work is queued but no step is possible"
        return [sink.result() for sink in sinks]

    def step(self) -> bool:
        """One iteration. False when there is nothing that may run now."""
        self._updates.expire()
        if not (self._admission.able and self._pause.lets_steps):
            return False
        stepped = self._loop.step()
        if stepped and self._parts.canary is not None:
            self._parts.canary.step()
        return stepped

    @property
    def has_work(self) -> bool:
        """Whether a step could do something."""
        if not self._admission.able:
            return False
        if self._pause.mode == "drain":
            return not self.quiescent
        return self._pause.mode is None and (self._loop.in_flight or not self._scheduler.idle)

    def flush_deltas(self) -> None:
        """Send the tokens since the last flush to the sinks that want them."""
        for group in self._groups.values():
            if group.sink.wants_deltas:
                deltas = [delta for sample in group.samples if (delta := sample.delta()) is not None]
                if deltas:
                    group.sink.on_delta(deltas)

    def abort(self, group_ids: list[str] | None = None) -> list[AbortOutcome]:
        """End groups now, by exact id (None: all); their samples keep what they have."""
        self._loop.settle()
        outcomes = []
        for group_id in list(self._groups) if group_ids is None else group_ids:
            group = self._groups.get(group_id)
            if group is not None:
                for sample in group.samples:
                    if sample.state is not SampleState.FINISHED:
                        self._committer.finish(sample, "abort")
            outcomes.append(AbortOutcome(group_id=group_id, outcome="aborted" if group else "unknown"))
        return outcomes

    def add_score(self, request: ScoreRequest, job: ScoreJob) -> None:
        """Queue a scoring request; `job` is called back when all its sequences have run."""
        tasks = self._admission.scoring(request, job)
        self.counters.scored_tokens += sum(len(ids) - request.start for ids in request.sequences)
        self._scheduler.add_scoring(tasks)

    def score(self, request: ScoreRequest) -> ScoreOutput:
        """Log-probabilities of given tokens; runs the engine until they are there."""
        job = ScoreJob()
        self.add_score(request, job)
        while job.output is None:
            progressed = self.step()
            assert progressed, "scoring is queued but no step is possible"
        return job.output

    # --- pausing ----------------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> None:
        """Begin a pause; `pause_report` has the result once `quiescent`. Later requests wait.

        drain: what has begun runs to its end (keep calling `step`). abort: everything held ends
        now. retract: running samples go back to the queue, their pages to the cache. in_place:
        everything freezes with its pages. Pausing again in the same mode does nothing, in another
        one goes on from there.
        """
        check_mode(mode)
        if mode != self._pause.mode:
            self._loop.settle()
            self._pause.begin(mode)

    @property
    def quiescent(self) -> bool:
        """Paused, and nothing that the mode lets run is left."""
        return self._pause.quiescent(self._loop.in_flight)

    @property
    def pause_report(self) -> PauseReport:
        return self._pause.report

    @property
    def paused(self) -> PauseMode | None:
        return self._pause.mode

    def resume(self, expected_policy_version: int | None = None) -> None:
        """End a pause. Refused while an update is open, once quiescent; without a pause it does nothing."""
        if expected_policy_version is not None and expected_policy_version != self.policy.version:
            raise Conflict(
                field="expected_policy_version", expected=self.policy.version, actual=expected_policy_version
            )
        if self.quiescent and self.pending is not None:
            raise Conflict(f"update {self.pending!r} is open: commit it or roll it back, then resume")
        self._pause.end()

    # --- updates --------------------------------------------------------------------------------

    def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        """Open an update of the policy or of the drafter, whose versions are apart; one at a time."""
        return self._updates.begin(begin)

    def update_stage(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._updates.stage(txn, tensors)

    def update_stage_live(self, txn: str, tensors: Mapping[str, torch.Tensor]) -> UpdateProgress:
        """Tensors of this process, on any device; they must not change before the commit."""
        return self._updates.stage_live(txn, tensors)

    def update_stage_folder(self, txn: str, folder: Path) -> UpdateProgress:
        return self._updates.stage_folder(txn, folder)

    def update_stage_adapter(
        self, txn: str, name: str, prepared: PreparedAdapter, rev: int | None = None, keep_previous: bool = False
    ) -> AdapterReport:
        """A LoRA policy's next revision, to be published by the same commit. Requests that run on and chose to
        finish keep their revision under the new base."""
        return self._updates.stage_adapter(txn, name, prepared, rev, keep_previous)

    def update_commit(self, txn: str) -> UpdateReport:
        """Between two steps: old version before, new one after. Repeating a commit that
        succeeded returns its report.

        Running samples go on with their own pages where the policy is `keep` or the engine is
        paused in place, and their tokens are marked `mixed_kv`; otherwise they are retracted
        and computed again under the new weights. Tokens already sampled keep their labels.
        A drafter's update touches neither running samples nor the cache.
        """
        return self._updates.commit(txn)

    def update_rollback(self, txn: str) -> None:
        self._updates.rollback(txn)

    def digest(self, module: Module = "policy") -> str:
        """SHA-256 over the parameters that are being served."""
        return self._updates.digest(module)

    # --- memory and cache -------------------------------------------------------------------------

    def flush(self, scope: str = "all") -> int:
        """Drop cached prefixes nobody uses: `all`, or `stale` ones of earlier policy versions.
        Returns tokens freed now; pages in use go when their samples end."""
        if scope not in ("all", "stale"):
            raise InvalidRequest(field="scope", expected="'all' or 'stale'", actual=scope)
        self._finish_restores()
        return self._parts.cache.flush(scope)

    def release_memory(self, tags: list[str], level: str = "offload") -> tuple[dict[str, int], dict[str, int]]:
        """Give memory back to the system; bytes by tag before and after. Refused while samples are held.

        Released weights are kept in host memory with `offload`; with `discard` they are gone,
        and after `resume_memory` the engine serves nothing until a full update is committed.
        """
        self._loop.settle()
        if not self._scheduler.idle:
            raise Conflict("samples are running or waiting: drain, abort or wait before releasing memory")
        if self.pending is not None:
            raise Conflict(f"update {self.pending!r} is open")
        self._finish_restores()
        return self._parts.memory.release(tags, level)

    def resume_memory(self, tags: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Bring released memory back, at the addresses it had; what is already there stays as it is."""
        return self._parts.memory.resume(tags)

    # --- looking -----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.policy.fenced:
            return "fenced"
        if self._parts.memory.missing:
            return "released"
        if self._pause.mode is not None:
            return "paused"
        return "updating" if self.pending is not None else "ready"

    @property
    def pending(self) -> str | None:
        """Name of the open update."""
        return self._updates.pending

    @property
    def drafter_version(self) -> int:
        """0 for a drafter that was never updated, or where there is none."""
        return self._updates.drafter_version

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the memory left after the weights was divided, and why."""
        return self._parts.plan

    def draft_report(self) -> DraftReport:
        """Sums over speculation since the start; empty without a drafter."""
        speculation = self._parts.speculation
        return DraftReport() if speculation is None else speculation.record.report()

    def draft_counters(self) -> dict[str, float]:
        """The report's totals over domains, positions and bins, by `draft_` and name."""
        report = self.draft_report()
        return {f"draft_{name}": report.total(name) for name in sorted({name for name, _ in report.values})}

    def gauges(self) -> EngineGauges:
        return gauges(self._parts, self._scheduler, self.policy.version)

    def check(self) -> None:
        """Assert that every page, pin and slot is accounted for. Cheap enough when idle."""
        self._loop.settle()
        check(self._parts, self._scheduler, self._groups.values())

    # --- inside ---------------------------------------------------------------------------------

    def _follow_adapter(self, old: AdapterVersion, new: AdapterVersion) -> None:
        if followers(self._groups.values(), old):
            self._loop.settle()  # which may end some of them
            follow(followers(self._groups.values(), old), self._scheduler, self.adapters, new)

    def _abort_all(self) -> int:
        held = sum(group.unfinished for group in self._groups.values())
        self.abort()
        return held

    def _finish_restores(self) -> None:
        if self._parts.pages.restores is not None:
            self._parts.pages.restores.finish()

    def _fail_all(self, error: SparkrollError) -> None:
        for group in list(self._groups.values()):
            for sample in group.samples:
                if sample.state is not SampleState.FINISHED:
                    self._committer.fail(sample, error.code, error.message)
