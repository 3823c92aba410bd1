"""LoRA policies of a whole fleet.

Owns the fleet's numbers, which revision a name leads to, and who still holds one: a group resolves its
policy's name here, once, and keeps the revision wherever it runs until it ends. Ignores what an adapter is.

A revision is staged on every engine, then published on every engine; only then does the fleet's name lead to
it. Engines keep earlier revisions until nobody here holds them. A failure before the first engine has
published leaves the old revision serving; an engine that fails afterwards is fenced, so that no two engines
mean different things by a name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.errors import Conflict, Corrupt, NotFound, SparkrollError
from engine.types import AdapterRef, AdapterReport, AdapterUpdate, AdapterUpdateReport
from rollout.routing.adapter_store import AdapterStore
from rollout.routing.errors import Behind, EngineLost
from rollout.routing.fanout import everyone, outcomes
from rollout.routing.replica import AdapterKey, Membership, Replica

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Hold:
    """A group's hold on a revision. One that follows moves on with its name."""

    key: AdapterKey
    follows: bool


class FleetAdapters:
    def __init__(self, membership: Membership, store: AdapterStore) -> None:
        self._membership = membership
        self._store = store
        self._current: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._holds: dict[AdapterKey, set[Hold]] = defaultdict(set)
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def current(self) -> dict[str, int]:
        return dict(self._current)

    # --- groups ---------------------------------------------------------------------------------

    def acquire(self, ref: AdapterRef | None) -> tuple[AdapterRef | None, Hold | None]:
        """What engines are asked for, and the hold to `release` when the group has ended."""
        if ref is None:
            return None, None
        rev = self._current.get(ref.name) if ref.rev is None else ref.rev
        if rev is None or (ref.name, rev) not in self._membership.adapters:
            raise NotFound(field="adapter", expected=self._known(), actual=_shown(ref))
        follows = ref.rev is None and ref.on_publish != "finish"
        hold = Hold((ref.name, rev), follows)
        self._holds[hold.key].add(hold)
        return ref if follows else AdapterRef(name=ref.name, rev=rev), hold

    def release(self, hold: Hold | None) -> None:
        if hold is None:
            return
        self._holds[hold.key].remove(hold)
        if self._is_over(hold.key):
            task = asyncio.get_running_loop().create_task(self._tell_retired(hold.key, self._drop(hold.key)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    # --- revisions ------------------------------------------------------------------------------

    async def update(self, update: AdapterUpdate) -> AdapterUpdateReport:
        """Stage everywhere, publish everywhere."""
        async with self._locks[update.name]:
            update, staged = await self.stage(update, self._membership.routable(), None)
            key = _key(update)
            try:
                engines = [engine for engine in staged if engine.routable]
                results = await outcomes(self._membership, engines, lambda service: service.publish_adapter(*key))
                reports = {engine: found for engine, found in results.items() if isinstance(found, AdapterUpdateReport)}
                if not reports:
                    raise next(found for found in results.values() if isinstance(found, SparkrollError))
            except SparkrollError:
                await self.discard(update, list(staged))
                raise
            fenced = await self.published(update, list(reports), list(results))
            pause_ms = max(staged[engine].pause_ms + report.pause_ms for engine, report in reports.items())
            return _joined(next(iter(reports.values())), pause_ms, key[1], list(reports), fenced)

    async def stage(
        self, update: AdapterUpdate, engines: Sequence[Replica], txn: str | None
    ) -> tuple[AdapterUpdate, dict[Replica, AdapterUpdateReport]]:
        """Give the revision its number and bring it to all of `engines`, or to none."""
        last = self._last.get(update.name, 0)
        rev = last + 1 if update.rev is None else update.rev
        if rev <= last:
            raise Conflict(field="rev", expected=f"more than {last}, the last revision of {update.name!r}", actual=rev)
        self._last[update.name] = rev
        update = msgspec.structs.replace(update, rev=rev)
        keeping = asyncio.get_running_loop().run_in_executor(None, self._store.put, update)
        try:
            staged = await everyone(self._membership, engines, lambda service: service.stage_adapter(update, txn))
            digests = {report.adapter.digest for report in staged.values()}
            if len(digests) != 1:
                raise Corrupt(field="adapter", expected="one digest on all engines", actual=sorted(digests))
        except SparkrollError:
            await keeping
            await self.discard(update, engines)
            raise
        await keeping
        return update, staged

    async def published(self, update: AdapterUpdate, engines: Sequence[Replica], asked: Sequence[Replica]) -> list[str]:
        """Some engine has published, so the fleet has; whoever of `asked` has not is out. Names of those."""
        name, rev = key = _key(update)
        previous = self._current.get(name)
        self._current[name] = rev
        self._membership.adapters.add(key)
        for engine in engines:
            engine.adapters.add(key)
        fenced = []
        for engine in asked:
            if engine not in engines and engine.routable:
                fenced.append(engine.engine_id)
                self._membership.take_out(engine, Corrupt(f"{engine.name} did not publish {name}@{rev}"), fence=True)
        for engine in self._membership.routable():
            if key not in engine.adapters:
                self._membership.take_out(engine, Behind(f"{engine.name} joined before {name}@{rev} was published"))
        if previous is not None:
            old = name, previous
            for hold in [hold for hold in self._holds[old] if hold.follows]:
                self._holds[old].remove(hold)
                hold.key = key
                self._holds[key].add(hold)
            if self._is_over(old):
                await self._tell_retired(old, self._drop(old))
        return fenced

    async def discard(self, update: AdapterUpdate, engines: Sequence[Replica]) -> None:
        """Best effort: an engine that never staged it, or has lost it, is fine."""
        key = _key(update)
        self.forget(update)
        try:
            await outcomes(
                self._membership,
                [engine for engine in engines if engine.routable],
                lambda service: service.discard_adapter(*key),
            )
        except EngineLost:
            logger.info("no engine is left to discard %s@%d", *key)

    def forget(self, update: AdapterUpdate) -> None:
        """The revision was never published, and engines have dropped it by themselves."""
        self._store.drop(_key(update))

    async def unload(self, name: str) -> None:
        async with self._locks[name]:
            if name not in self._current:
                raise NotFound(field="adapter", expected=self._known(), actual=name)
            key = name, self._current.pop(name)
            if self._is_over(key):
                await self._tell_retired(key, self._drop(key))

    async def reports(self) -> list[AdapterReport]:
        """Those that requests may ask for and those under way, with references over all engines."""
        engines = self._membership.routable()
        answers = await everyone(self._membership, engines, lambda service: service.adapters())
        merged: dict[AdapterKey, AdapterReport] = {}
        for report in (report for answer in answers.values() for report in answer):
            known = merged.get((report.name, report.rev))
            references = report.references + (known.references if known else 0)
            merged[report.name, report.rev] = msgspec.structs.replace(known or report, references=references)
        for key in merged:
            if merged[key].state == "live" and self._current.get(key[0]) != key[1]:
                merged[key] = msgspec.structs.replace(merged[key], state="retiring")
        return [merged[key] for key in sorted(merged)]

    # --- engines that join ----------------------------------------------------------------------

    async def align(self, replica: Replica) -> None:
        """One step towards the fleet's revisions: they may change meanwhile."""
        for key in sorted(replica.adapters - self._membership.adapters):
            await replica.service.retire_adapter(*key)
            replica.adapters.discard(key)
        for key in sorted(self._membership.adapters - replica.adapters):
            update = await asyncio.to_thread(self._store.get, key)
            if update is not None:
                await replica.service.stage_adapter(update, None)
                await replica.service.publish_adapter(*key)
                replica.adapters.add(key)

    # --- inside ---------------------------------------------------------------------------------

    def _is_over(self, key: AdapterKey) -> bool:
        """Nobody holds the revision and no name leads to it."""
        if self._holds[key]:
            return False
        del self._holds[key]
        return self._current.get(key[0]) != key[1] and key in self._membership.adapters

    def _drop(self, key: AdapterKey) -> list[Replica]:
        """From now on nobody can ask for the revision. Returns the engines that still have it."""
        self._membership.adapters.discard(key)
        engines = [engine for engine in self._membership.routable() if key in engine.adapters]
        for engine in engines:
            engine.adapters.discard(key)
        self._store.drop(key)
        return engines

    async def _tell_retired(self, key: AdapterKey, engines: Sequence[Replica]) -> None:
        try:
            await outcomes(self._membership, engines, lambda service: service.retire_adapter(*key))
        except EngineLost:
            logger.info("no engine is left to retire %s@%d", *key)

    def _known(self) -> str:
        names = sorted(self._current)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"an adapter that is loaded ({', '.join(names[:8]) or 'none is'}{more})"


def _key(update: AdapterUpdate) -> AdapterKey:
    assert update.rev is not None, "a revision is numbered before it is sent"
    return update.name, update.rev


def _shown(ref: AdapterRef) -> str:
    return ref.name if ref.rev is None else f"{ref.name}@{ref.rev}"


def _joined(
    first: AdapterUpdateReport, pause_ms: float, rev: int, engines: Sequence[Replica], fenced: list[str]
) -> AdapterUpdateReport:
    names = {engine.engine_id: rev for engine in engines}
    return msgspec.structs.replace(first, pause_ms=pause_ms, engines=names, fenced=fenced)
