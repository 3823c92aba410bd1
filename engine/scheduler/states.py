"""The recurrent states of running sequences: where cache, slots and state pool meet.

Owns who has which slot: a sequence has a live one, changed by every step, and its partner, which holds the
newest state at a page's end until the tree takes it over. What the tree has is never changed: a hit copies
it. Where drafts are verified a live state waits for the number of tokens that are kept, from the forward pass to
the end of the step at most. Ignores pages and tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.cache.prefix_cache import PrefixCache, Receipt
from engine.cache.recurrent import Snapshot
from engine.memory.allocator import PRIVATE, PageAllocator
from engine.memory.replay_ring import Run
from engine.memory.state_pool import StatePool

PER_SEQUENCE = 2


class RecurrentSlots:
    """`replay` brings states forward by what their rings hold (`ModelRunner.replay`)."""

    def __init__(
        self,
        pool: StatePool,
        allocator: PageAllocator,
        cache: PrefixCache,
        replay: Callable[[Sequence[Run]], None],
    ) -> None:
        self.pool = pool
        self.allocator = allocator
        self._cache = cache
        self._replay = replay

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

    def fold(self, lengths: Mapping[int, int]) -> None:
        """Of the tokens that states in these slots wait for, those up to `lengths` are kept: make them part of the
        states, those on the grid on the way included."""
        rings = self.pool.rings
        if rings is not None:
            waiting = {slot: length for slot, length in lengths.items() if rings.reached(slot) is not None}
            self._advance(waiting)
            for slot in waiting:
                rings.close(slot)

    def close(self, slot: int) -> None:
        if self.pool.rings is not None:
            self.pool.rings.close(slot)
        partner = self.pool.unpair(slot)
        self.allocator.free(np.array([slot, partner], np.int32), PRIVATE)

    def snapshot(self, slot: int, start: int, end: int) -> Snapshot | None:
        """The state after `end` tokens, for an insert of those from `start`; None where it was not kept or
        no slot is left to go on with."""
        reached = None if self.pool.rings is None else self.pool.rings.reached(slot)
        if reached is not None and reached < end:
            self._advance({slot: end})
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
        if self.pool.rings is not None:
            self.pool.rings.check()
        held = self.allocator.count(PRIVATE)
        assert held == PER_SEQUENCE * num_sequences, f"{held} private state slots for {num_sequences} sequences"

    def _advance(self, lengths: Mapping[int, int]) -> None:
        """Where a length on the grid lies on the way, the partner is brought there beside the state, from the same
        start."""
        rings, grid = self.pool.rings, self.pool.grid
        assert rings is not None, "no state waits for tokens"
        kept = {slot: length // grid * grid for slot, length in lengths.items()}
        on_grid = {slot: length for slot, length in kept.items() if length > (rings.reached(slot) or 0)}
        self.pool.track(list(on_grid), list(on_grid.values()))
        runs = [run._replace(slot=self.pool.partner(run.slot)) for run in rings.runs(on_grid)]
        runs += rings.advance(lengths)
        if runs:
            self._replay(runs)

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
