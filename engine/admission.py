"""From a request to a group the scheduler can hold.

Owns the samples a group starts with: their seeds, their sampling rows and what they resume from.
Ignores whether the request may be served at all (`engine.validation`) and when it runs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import Overloaded
from engine.request import Group, GroupSink, Sample, StopWatcher
from engine.sampling.params import RowSampling
from engine.sampling.seeds import derive_seed
from engine.types import GroupRequest


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
