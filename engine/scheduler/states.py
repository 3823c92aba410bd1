"""The recurrent states of running sequences: where cache, slots and state pool meet.

Owns who has which slot: a sequence has a live one, changed by every step, and its partner, which holds the
newest state at a page's end until the tree takes it over. What the tree has is never changed: a hit copies
it. Ignores pages and tokens.
"""

from __future__ import annotations

import numpy as np

from engine.cache.prefix_cache import PrefixCache, Receipt
from engine.cache.recurrent import Snapshot
from engine.memory.allocator import PRIVATE, PageAllocator
from engine.memory.state_pool import StatePool

PER_SEQUENCE = 2


class RecurrentSlots:
    def __init__(self, pool: StatePool, allocator: PageAllocator, cache: PrefixCache) -> None:
        self.pool = pool
        self.allocator = allocator
        self._cache = cache

    def open(self, receipt: Receipt) -> int | None:
        """A live slot with the state that a fresh receipt covers; None if there is no room."""
        slot = self._take_pair()
        if slot is None:
            return None
        if receipt.length:
            self.pool.copy(self._cache.snapshot(receipt), slot)
            self._cache.copied(receipt)
        else:
            self.pool.clear(slot)
        return slot

    def fork(self, parent: int) -> int | None:
        """A live slot with a copy of the parent's state."""
        slot = self._take_pair()
        if slot is not None:
            self.pool.copy(parent, slot)
        return slot

    def close(self, slot: int) -> None:
        partner = self.pool.unpair(slot)
        self.allocator.free(np.array([slot, partner], np.int32), PRIVATE)

    def snapshot(self, slot: int, start: int, end: int) -> Snapshot | None:
        """The state after `end` tokens, for an insert of those from `start`; None where it was not kept or
        no slot is left to go on with."""
        if self.pool.tracked(slot) != end:
            return None
        fresh = self._take(1)
        if fresh is None:
            return None
        given = self.pool.unpair(slot)
        self.pool.pair(slot, int(fresh[0]))
        return Snapshot(given, end - start)

    def check(self, num_sequences: int) -> None:
        self.allocator.check()
        held = self.allocator.count(PRIVATE)
        assert held == PER_SEQUENCE * num_sequences, f"{held} private state slots for {num_sequences} sequences"

    def _take_pair(self) -> int | None:
        slots = self._take(PER_SEQUENCE)
        if slots is None:
            return None
        slot, partner = slots.tolist()
        self.pool.pair(slot, partner)
        return slot

    def _take(self, count: int) -> np.ndarray | None:
        shortfall = count - self.allocator.num_free
        if shortfall > 0 and self._cache.evict(shortfall, "recurrent") < shortfall:
            return None
        return self.allocator.alloc(count)
