"""From a request to a group, or to tasks of scoring, that the scheduler can hold.

Owns whether anything may enter now, and the samples a group starts with: their seeds, their sampling rows and what
they resume from. Ignores whether a request may be served at all (`engine.validation`) and when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from engine.build import Parts
from engine.errors import Conflict, Corrupt, Overloaded, Paused
from engine.namespaces import Namespaces
from engine.pausing import PauseState
from engine.policy import PolicyState
from engine.request import Group, GroupSink, Sample, StopWatcher
from engine.sampling.params import RowSampling
from engine.sampling.seeds import derive_seed
from engine.scheduler.jobs import ScoreJob
from engine.scheduler.prefill import ScoreTask
from engine.scheduler.scheduler import Scheduler
from engine.types import GroupRequest, ScoreRequest
from engine.validation import validate_group, validate_score


class Admission:
    """`groups` are the live ones by id."""

    def __init__(
        self,
        parts: Parts,
        groups: Mapping[str, Group],
        scheduler: Scheduler,
        namespaces: Namespaces,
        policy: PolicyState,
        pause: PauseState,
    ) -> None:
        self._parts = parts
        self._groups = groups
        self._scheduler = scheduler
        self._namespaces = namespaces
        self._policy = policy
        self._pause = pause
        self._arrivals = 0

    @property
    def able(self) -> bool:
        """Whether the engine has what it computes with, whole."""
        return not (self._policy.fenced or self._parts.memory.missing)

    def group(self, request: GroupRequest, sink: GroupSink, watchers: dict[int, StopWatcher]) -> Group:
        parts, policy_version = self._parts, self._policy.version
        self.refuse_while_unable()
        validate_group(request, parts.limits)
        if request.group_id in self._groups:
            raise Conflict(field="group_id", expected="an id no live group has", actual=request.group_id)
        if request.min_policy_version is not None and request.min_policy_version > policy_version:
            raise Conflict(
                field="min_policy_version", expected=f"at most {policy_version}", actual=request.min_policy_version
            )
        refuse_overload(request, len(self._scheduler.waiting), parts.limits.max_waiting)
        self._arrivals += 1
        group = make_group(request, sink, watchers, self._arrivals, parts.model.spec.eos_ids, parts.fresh_seed)
        group.lease = parts.adapters.lease(request.adapter)
        return group

    def scoring(self, request: ScoreRequest, job: ScoreJob) -> list[ScoreTask]:
        self.refuse_while_stopped()
        validate_score(request, self._parts.limits)
        lease = job.lease = self._parts.adapters.lease(request.adapter)
        tasks = job.start(request, lambda: self._policy.version)
        space = partial(self._namespaces.of_scoring, lease)
        return [ScoreTask(ids.astype(np.int32), space, make, done, lease) for ids, make, done in tasks]

    def refuse_while_unable(self) -> None:
        if self._policy.fenced:
            raise Corrupt(f"this engine is fenced: {self._policy.fenced}")
        if self._parts.memory.missing:
            raise Paused(f"memory is released: {sorted(self._parts.memory.missing)}")

    def refuse_while_stopped(self) -> None:
        """For calls that run the loop themselves and would wait for ever."""
        self.refuse_while_unable()
        if self._pause.mode is not None:
            raise Paused("generation is paused: resume first")


def make_group(
    request: GroupRequest,
    sink: GroupSink,
    watchers: dict[int, StopWatcher],
    arrival: int,
    eos_ids: tuple[int, ...],
    fresh_seed: Callable[[], int],
) -> Group:
    """All samples of a valid request, or only those it resumes; `fresh_seed` is for one without a seed."""
    group = Group(request, request.prompt_ids.astype(np.int32), sink, arrival)
    sampling = request.sampling
    seed = sampling.seed if sampling.seed is not None else fresh_seed()
    entries = {entry.index: entry for entry in request.resume or []}
    for index in sorted(entries) if entries else range(request.n):
        own_seed = sampling.seeds[index] if sampling.seeds else derive_seed(seed, index)
        resumed = entries[index].ids.tolist() if index in entries else []
        row = RowSampling(sampling, request.want, own_seed, group.prompt, eos_ids, resumed)
        watcher = watchers.get(index)
        if resumed and watcher is not None:
            watcher.observe(resumed)
        group.samples.append(
            Sample(group, index, row.seed, row, resumed, len(resumed), watcher, delivered=len(resumed))
        )
    group.unfinished = len(group.samples)
    return group


def refuse_overload(request: GroupRequest, waiting: int, max_waiting: int) -> None:
    """Raise `Overloaded` where `waiting` samples and those of `request` are more than may queue."""
    total = waiting + (len(request.resume) if request.resume else request.n)
    if total > max_waiting:
        raise Overloaded(
            field="queue", expected=f"at most {max_waiting} waiting samples", actual=total, retry_after_ms=1000
        )
