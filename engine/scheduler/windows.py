"""The window pages of running sequences: where cache, allocator and window table meet.

Owns the rule of who owns a window page: those of a sequence's first `receipt.length` tokens are the tree's, as far
as it still has them, and what lies after is the sequence's own until the window has moved past it. What a
receipt pins is the window before its own end alone. Ignores full pages and tokens.

The host knows how far a row has come no later than the device: a page that the host's view of a row has left
behind is looked at by no step that is still to run, and whoever writes to it next is ordered behind those that
run now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.cache.prefix_cache import PrefixCache, Receipt
from engine.cache.swa import SlidingWindow
from engine.errors import InvalidRequest, Unsupported
from engine.memory.allocator import PRIVATE, PageState
from engine.memory.kv_pool import KVPool
from engine.memory.window_table import WindowTable
from engine.models.spec import ModelSpec

if TYPE_CHECKING:
    from engine.scheduler.pages import PageManager, Sequence


def paged_window(spec: ModelSpec, wanted: int | str) -> int:
    """The window that has pages of its own where `cache.window_tokens` is `wanted`: the widest, or 0 if windowed
    layers keep all pages, as in models without others, or look at nothing but the token itself."""
    windows = [layer.window for layer in spec.layers]
    widest = max(window or 0 for window in windows)
    return widest if widest > 1 and wanted != 0 and None in windows else 0


def check_window_tokens(window: int, page_size: int, num_tokens: int) -> None:
    """Raises `InvalidRequest` where one sequence alone could run out of window pages: beside the window that its
    receipt pins it has its own, the page that is being written and one more."""
    least = 2 * (-(-(window - 1) // page_size) + 1) * page_size
    if num_tokens < least:
        raise InvalidRequest(
            field="cache.window_tokens",
            expected=f"0 (windowed layers keep every page) or at least {least} for windows of {window}",
            actual=num_tokens,
        )


def refuse_windows(pages: PageManager, what: str) -> None:
    """For what makes batches by hand, from full pages alone."""
    if pages.windows is not None:
        actual = pages.windows.allocator.num_pages * pages.page_size
        raise Unsupported(field="cache.window_tokens", expected=f"0 with {what}", actual=actual)


class WindowPages:
    """`component` is the tree's; `pool` holds the windowed layers under the ids of its allocator."""

    def __init__(self, component: SlidingWindow, cache: PrefixCache, pool: KVPool, table: WindowTable) -> None:
        self.allocator = component.allocator
        self.table = table
        self._component = component
        self._cache = cache
        self._pool = pool
        self._page_size = component.page_size
        self._reach = component.reach // component.page_size
        """Pages before a boundary that a token after it may look at."""

    def open(self, slot: int, receipt: Receipt, spare: int) -> bool:
        """The window before the end of a fresh receipt; False where not a page beyond `spare` could be had."""
        if self.allocator.num_free <= spare and self.available <= spare:
            return False
        end = receipt.length // self._page_size
        held = self._component.trailing(receipt, min(self._reach, end))
        self.table.fill(slot, end - len(held), held)
        return True

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give back what lies behind the window and make room for `num_tokens` in all; False, with nothing taken,
        where there is none."""
        slot = sequence.slot
        self._let_go(sequence)
        end = self.table.ends[slot]
        missing = -(-num_tokens // self._page_size) - end
        if missing <= 0:
            return True
        pages = self._alloc(missing)
        if pages is None:
            return False
        self.table.append(slot, pages)
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens that fit the pages it holds."""
        return self.table.ends[sequence.slot] * self._page_size

    def most(self, sequence: Sequence, num_tokens: int, spare: int) -> int:
        """Up to `num_tokens` in all, as many as there is room for with `spare` pages left; that room is made."""
        slot = sequence.slot
        self._let_go(sequence)
        end = self.table.ends[slot]
        missing = -(-num_tokens // self._page_size) - end
        if missing <= 0:
            return num_tokens
        shortfall = missing + spare - self.allocator.num_free
        if shortfall > 0:
            self._cache.evict(shortfall, "swa")
        pages = self.allocator.alloc(max(0, min(missing, self.allocator.num_free - spare)))
        assert pages is not None, "that many are free"
        self.table.append(slot, pages)
        return min(num_tokens, self.room(sequence))

    def offered(self, sequence: Sequence, first: int, last: int) -> np.ndarray:
        """Payload of an insert of the pages [first, last): 0 for those that are gone."""
        return self.table.pages(sequence.slot, first, last)

    def inserted(self, sequence: Sequence, first: int, last: int) -> None:
        """The tree has taken the pages [first, last), or has kept its own in their place."""
        slot = sequence.slot
        if last - self._reach > self.table.firsts[slot]:
            self.table.advance(slot, last - self._reach)  # before that the receipt holds nothing
        first = max(first, self.table.firsts[slot])
        if first < last:
            self.table.pages_SP[slot, first:last] = self._component.trailing(sequence.receipt, last - first)

    def fork(self, parent: Sequence, slot: int, num_tokens: int, spare: int) -> bool:
        """The parent's window for another slot: the tree's pages are shared, the others copied."""
        self._let_go(parent)
        first = self.table.firsts[parent.slot]
        own = max(first, parent.receipt.length // self._page_size)
        used = max(own, -(-parent.computed // self._page_size))
        count = max(-(-num_tokens // self._page_size), used) - own
        if spare and self.available < count + spare:
            return False
        pages = self._alloc(count)
        if pages is None:
            return False
        self.table.fill(slot, first, self.table.pages(parent.slot, first, own))
        self.table.append(slot, pages)
        sources = self.table.pages(parent.slot, own, used).tolist()
        self._pool.copy_pages(sources, pages[: used - own].tolist(), windowed=True)
        return True

    def close(self, sequence: Sequence) -> None:
        """Give back the sequence's own pages; its receipt is still held."""
        own = self._own(sequence)
        if len(own):
            self.allocator.free(own, PRIVATE)
        self.table.clear(sequence.slot)

    def undo(self, slot: int) -> None:
        """Give back what `fork` put into a slot that will not be used after all."""
        pages = self.table.pages(slot, self.table.firsts[slot], self.table.ends[slot])
        own = pages[self.allocator.states[pages] == PRIVATE]
        if len(own):
            self.allocator.free(own, PRIVATE)
        self.table.clear(slot)

    @property
    def available(self) -> int:
        """Pages that are free or could be evicted."""
        return self.allocator.num_free + self._component.evictable(self._cache.tree)

    def gauges(self) -> dict[str, int]:
        counts = {state.name.lower(): self.allocator.count(state) for state in (PageState.TREE, PageState.PRIVATE)}
        counts |= {"total": self.allocator.num_pages, "free": self.allocator.num_free}
        return {f"window_pages_{name}": count for name, count in counts.items()}

    def check(self, held: list[Sequence]) -> None:
        self.allocator.check()
        self.table.check()
        own = [self._own(sequence) for sequence in held]
        found = np.sort(np.concatenate([np.zeros(0, np.int32), *own]))
        expected = np.flatnonzero(self.allocator.states == PRIVATE)
        assert np.array_equal(found, expected), "private window pages are not those that sequences hold"
        for sequence in held:
            first, end = self.table.firsts[sequence.slot], sequence.receipt.length // self._page_size
            seen = max(0, sequence.computed // self._page_size - self._reach)
            assert first <= seen, f"pages from {first} on are held, those from {seen} on are looked at"
            if first < end:
                kept = self._component.trailing(sequence.receipt, end - first)
                assert np.array_equal(kept, self.table.pages(sequence.slot, first, end)), "a window lost its pages"

    def _own(self, sequence: Sequence) -> np.ndarray:
        slot = sequence.slot
        first = max(self.table.firsts[slot], sequence.receipt.length // self._page_size)
        return self.table.pages(slot, first, max(first, self.table.ends[slot]))

    def _let_go(self, sequence: Sequence) -> None:
        """Forget what lies behind the window of the last whole page, which the next insert ends with."""
        slot = sequence.slot
        first, keep = self.table.firsts[slot], sequence.computed // self._page_size - self._reach
        if keep <= first:
            return
        own = max(first, sequence.receipt.length // self._page_size)
        if keep > own:
            self.allocator.free(self.table.pages(slot, own, keep), PRIVATE)
        self.table.advance(slot, keep)

    def _alloc(self, count: int) -> np.ndarray | None:
        shortfall = count - self.allocator.num_free
        if shortfall > 0 and self._cache.evict(shortfall, "swa") < shortfall:
            return None
        return self.allocator.alloc(count)
