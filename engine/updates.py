"""Updates of what an engine serves: its policy, its drafter where there is one, adapters in the same go.

Owns which module an update is of, which adapters are published with it, and what a new version does to
running work, the cache and what was learnt of acceptance. Ignores staging and checks (`engine.policy`,
`engine.weights.transaction`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from engine.adapters import PreparedAdapter
from engine.build import Parts
from engine.errors import Conflict, Paused, SparkrollError, Unsupported
from engine.pausing import PauseState
from engine.policy import Module, PolicyState
from engine.scheduler.scheduler import Scheduler
from engine.types import AdapterReport, NamedTensor, UpdateBegin, UpdateProgress, UpdateReport
from engine.weights.digest import model_digest
from engine.weights.transaction import PreparedUpdate


class Updates:
    """`settle` commits what is in flight, `fail_all` ends every group with an error."""

    def __init__(
        self,
        parts: Parts,
        scheduler: Scheduler,
        pause: PauseState,
        settle: Callable[[], object],
        fail_all: Callable[[SparkrollError], None],
    ) -> None:
        self._parts = parts
        self._scheduler = scheduler
        self._pause = pause
        self._settle = settle
        self._stopped = 0.0
        """When steps last stopped for an update."""
        self._fail_all = fail_all
        self._last_commit: tuple[str, UpdateReport] | None = None
        self._with: list[tuple[str, str, int, bool]] = []
        """Adapters that await the commit of a transaction: its name, theirs, revision, whether the one before
        stays addressable."""
        self.policy = PolicyState(parts.model)
        self.drafter = None if parts.drafter_model is None else PolicyState(parts.drafter_model, "drafter")
        self._modules = [self.policy] if self.drafter is None else [self.policy, self.drafter]

    @property
    def pending(self) -> str | None:
        """Name of the open update, of which there is one at a time."""
        return next((module.pending for module in self._modules if module.pending is not None), None)

    @property
    def drafter_version(self) -> int:
        """0 for a drafter that was never updated, or where there is none."""
        return 0 if self.drafter is None else self.drafter.version

    def expire(self) -> None:
        for module in self._modules:
            module.expire()
        if self._with:
            self._discard_adapters()

    def begin(self, begin: UpdateBegin) -> UpdateProgress:
        if not self._parts.memory.weights_resident:
            raise Paused("the weights are released: resume them before an update")
        module = next((module for module in self._modules if module.module == begin.module), None)
        if module is None:
            raise Unsupported(field="module", expected="'policy': this engine has no drafter", actual=begin.module)
        self.expire()
        if module.pending is None and self.pending is not None:
            raise Conflict(field="txn", expected=f"no open update beside {self.pending!r}", actual=begin.txn)
        return module.begin(begin)

    def stage(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._of(txn).stage(txn, tensors)

    def stage_live(self, txn: str, tensors: Mapping[str, torch.Tensor]) -> UpdateProgress:
        return self._of(txn).stage_live(txn, tensors)

    def stage_folder(self, txn: str, folder: Path) -> UpdateProgress:
        return self._of(txn).stage_folder(txn, folder)

    def stage_adapter(
        self, txn: str, name: str, prepared: PreparedAdapter, rev: int | None, keep_previous: bool = False
    ) -> AdapterReport:
        """Stage a revision that is published when `txn` commits, and discarded when it ends otherwise."""
        self._of(txn).touch(txn)
        report = self._parts.adapters.stage(name, prepared, rev)
        self._with.append((txn, name, report.rev, keep_previous))
        return report

    def rollback(self, txn: str) -> None:
        self._of(txn).rollback(txn)
        self._discard_adapters()

    def commit(self, txn: str) -> UpdateReport:
        if self._last_commit is not None and self._last_commit[0] == txn != self.pending:
            return self._last_commit[1]
        self._stopped, counters = time.perf_counter(), self._parts.counters
        commit = self._commit_policy if self._of(txn) is self.policy else self._commit_drafter
        try:
            adapters = self._adapters_of(txn)
            prepared, flushed, retracted = commit(txn)
        except SparkrollError:
            counters.updates_failed += 1
            self._discard_adapters()
            raise
        for name, rev, keep_previous in adapters:
            self._parts.adapters.publish(name, rev, keep_previous)
        self._with = []
        pause_ms = (time.perf_counter() - self._stopped) * 1e3
        counters.updates += 1
        counters.update_pause_ms += pause_ms
        report = UpdateReport(
            policy_version=self.policy.version,
            drafter_version=self.drafter_version,
            loaded=prepared.loaded | ({"adapters": len(adapters)} if adapters else {}),
            pause_ms=pause_ms,
            flushed_tokens=flushed,
            retracted=retracted,
            digest=prepared.digest,
        )
        self._last_commit = (txn, report)
        return report

    def digest(self, module: Module) -> str:
        if "weights" in self._parts.memory.missing:
            raise Paused("the weights are released")
        model = self._parts.model if module == "policy" else self._parts.drafter_model
        if model is None:
            raise Unsupported(field="module", expected="'policy': this engine has no drafter", actual=module)
        return model_digest(model)

    # --- inside ---------------------------------------------------------------------------------

    def _of(self, txn: str) -> PolicyState:
        """Whose transaction this is; the policy's where nobody knows it."""
        return next((module for module in reversed(self._modules) if module.knows(txn)), self.policy)

    def _adapters_of(self, txn: str) -> list[tuple[str, int, bool]]:
        """Those to publish with `txn`, in the order they came; whatever keeps one from it is raised before
        anything live changes."""
        found = [entry[1:] for entry in self._with if entry[0] == txn]
        newest: dict[str, int] = {}
        for name, rev, _ in found:
            if rev < newest.get(name, 0):
                raise Conflict(field="rev", expected=f"more than {newest[name]} of {name!r}", actual=rev)
            newest[name] = rev
            self._parts.adapters.check_publishable(name, rev)
        return found

    def _discard_adapters(self) -> None:
        """Drop adapters whose transaction is over."""
        over = [entry for entry in self._with if entry[0] != self.pending]
        self._with = [entry for entry in self._with if entry[0] == self.pending]
        for _, name, rev, _ in over:
            self._parts.adapters.discard(name, rev)

    def _commit_policy(self, txn: str) -> tuple[PreparedUpdate, int, int]:
        """What was loaded, tokens flushed, samples retracted."""
        try:
            begin, prepared = self.policy.prepare(txn)
            self._stop()
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
        """The same of a drafter, which touches neither running work nor the cache. Where it fails half
        way nothing is drafted until an update succeeds."""
        speculation = self._parts.speculation
        assert self.drafter is not None and speculation is not None
        _, prepared = self.drafter.prepare(txn)
        self._stop()
        try:
            self.drafter.commit(txn)
        except SparkrollError as error:
            speculation.faulty = error.message
            raise
        speculation.new_drafter()
        return prepared, 0, 0

    def _stop(self) -> None:
        """Steps in flight go on while an update is prepared; from their end on the device waits for it."""
        self._settle()
        self._stopped = time.perf_counter()

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
