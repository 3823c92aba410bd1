"""A look at memory that nobody may write.

Owns sums of what cached and free units hold (pages of keys and values, window pages, state slots) and finds
those that have changed though nobody was given them: a write that went astray. It names the unit, whose it is and
the steps between which it happened. For debugging: every look reads all that is cached or free. Ignores what
should have been written (`engine.memory.allocator` knows owners, and only units whose owner let nobody write
are compared).

Shapes: U units, X words of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.cache.component import Component
from engine.cache.node import Node
from engine.cache.prefix_cache import PrefixCache
from engine.errors import Corrupt
from engine.memory.allocator import FREE, TREE, PageAllocator
from engine.memory.kv_pool import KVPool
from engine.memory.state_pool import StatePool

CHUNK_BYTES = 64 << 20
"""Read at once; words are widened to eight bytes."""


class WatchedAllocator(PageAllocator):
    """Notes units that somebody could write since `touched` was last cleared."""

    def __init__(self, num_pages: int) -> None:
        self.touched = np.zeros(num_pages + 1, dtype=bool)
        super().__init__(num_pages)

    def alloc(self, n: int) -> np.ndarray | None:
        ids = super().alloc(n)
        if ids is not None:
            self.touched[ids] = True
        return ids

    def transfer(self, ids: np.ndarray, src: int, dst: int) -> None:
        super().transfer(ids, src, dst)
        if dst not in (FREE, TREE):
            self.touched[ids] = True


@dataclass(slots=True)
class Watch:
    """The units of one component: `storage` gives the tensors [U, ...] that hold them now, None while there is
    no memory; `generation` changes whenever contents change as a whole."""

    component: Component
    allocator: WatchedAllocator
    storage: Callable[[], list[torch.Tensor] | None]
    generation: Callable[[], int]
    sums_U: np.ndarray = field(init=False)
    known_U: np.ndarray = field(init=False)
    seen: int = -1
    """The generation of `sums_U`."""

    def __post_init__(self) -> None:
        self.sums_U = np.zeros(self.allocator.num_pages + 1, np.int64)
        self.known_U = np.zeros(self.allocator.num_pages + 1, bool)

    def changed(self) -> list[int]:
        """Units that hold something else than at the last call, though nobody could write them since."""
        tensors, states = self.storage(), self.allocator.states
        quiet_U = (states == FREE) | (states == TREE)
        quiet_U[0] = False
        if tensors is None:
            self.known_U[:] = False
            return []
        comparable_U = self.known_U & quiet_U & ~self.allocator.touched
        if self.generation() != self.seen:
            comparable_U[:] = False
        units = np.flatnonzero(quiet_U)
        before_U = self.sums_U.copy()
        self.sums_U[units] = unit_sums(tensors, units)
        self.known_U, self.seen = quiet_U, self.generation()
        self.allocator.touched[:] = False
        return np.flatnonzero(comparable_U & (before_U != self.sums_U)).tolist()


class Canary:
    """Looks every `every` steps."""

    def __init__(self, cache: PrefixCache, watches: list[Watch], every: int) -> None:
        self._cache = cache
        self._watches = watches
        self._every = every
        self._steps = 0
        self.looks = 0

    def step(self) -> None:
        """One more step has been taken. Raises `Corrupt` where memory has changed that nobody may write."""
        self._steps += 1
        if self._steps % self._every == 0:
            self.look()

    def look(self) -> None:
        self.looks += 1
        for watch in self._watches:
            units = watch.changed()
            if units:
                since = max(0, self._steps - self._every)
                owners = "; ".join(self._owner(watch, unit) for unit in units[:4])
                raise Corrupt(
                    field="cache.canary",
                    expected=f"{watch.component.name} memory as it was after step {since}",
                    actual=f"{len(units)} changed by step {self._steps}: {owners}",
                )

    def _owner(self, watch: Watch, unit: int) -> str:
        name = f"{watch.component.name} {unit}"
        if watch.allocator.states[unit] == FREE:
            return f"{name}, free"
        index = watch.component.index
        nodes: list[Node] = [*self._cache.tree.roots.values(), *self._cache.tree.doomed]
        for node in nodes:
            nodes.extend(node.children.values())
            if node.parent is None:
                continue
            if any(unit in np.atleast_1d(piece) for piece in watch.component.pieces(node.data[index])):
                tokens = f"{node.parent.end} to {node.end}"
                return f"{name}, cached for tokens {tokens} of {node.root.namespace}, {node.pins} pins"
        return f"{name}, cached"


def make_canary(
    cache: PrefixCache, every: int, pool: KVPool, draft_pool: KVPool | None, states: StatePool | None
) -> Canary | None:
    """None for `every` 0. The components' allocators must be `WatchedAllocator`s otherwise."""
    if not every:
        return None
    watches = []
    for component in cache.components:
        allocator = component.allocator
        assert isinstance(allocator, WatchedAllocator), f"{component.name}: a canary needs to know who could write"
        if component.until_copied:
            assert states is not None, "snapshots lie in a pool"
            watches.append(Watch(component, allocator, *_states(states)))
        else:
            pools = [pool] if draft_pool is None or not component.every_boundary else [pool, draft_pool]
            watches.append(Watch(component, allocator, *_pages(pools, not component.every_boundary)))
    return Canary(cache, watches, every)


def _pages(pools: list[KVPool], windowed: bool) -> tuple[Callable[[], list[torch.Tensor] | None], Callable[[], int]]:
    def storage() -> list[torch.Tensor] | None:
        if any(pool.released for pool in pools):
            return None
        return [pages for pool in pools for pages in pool.pages(windowed)]

    return storage, lambda: sum(pool.generation for pool in pools)


def _states(pool: StatePool) -> tuple[Callable[[], list[torch.Tensor] | None], Callable[[], int]]:
    return lambda: None if pool.released else pool.tensors, lambda: pool.generation


def unit_sums(tensors: list[torch.Tensor], units: np.ndarray) -> np.ndarray:
    """A sum of each unit's words, each times an odd number of its own, modulo 2^64: a single word that changes
    always changes it. int64 by unit."""
    total_U = np.zeros(len(units), np.int64)
    for place, tensor_UX in enumerate(tensors):
        flat_UX = tensor_UX.flatten(1)
        num_bytes = flat_UX[0].numel() * flat_UX.itemsize
        step = max(1, CHUNK_BYTES // (4 * num_bytes))
        for first in range(0, len(units), step):
            ids = torch.from_numpy(units[first : first + step]).to(flat_UX.device)
            words_UX = flat_UX[ids].view(torch.int32 if num_bytes % 4 == 0 else torch.uint8).long()
            odd_X = 2 * torch.arange(words_UX.shape[1], device=flat_UX.device) + 2 * place + 1
            sums_U = (words_UX * (odd_X * 0x9E3779B97F4A7)).sum(1)
            total_U[first : first + step] += sums_U.cpu().numpy()
    return total_U
