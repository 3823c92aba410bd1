"""The pages of running sequences: where cache, allocator and request table meet.

Owns the rule of who owns a page: the first `receipt.length` tokens of a sequence lie in pages
the tree owns and the receipt pins; everything after is private to the sequence. Ignores the
order of work and what tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cache.key import Namespace
from engine.cache.prefix_cache import Match, PrefixCache, Receipt
from engine.cache.recurrent import Snapshot
from engine.memory.allocator import PRIVATE, PageAllocator
from engine.memory.kv_pool import KVPool
from engine.memory.request_table import RequestTable
from engine.scheduler.restores import Restores
from engine.scheduler.states import RecurrentSlots
from engine.scheduler.windows import WindowPages


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens [0, computed) have their state in the slot's pages.

    `publishable` is false once tokens of different policy versions mix in the state: such pages
    never enter the tree.
    """

    slot: int
    receipt: Receipt
    computed: int
    key: int
    publishable: bool = True


class PageManager:
    """Opens, grows, forks, publishes and closes sequences. A `draft_pool` holds a drafter's states under
    the same page ids, and is copied wherever `pool` is. `states` are the slots of recurrent states, `windows`
    the pages of windowed layers where those have their own."""

    def __init__(
        self,
        cache: PrefixCache,
        allocator: PageAllocator,
        table: RequestTable,
        pool: KVPool,
        page_size: int,
        draft_pool: KVPool | None = None,
        states: RecurrentSlots | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        self.cache = cache
        self.allocator = allocator
        self.table = table
        self.pool = pool
        self.draft_pool = draft_pool
        self.page_size = page_size
        self.states = states
        self.windows = windows
        self.restores: Restores | None = None
        """Set where what is evicted is kept on the host."""
        if windows is not None:
            table.windows = windows.table
        if states is not None:
            table.states_S = np.zeros(table.num_slots, dtype=np.int32)
        self._keys = 0
        self._copies: tuple[list[int], list[int]] = [], []
        """Pages that forks wait for, and where they will lie."""

    @property
    def hit_grid(self) -> int:
        """A prefix can be shared up to a multiple of so many tokens."""
        return self.page_size if self.states is None else self.states.pool.grid

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match(self, namespace: Namespace, tokens: np.ndarray, limit: int) -> Match:
        """Read-only; at least one token is always left to compute, so that logits exist."""
        return self.cache.match(namespace, tokens.tobytes(), limit)

    def open(self, match: Match, num_tokens: int, spare: int) -> Sequence | None:
        """Pin a match and reserve private pages up to `num_tokens`; None if there is no room.

        `spare` pages must stay available beside those taken.
        """
        slot = self.table.take()
        if slot is None:
            return None
        receipt = self.cache.acquire(match)
        held = receipt.length // self.page_size
        pages = self._alloc(self.pages_for(num_tokens) - held, spare)
        if pages is not None and self.states is not None and not self._set_state(slot, self.states.open(receipt)):
            self.allocator.free(pages, PRIVATE)
            pages = None
        if pages is not None and self.windows is not None and not self.windows.open(slot, receipt, spare):
            self.allocator.free(pages, PRIVATE)
            self._close_state(slot)
            pages = None
        if pages is None:
            self.cache.release(receipt)
            self.table.give_back(slot)
            return None
        self.table.append(slot, receipt.pages())
        self.table.append(slot, pages)
        return Sequence(slot, receipt, receipt.length, self._next_key())

    def room(self, sequence: Sequence) -> int:
        """Tokens that fit the pages it holds."""
        held = int(self.table.num_pages_S[sequence.slot]) * self.page_size
        return held if self.windows is None else min(held, self.windows.room(sequence))

    def has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        return num_tokens <= self.room(sequence)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` in all; False, with nothing taken, when there is none."""
        return (self.windows is None or self.windows.reserve(sequence, num_tokens)) and self._reserve(
            sequence, num_tokens
        )

    def reserve_together(self, slots_B: np.ndarray, num_tokens_B: np.ndarray) -> list[int]:
        """Make room for so many tokens of each of these slots, if there is any for all. Returns the places of those
        that may lack some, which `reserve` says of each."""
        if self.windows is not None:
            return list(range(len(slots_B)))
        held_B = self.table.num_pages_S[slots_B]
        missing_B = -(-num_tokens_B // self.page_size) - held_B
        places = np.flatnonzero(missing_B > 0)
        if not len(places):
            return []
        missing_M = missing_B[places]
        pages = self._alloc(int(missing_M.sum()), 0)
        if pages is None:
            return places.tolist()
        self.table.append_each(slots_B[places], missing_M, pages)
        return []

    def prefillable(self, sequence: Sequence, num_tokens: int, spare: int) -> int:
        """How many of the next `num_tokens` tokens can be computed, whose pages are held, with `spare` window pages
        left to others."""
        if self.windows is None:
            return num_tokens
        return self.windows.most(sequence, sequence.computed + num_tokens, spare) - sequence.computed

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        held = int(self.table.num_pages_S[sequence.slot])
        missing = self.pages_for(num_tokens) - held
        if missing <= 0:
            return True
        pages = self._alloc(missing, 0)
        if pages is None:
            return False
        self.table.append(sequence.slot, pages)
        return True

    def publish(self, sequence: Sequence, tokens: np.ndarray, keep_state: bool = True) -> None:
        """Hand every full computed page to the tree. Where the tree already has the same tokens
        its pages replace ours, which are freed. With `keep_state` the newest recurrent state on the grid goes
        with them, if it was kept."""
        start = sequence.receipt.length
        end = sequence.computed // self.page_size * self.page_size
        if not sequence.publishable or end <= start:
            return
        if keep_state and self.states is not None and self.table.states_S is not None:
            depth = end // self.states.pool.grid * self.states.pool.grid
            snapshot = None
            if depth > start:
                snapshot = self.states.snapshot(int(self.table.states_S[sequence.slot]), start, depth)
            if snapshot is not None:
                self._insert(sequence, tokens, depth, snapshot)
        self._insert(sequence, tokens, end)

    def _insert(self, sequence: Sequence, tokens: np.ndarray, end: int, snapshot: Snapshot | None = None) -> None:
        start = sequence.receipt.length
        first, last = start // self.page_size, end // self.page_size
        if first == last:
            return
        pages = self.table.pages(sequence.slot, first, last)
        states: dict[str, object] = {} if snapshot is None else {"recurrent": snapshot}
        if self.windows is not None:
            states["swa"] = self.windows.offered(sequence, first, last)
        extension = self.cache.extend(sequence.receipt, tokens[start:end].tobytes(), pages, states)
        self.table.pages_SP[sequence.slot, first:last] = extension.pages
        if self.windows is not None:
            self.windows.inserted(sequence, first, last)

    def fold(self, sequences: list[Sequence]) -> None:
        """The recurrent states of sequences that verified drafts become those after their `computed` tokens."""
        if self.states is not None and self.table.states_S is not None:
            self.states.fold({int(self.table.states_S[s.slot]): s.computed for s in sequences})

    def fork(self, parent: Sequence, num_tokens: int, spare: int) -> Sequence | None:
        """A sequence that shares the parent's tree pages and owns a copy of the page after them, once `copy_forked`
        has been called: before anything else is launched, and before pages are given back.

        The parent must have been published, so that less than one page is left to copy.
        """
        whole = parent.receipt.length // self.page_size
        assert parent.computed - parent.receipt.length < self.page_size or not parent.publishable
        slot = self.table.take()
        if slot is None:
            return None
        pages = self._alloc(self.pages_for(num_tokens) - whole, spare)
        if pages is None:
            self.table.give_back(slot)
            return None
        if self.windows is not None and not self.windows.fork(parent, slot, num_tokens, spare):
            self.allocator.free(pages, PRIVATE)
            self.table.give_back(slot)
            return None
        if self.states is not None and self.table.states_S is not None:
            live = self.states.fork(int(self.table.states_S[parent.slot]))
            if not self._set_state(slot, live):
                self.allocator.free(pages, PRIVATE)
                if self.windows is not None:
                    self.windows.undo(slot)
                self.table.give_back(slot)
                return None
        (receipt,) = self.cache.fork(parent.receipt, 1)
        self.table.append(slot, self.table.pages(parent.slot, 0, whole))
        self.table.append(slot, pages)
        own = self.pages_for(parent.computed) - whole
        if own > 0:
            sources, targets = self._copies
            sources += self.table.pages(parent.slot, whole, whole + own).tolist()
            targets += pages[:own].tolist()
        return Sequence(slot, receipt, parent.computed, self._next_key(), parent.publishable)

    def copy_forked(self) -> None:
        """Copy what forks own, of all of them together: each layer is a launch."""
        (sources, targets), self._copies = self._copies, ([], [])
        self.pool.copy_pages(sources, targets)
        if self.draft_pool is not None:
            self.draft_pool.copy_pages(sources, targets)

    def close(self, sequence: Sequence, tokens: np.ndarray | None, cold: bool = False) -> None:
        """Give everything back. With `tokens`, what was computed is published first."""
        if tokens is not None:
            self.publish(sequence, tokens)
        private = self.table.pages(sequence.slot, sequence.receipt.length // self.page_size)
        if len(private):
            self.allocator.free(private, PRIVATE)
        if self.windows is not None:
            self.windows.close(sequence)
        self.cache.release(sequence.receipt, cold=cold)
        self._close_state(sequence.slot)
        self.table.give_back(sequence.slot)

    @property
    def available(self) -> int:
        """Pages that are free or could be evicted."""
        return self.allocator.num_free + self.cache.evictable_pages

    def check(self, held: list[Sequence]) -> None:
        """Assert that every page, pin and slot is accounted for, where `held` are all open sequences."""
        self.allocator.check()
        self.cache.check()
        self.table.check()
        assert len(held) == self.table.num_slots - self.table.num_free, "a slot is held by nobody"
        private = sum(int(self.table.num_pages_S[s.slot]) - s.receipt.length // self.page_size for s in held)
        assert private == self.allocator.count(PRIVATE), "a private page is held by nobody"
        if self.states is not None:
            self.states.check(len(held))
        if self.windows is not None:
            self.windows.check(held)
        if self.restores is not None:
            self.restores.check()

    def _alloc(self, count: int, spare: int) -> np.ndarray | None:
        if count <= 0:
            return np.empty(0, dtype=np.int32)
        if spare and self.available < count + spare:
            return None
        shortfall = count - self.allocator.num_free
        if shortfall > 0 and self.cache.evict(shortfall) < shortfall:
            return None
        return self.allocator.alloc(count)

    def _set_state(self, slot: int, live: int | None) -> bool:
        """Give a sequence its live state; False where there was no room for one."""
        if live is None or self.table.states_S is None:
            return False
        self.table.states_S[slot] = live
        return True

    def _close_state(self, slot: int) -> None:
        if self.states is not None and self.table.states_S is not None:
            self.states.close(int(self.table.states_S[slot]))
            self.table.states_S[slot] = 0

    def _next_key(self) -> int:
        self._keys += 1
        return self._keys
