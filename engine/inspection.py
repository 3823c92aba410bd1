"""What an engine says of itself between two steps.

Owns the gauges and the check that everything is accounted for. Ignores what grows from step to step
(`engine.metrics.EngineCounters`).
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.build import Parts
from engine.memory.allocator import PageState
from engine.metrics import EngineGauges
from engine.request import Group
from engine.scheduler.scheduler import Scheduler


def gauges(parts: Parts, scheduler: Scheduler, policy_version: int) -> EngineGauges:
    pages, allocator = parts.pages, parts.pages.allocator
    return EngineGauges(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting) + len(scheduler.scoring),
        prefilling=len(scheduler.prefills),
        pages_total=allocator.num_pages,
        pages_free=allocator.num_free,
        pages_tree=allocator.count(PageState.TREE),
        pages_private=allocator.count(PageState.PRIVATE),
        page_size=pages.page_size,
        policy_version=policy_version,
        adapters_resident=parts.adapters.num_resident,
        **{f"{tag}_bytes": count for tag, count in parts.memory.bytes().items()},
        **({} if pages.windows is None else pages.windows.gauges()),
        **({} if pages.restores is None else pages.restores.tier.gauges()),
    )


def check(parts: Parts, scheduler: Scheduler, groups: Iterable[Group]) -> None:
    """Assert that every page, pin and slot has one owner, and that leases on adapters are those of whoever is held.
    Nothing may be in flight."""
    held = [sample.sequence for sample in scheduler.running if sample.sequence]
    parts.pages.check(held + [prefill.sequence for prefill in scheduler.prefills])
    scoring = list(scheduler.scoring) + [p.task for p in scheduler.prefills if p.task is not None]
    leases = {id(lease): lease for holder in (*groups, *scoring) if (lease := holder.lease)}
    parts.adapters.check(list(leases.values()))
