"""The engine: one model, its cache and its running samples, in one thread.

Owns how the parts are put together and what callers may do with them between steps. Ignores
HTTP, Ray, text and trainers. Nothing here is thread-safe: whoever made the engine calls it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from engine.admission import make_group, refuse_overload
from engine.build import Parts, load_parts, make_stepper
from engine.cache.key import Namespace
from engine.collector import Collector
from engine.config import EngineConfig
from engine.errors import Conflict, Corrupt, InvalidRequest, Paused, SparkrollError, Unsupported
from engine.memory.allocator import PageState
from engine.memory.device_table import DeviceTable
from engine.metrics import EngineGauges
from engine.pausing import PauseState, check_mode
from engine.policy import PolicyState
from engine.request import Group, GroupSink, SampleState, StopWatcher
from engine.scheduler.batching import BatchBuilder
from engine.scheduler.commit import Committer
from engine.scheduler.jobs import ScoreJob
from engine.scheduler.loop import SerialLoop
from engine.scheduler.overlapped import OverlappedLoop
from engine.scheduler.prefill import ScoreTask
from engine.scheduler.scheduler import Scheduler
from engine.types import (
    AbortOutcome,
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
from engine.validation import validate_group, validate_score
from engine.weights.digest import model_digest
from engine.weights.transaction import PreparedUpdate


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
        self.policy = PolicyState(parts.model)
        self.drafter = None if parts.drafter_model is None else PolicyState(parts.drafter_model, "drafter")
        self._groups: dict[str, Group] = {}
        self._arrivals = 0
        self._last_commit: tuple[str, UpdateReport] | None = None
        self._scheduler = Scheduler(parts.config.scheduler, parts.pages, parts.counters, self._namespace)
        self._committer = Committer(
            self._scheduler, self._groups, parts.counters, lambda: self.policy.version, lambda: self.drafter_version
        )
        self._pause = PauseState(self._scheduler, self._abort_all)
        builder = BatchBuilder(
            parts.pages.table, parts.pages.page_size, parts.device, verify_as_decode=parts.config.deterministic
        )
        serial = SerialLoop(
            self._scheduler,
            builder,
            parts.runner,
            parts.sampler,
            self._committer,
            parts.counters,
            parts.speculation,
        )
        self._loop: SerialLoop | OverlappedLoop = serial
        if parts.config.loop == "overlapped":
            burst = parts.config.scheduler.burst
            table = DeviceTable(parts.pages.table.num_slots, 2 * burst, parts.device)
            stepper = make_stepper(parts, table, builder)
            self._loop = OverlappedLoop(
                self._scheduler,
                serial,
                table,
                stepper,
                self._committer,
                parts.counters,
                burst,
                parts.config.scheduler.prefill_burst,
            )

    @classmethod
    def from_pretrained(cls, folder: str | Path, config: EngineConfig | None = None) -> Engine:
        """Load a Hugging Face folder of a supported architecture (safetensors only)."""
        return cls(load_parts(Path(folder), config or EngineConfig()))

    # --- generation ---------------------------------------------------------------------------

    def add_group(self, request: GroupRequest, sink: GroupSink, watchers: dict[int, StopWatcher] | None = None) -> None:
        """Queue a request; results go to `sink` from later steps."""
        try:
            group = self._admit_group(request, sink, watchers or {})
        except SparkrollError:
            self.counters.rejected += 1
            raise
        self._groups[request.group_id] = group
        self.counters.groups_started += 1
        self._scheduler.add(group.samples)

    def generate(self, requests: list[GroupRequest]) -> list[GroupOutput]:
        """Run the engine until these requests are answered, beside whatever else it holds."""
        self._refuse_while_stopped()
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
        for module in self._modules:
            module.expire()
        if self.policy.fenced or self._parts.memory.missing or not self._pause.lets_steps:
            return False
        return self._loop.step()

    @property
    def has_work(self) -> bool:
        """Whether a step could do something."""
        if self.policy.fenced or self._parts.memory.missing:
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
        self._refuse_while_stopped()
        validate_score(request, self.limits)
        self.counters.scored_tokens += sum(len(ids) - request.start for ids in request.sequences)
        tasks = job.start(request, lambda: self.policy.version)
        space = self._scoring_namespace
        self._scheduler.add_scoring([ScoreTask(ids.astype(np.int32), space, make, done) for ids, make, done in tasks])

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
        """Open an update of the policy or of the drafter, whose versions are apart; one of them at a time."""
        if not self._parts.memory.weights_resident:
            raise Paused("the weights are released: resume them before an update")
        module = {"policy": self.policy, "drafter": self.drafter}[begin.module]
        if module is None:
            raise Unsupported(field="module", expected="'policy': this engine has no drafter", actual=begin.module)
        for other in self._modules:
            other.expire()
            if other is not module and other.pending is not None:
                raise Conflict(field="txn", expected=f"no open update beside {other.pending!r}", actual=begin.txn)
        return module.begin(begin)

    def update_stage(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._module_of(txn).stage(txn, tensors)

    def update_stage_live(self, txn: str, tensors: Mapping[str, torch.Tensor]) -> UpdateProgress:
        """Tensors of this process, on any device; they must not change before the commit."""
        return self._module_of(txn).stage_live(txn, tensors)

    def update_stage_folder(self, txn: str, folder: Path) -> UpdateProgress:
        return self._module_of(txn).stage_folder(txn, folder)

    def update_commit(self, txn: str) -> UpdateReport:
        """Between two steps: old version before, new one after. Repeating a commit that
        succeeded returns its report.

        Running samples go on with their own pages where the policy is `keep` or the engine is
        paused in place, and their tokens are marked `mixed_kv`; otherwise they are retracted
        and computed again under the new weights. Tokens already sampled keep their labels.
        A drafter's update touches neither running samples nor the cache.
        """
        if self._last_commit is not None and self._last_commit[0] == txn != self.pending:
            return self._last_commit[1]
        began = time.perf_counter()
        module = self._module_of(txn)
        commit = self._commit_policy if module is self.policy else self._commit_drafter
        try:
            prepared, flushed, retracted = commit(txn)
        except SparkrollError:
            self.counters.updates_failed += 1
            raise
        pause_ms = (time.perf_counter() - began) * 1e3
        self.counters.updates += 1
        self.counters.update_pause_ms += pause_ms
        report = UpdateReport(
            policy_version=self.policy.version,
            drafter_version=self.drafter_version,
            loaded=prepared.loaded,
            pause_ms=pause_ms,
            flushed_tokens=flushed,
            retracted=retracted,
            digest=prepared.digest,
        )
        self._last_commit = (txn, report)
        return report

    def _commit_policy(self, txn: str) -> tuple[PreparedUpdate, int, int]:
        """What was loaded, tokens flushed, samples retracted."""
        try:
            begin, prepared = self.policy.prepare(txn)
            self._loop.settle()
            keep = begin.kv_policy == "keep" or self._pause.mode == "in_place"
            retracted = self._leave_version(keep)
            self.policy.commit(txn)
        except SparkrollError as error:
            if self.policy.fenced:
                self._fail_all(error)
            raise
        self._parts.memory.weights_filled()
        cache = self._parts.cache
        cache.bump_epoch()
        flushed = cache.flush("stale") if begin.kv_policy == "invalidate" else 0
        if self._parts.speculation is not None:
            self._parts.speculation.new_policy()
        return prepared, flushed, retracted

    def _commit_drafter(self, txn: str) -> tuple[PreparedUpdate, int, int]:
        """The same for a drafter. Where it fails half way nothing is drafted until an update succeeds."""
        drafter, speculation = self._module_of(txn), self._parts.speculation
        assert speculation is not None
        _, prepared = drafter.prepare(txn)
        self._loop.settle()
        try:
            drafter.commit(txn)
        except SparkrollError as error:
            speculation.faulty = error.message
            raise
        speculation.new_drafter()
        return prepared, 0, 0

    def update_rollback(self, txn: str) -> None:
        self.policy.rollback(txn)

    def digest(self) -> str:
        """One digest over the parameters that are being served (`engine.weights.digest`)."""
        if "weights" in self._parts.memory.missing:
            raise Paused("the weights are released")
        return model_digest(self._parts.model)

    # --- memory and cache -------------------------------------------------------------------------

    def flush(self, scope: str = "all") -> int:
        """Drop cached prefixes nobody uses: `all`, or `stale` ones of earlier policy versions.
        Returns tokens freed now; pages in use go when their samples end."""
        if scope not in ("all", "stale"):
            raise InvalidRequest(field="scope", expected="'all' or 'stale'", actual=scope)
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
        return next((module.pending for module in self._modules if module.pending is not None), None)

    @property
    def drafter_version(self) -> int:
        """0 for a drafter that was never updated, or where there is none."""
        return 0 if self.drafter is None else self.drafter.version

    def draft_counters(self) -> dict[str, float]:
        """Sums over speculation since the start (`engine.dspark.record`); empty without a drafter."""
        speculation = self._parts.speculation
        return {} if speculation is None else speculation.record.counters()

    def gauges(self) -> EngineGauges:
        parts, scheduler = self._parts, self._scheduler
        return EngineGauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(scheduler.scoring),
            prefilling=len(scheduler.prefills),
            pages_total=parts.pages.allocator.num_pages,
            pages_free=parts.pages.allocator.num_free,
            pages_tree=parts.pages.allocator.count(PageState.TREE),
            pages_private=parts.pages.allocator.count(PageState.PRIVATE),
            page_size=parts.pages.page_size,
            policy_version=self.policy.version,
            **{f"{tag}_bytes": count for tag, count in parts.memory.bytes().items()},
        )

    def check(self) -> None:
        """Assert that every page, pin and slot is accounted for. Cheap enough when idle."""
        self._loop.settle()
        held = [sample.sequence for sample in self._scheduler.running if sample.sequence]
        self._parts.pages.check(held + [prefill.sequence for prefill in self._scheduler.prefills])

    # --- inside ---------------------------------------------------------------------------------

    @property
    def _modules(self) -> list[PolicyState]:
        return [self.policy] if self.drafter is None else [self.policy, self.drafter]

    def _module_of(self, txn: str) -> PolicyState:
        """Whose transaction this is; the policy's where nobody knows it."""
        return next((module for module in reversed(self._modules) if module.knows(txn)), self.policy)

    def _admit_group(self, request: GroupRequest, sink: GroupSink, watchers: dict[int, StopWatcher]) -> Group:
        self._refuse_while_unable()
        validate_group(request, self.limits)
        if request.group_id in self._groups:
            raise Conflict(field="group_id", expected="an id no live group has", actual=request.group_id)
        if request.min_policy_version is not None and request.min_policy_version > self.policy.version:
            raise Conflict(
                field="min_policy_version", expected=f"at most {self.policy.version}", actual=request.min_policy_version
            )
        refuse_overload(request, len(self._scheduler.waiting), self.limits.max_waiting)
        self._arrivals += 1
        return make_group(request, sink, watchers, self._arrivals, self._parts.model.spec.eos_ids)

    def _abort_all(self) -> int:
        held = sum(group.unfinished for group in self._groups.values())
        self.abort()
        return held

    def _refuse_while_unable(self) -> None:
        if self.policy.fenced:
            raise Corrupt(f"this engine is fenced: {self.policy.fenced}")
        if self._parts.memory.missing:
            raise Paused(f"memory is released: {sorted(self._parts.memory.missing)}")

    def _refuse_while_stopped(self) -> None:
        """For calls that run the loop themselves and would wait for ever."""
        self._refuse_while_unable()
        if self._pause.mode is not None:
            raise Paused("generation is paused: resume first")

    def _leave_version(self, keep: bool) -> int:
        """Prepare running work for new weights. Returns how many samples were retracted."""
        scheduler = self._scheduler
        scheduler.reset_prefills()
        running = list(scheduler.running)
        for sample in running:
            if keep:
                assert sample.sequence is not None
                sample.sequence.publishable = False
                sample.mixed_kv = True
            else:
                scheduler.retract(sample, publish=False)
        return 0 if keep else len(running)

    def _fail_all(self, error: SparkrollError) -> None:
        for group in list(self._groups.values()):
            for sample in group.samples:
                if sample.state is not SampleState.FINISHED:
                    self._committer.fail(sample, error.code, error.message)

    def _namespace(self, group: Group) -> Namespace:
        """Where a group's pages live in the cache under the present policy. With the prefix cache
        off, groups still share their own prompt, and nothing else."""
        shared = self.config.cache.prefix_cache
        return Namespace(
            epoch=self._parts.cache.current_epoch,
            salt=group.request.cache_salt,
            layout=self._parts.layout if shared else f"{self._parts.layout} group {group.arrival}",
        )

    def _scoring_namespace(self) -> Namespace:
        self._arrivals += 1
        shared = self.config.cache.prefix_cache
        layout = self._parts.layout if shared else f"{self._parts.layout} score {self._arrivals}"
        return Namespace(epoch=self._parts.cache.current_epoch, layout=layout)
