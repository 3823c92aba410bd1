"""What a newly published adapter does to requests that are under way.

Owns the three answers a request may choose from. Ignores how versions are published (`engine.adapters`).
Tokens already sampled keep their labels whatever the answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.adapters import Adapters, Lease
from engine.request import Group, Sample
from engine.scheduler.scheduler import Scheduler
from lora.versions import AdapterVersion


def followers(groups: Iterable[Group], old: AdapterVersion) -> list[Group]:
    """Those that hold the version and chose to go on with the next one."""
    return [group for group in groups if _follows(group.lease, old)]


def follow(groups: list[Group], scheduler: Scheduler, adapters: Adapters, new: AdapterVersion) -> None:
    """Move followers to another version, between two steps. The loop is settled.

    Whoever keeps its keys and values goes on in the next step, which needs the new version on the device:
    where there is no room for it now, they are computed again like those of the others.
    """
    moving = {id(group): group for group in groups}
    scheduler.reset_prefills(lambda prefill: id(prefill.group) in moving)
    for group in moving.values():
        assert group.lease is not None
        group.lease.switch(new)
    running = [sample for sample in scheduler.running if id(sample.group) in moving]
    keeping = [sample for sample in running if _keeps(sample)]
    if keeping and not adapters.make_resident(new):
        keeping = []
    kept = {id(sample) for sample in keeping}
    for sample in running:
        if id(sample) not in kept:
            scheduler.retract(sample, publish=False)
            continue
        assert sample.sequence is not None
        sample.sequence.publishable = False
        sample.mixed_kv = True


def _follows(lease: Lease | None, old: AdapterVersion) -> bool:
    return lease is not None and lease.version is old and lease.on_publish != "finish"


def _keeps(sample: Sample) -> bool:
    lease = sample.group.lease
    return lease is not None and lease.on_publish == "keep_kv"
