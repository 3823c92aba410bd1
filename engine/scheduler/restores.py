"""Cached units on their way back from the host: prefetched for those who wait.

Owns restores in flight: their place in the tree is pinned and their units are in flight, until all has arrived; then
what is whole passes to the tree by an insert like any other, and whoever asks next hits it. What has failed or
does not fit is a miss. Ignores who waits, and how rows travel (`engine.memory.host_lanes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.cache.key import Namespace
from engine.cache.prefix_cache import Match, PrefixCache, Receipt
from engine.cache.recurrent import RecurrentState, Snapshot
from engine.cache.swa import SlidingWindow
from engine.memory.allocator import IN_FLIGHT, PRIVATE, PageAllocator
from engine.memory.host_arena import HostRow
from engine.memory.host_lanes import Arrival
from engine.memory.host_tier import HostTier
from engine.scheduler.restore_plan import RestorePlan, RestorePlanner

PREFETCH_SHARE = 4
"""Pages in flight for those who wait are at most one over this of the pool."""


@dataclass(slots=True)
class Part:
    """Rows of one kind and the units they go to; `whole` says which have arrived, in order."""

    rows: list[HostRow]
    ids: np.ndarray
    sent: int = 0
    whole: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class Restore:
    """`flying` copies have not arrived yet."""

    plan: RestorePlan
    receipt: Receipt
    parts: dict[str, Part]
    flying: int = 0

    @property
    def over(self) -> bool:
        return not self.flying and all(part.sent == len(part.rows) for part in self.parts.values())


class Restores:
    """`spare` units of each component are left to others while something is on its way."""

    def __init__(self, tier: HostTier, cache: PrefixCache, spare: Callable[[], int]) -> None:
        self.tier = tier
        self._cache = cache
        self._spare = spare
        self._planner = RestorePlanner(tier, cache)
        self._under_way: dict[tuple[Namespace, bytes], Restore] = {}
        self._copies: deque[tuple[Restore, str, Arrival]] = deque()
        self._components = {each.name: each for each in cache.components}
        self._allocators: dict[str, PageAllocator] = {each.name: each.allocator for each in cache.components}
        self._windows: SlidingWindow | None = None
        self._states: RecurrentState | None = None
        for component in cache.components:
            if isinstance(component, SlidingWindow):
                self._windows = component
            elif isinstance(component, RecurrentState):
                self._states = component

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def prefetch(self, match: Match, ahead: bool = False) -> bool:
        """Begin to bring what makes this hit longer. Whether something is under way for it, or has to land before
        there is room: then the match should be asked for again later. Who asks `ahead` of his turn gets less."""
        plan = self._planner.plan(match)
        if plan is None:
            return False
        key = match.namespace, plan.key
        if key not in self._under_way:
            flying = sum(len(each.plan.pages) for each in self._under_way.values())
            if ahead and flying and (flying + len(plan.pages)) * PREFETCH_SHARE > self._cache.allocator.num_pages:
                return False
            restore = self._begin(plan)
            if restore is None:
                return self.busy
            self._under_way[key] = restore
            self.pump()
        return key in self._under_way

    def pump(self) -> None:
        """Send what there is room to send, and hand over what has arrived."""
        self._step(wait=False)

    def finish(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._step(wait=True)

    def check(self) -> None:
        """Assert that units in flight are those of restores."""
        self.tier.check()
        for kind, allocator in self._allocators.items():
            parts = [each.parts[kind] for each in self._under_way.values() if kind in each.parts]
            ids = np.sort(np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]))
            assert np.array_equal(ids, np.flatnonzero(allocator.states == IN_FLIGHT)), f"{kind}: units in flight"

    # Beginning ---------------------------------------------------------------------------------

    def _begin(self, plan: RestorePlan) -> Restore | None:
        size = self._cache.page_size
        wanted = {"full": plan.pages, "swa": list(plan.windows.values()), "recurrent": [plan.state]}
        rows = {kind: [row for row in found if row is not None] for kind, found in wanted.items()}
        for kind, found in rows.items():
            for row in found:
                self.tier.arenas[kind].hold(row)
        receipt = self._cache.acquire_known(plan.match, min(plan.known, plan.depth) * size)
        parts: dict[str, Part] = {}
        for kind, found in rows.items():
            if not found:
                continue
            ids = self._take(kind, len(found))
            if ids is None:
                self._give_back(parts)
                for other, held in rows.items():
                    self._let_go(other, held)
                self._cache.release(receipt)
                return None
            self._allocators[kind].transfer(ids, PRIVATE, IN_FLIGHT)
            parts[kind] = Part(found, np.array(ids))
        return Restore(plan, receipt, parts)

    def _take(self, kind: str, count: int) -> np.ndarray | None:
        """Units as PRIVATE ids, evicting what must go; None where there is no room."""
        cache, component = self._cache, self._components[kind]
        allocator = component.allocator
        if allocator.num_free + component.evictable(cache.tree) < count + self._spare():
            return None
        shortfall = count - allocator.num_free
        if shortfall > 0 and cache.evict(shortfall, kind) < shortfall:
            return None
        return allocator.alloc(count)

    def _give_back(self, parts: dict[str, Part]) -> None:
        for kind, part in parts.items():
            self._allocators[kind].free(part.ids, IN_FLIGHT)

    def _let_go(self, kind: str, rows: list[HostRow]) -> None:
        for row in reversed(rows):  # deep ones are given up first
            self.tier.arenas[kind].let_go(row)

    # Under way ---------------------------------------------------------------------------------

    def _step(self, wait: bool) -> None:
        progress = True
        while progress:
            progress = self._send()
            while self._copies and (wait or self._copies[0][2].done):
                restore, kind, arrival = self._copies.popleft()
                part, progress = restore.parts[kind], True
                first = len(part.whole)
                part.whole += self.tier.arrived(kind, arrival, part.ids[first : first + arrival.count].tolist())
                restore.flying -= 1
        for key, restore in list(self._under_way.items()):
            if restore.over:
                del self._under_way[key]
                self._land(restore)

    def _send(self) -> bool:
        """Begin copies as far as there is staging. Whether any began."""
        lanes, before = self.tier.lanes, len(self._copies)
        for restore in self._under_way.values():
            for kind, part in restore.parts.items():
                while part.sent < len(part.rows) and lanes.ready:
                    rows = part.rows[part.sent : part.sent + lanes.most(self.tier.layouts[kind])]
                    arrival = self.tier.bring(kind, rows)
                    if arrival is None:  # the rest would fare no better
                        for each in restore.parts.values():
                            each.sent = len(each.rows)
                        break
                    part.sent += len(rows)
                    restore.flying += 1
                    self._copies.append((restore, kind, arrival))
        return len(self._copies) > before

    # Landing -----------------------------------------------------------------------------------

    def _land(self, restore: Restore) -> None:
        """What is whole passes to the tree, unless its root is one that nobody asks any longer."""
        receipt, parts, cache = restore.receipt, restore.parts, self._cache
        for kind, part in parts.items():
            part.whole += [False] * (len(part.rows) - len(part.whole))
            self._let_go(kind, part.rows)
            for row, whole in zip(part.rows, part.whole, strict=True):
                if not whole:
                    self.tier.arenas[kind].drop(row)
            self._allocators[kind].transfer(part.ids, IN_FLIGHT, PRIVATE)
        assert receipt.node is not None, "held until here"
        root = receipt.node.root
        left = {kind: part.ids for kind, part in parts.items()}
        if not (root.doomed or root.retired or root.namespace.epoch < cache.current_epoch):
            left = self._insert(restore)
        for kind, ids in left.items():
            if len(ids):
                self._allocators[kind].free(ids, PRIVATE)
        cache.release(receipt)
        plan = restore.plan
        gained = cache.match(plan.match.namespace, plan.match.tokens, plan.depth * cache.page_size).usable
        self.tier.counters.host_hit_tokens += max(0, gained - plan.usable * cache.page_size)

    def _insert(self, restore: Restore) -> dict[str, np.ndarray]:
        """Hand units to the tree; those left over."""
        plan, receipt, parts, cache = restore.plan, restore.receipt, restore.parts, self._cache
        size, page_bytes = cache.page_size, cache.tree.page_bytes
        full = parts.get("full")
        start = receipt.length // size
        good = 0 if full is None else [*full.whole, False].index(False)
        end = start + good
        windows = self._whole_windows(restore)
        state = parts.get("recurrent")
        slot = int(state.ids[0]) if state is not None and state.whole[0] and end == plan.depth else 0
        self._refill_windows(receipt, plan.depth, windows)
        if slot and not good:
            node = receipt.node
            if self._states is not None and node is not None and not node.data[self._states.index].slot:
                self._states.refill(node, slot)
                cache.tree.changes += 1
                state = None
        if good and full is not None:
            states: dict[str, object] = {}
            if self._windows is not None:
                states["swa"] = _tail(windows, start, end)
            if slot:
                states["recurrent"], state = Snapshot(slot, good * size), None
            tokens = plan.match.tokens[start * page_bytes : end * page_bytes]
            cache.extend(receipt, tokens, full.ids[:good], states)
        left = {} if full is None else {"full": full.ids[good:]}
        swa = parts.get("swa")
        if swa is not None:
            bad = [unit for unit, whole in zip(swa.ids.tolist(), swa.whole, strict=True) if not whole]
            left["swa"] = np.array([*windows.values(), *bad], np.int32)
        if state is not None:
            left["recurrent"] = state.ids
        return left

    def _whole_windows(self, restore: Restore) -> dict[int, int]:
        """Window pages that have arrived, by page."""
        part = restore.parts.get("swa")
        if part is None:
            return {}
        arrived = zip(restore.plan.windows, part.ids.tolist(), part.whole, strict=True)
        return {page: unit for page, unit, whole in arrived if whole}

    def _refill_windows(self, receipt: Receipt, depth: int, windows: dict[int, int]) -> None:
        """Give the nodes on the path what they have lost, from their ends on; what is given leaves `windows`."""
        component, step, size = self._windows, receipt.node, self._cache.page_size
        if component is None or not windows:
            return
        while step is not None and step.parent is not None:
            start, holes = step.parent.end // size, step.data[component.index].holes
            page = start + holes
            while page > start and page - 1 in windows:
                page -= 1
            if page < start + holes:
                component.refill(step, np.array([windows.pop(p) for p in range(page, start + holes)], np.int32))
                self._cache.tree.changes += 1
            step = step.parent


def _tail(windows: dict[int, int], start: int, end: int) -> np.ndarray:
    """The payload for pages [start, end): units from the last missing one on, which leave `windows`."""
    first = end
    while first > start and first - 1 in windows:
        first -= 1
    return np.array([0] * (first - start) + [windows.pop(page) for page in range(first, end)], np.int32)
