"""Windows and recurrent states, one rule at a time."""

from __future__ import annotations

import numpy as np

from engine.cache import Namespace, PrefixCache, Receipt
from engine.cache.full import FullAttention
from engine.cache.recurrent import RecurrentState, Snapshot
from engine.cache.swa import SlidingWindow
from engine.memory.allocator import PageAllocator, PageState

PAGE, WINDOW = 4, 9
BASE = Namespace()


def ids(*tokens: range | int) -> bytes:
    flat = [token for part in tokens for token in (part if isinstance(part, range) else [part])]
    return np.array(flat, np.int32).tobytes()


class Bench:
    def __init__(self) -> None:
        self.full, self.window, self.slots = PageAllocator(200), PageAllocator(200), PageAllocator(20)
        self.swa, self.states = SlidingWindow(self.window, PAGE, WINDOW), RecurrentState(self.slots)
        parts = (FullAttention(self.full, PAGE), self.swa, self.states)
        self.cache = PrefixCache(self.full, PAGE, parts)

    def serve(self, tokens: bytes, snapshot: bool = True, holes: int = 0, keep: bool = False) -> Receipt:
        receipt = self.cache.acquire(self.cache.match(BASE, tokens))
        self.cache.copied(receipt)
        rest = tokens[4 * receipt.length :]
        count = len(rest) // (4 * PAGE)
        pages, window = self.full.alloc(count), self.window.alloc(count - holes)
        assert pages is not None and window is not None
        states: dict = {"swa": np.concatenate((np.zeros(holes, np.int32), window))}
        if snapshot and count:
            slot = self.slots.alloc(1)
            assert slot is not None
            states["recurrent"] = Snapshot(int(slot[0]), len(rest) // 4)
        self.cache.extend(receipt, rest, pages, states)
        if not keep:
            self.cache.release(receipt)
        self.cache.check()
        return receipt

    def hit(self, tokens: bytes) -> tuple[int, int, str]:
        found = self.cache.match(BASE, tokens)
        return found.structural, found.usable, found.limited_by


def test_a_window_gives_up_what_lies_before_it_first() -> None:
    bench = Bench()
    context = ids(range(40))
    kept = bench.serve(context, keep=True)
    assert bench.swa.reach == 8 and bench.swa.evictable(bench.cache.tree) == 8
    assert bench.cache.evict(100, "swa") == 8, "what a receipt looks at stays"
    assert bench.hit(context) == (40, 40, "")
    bench.cache.release(kept)
    assert bench.cache.evict(1, "swa") == 1
    assert bench.hit(context) == (40, 0, "swa"), "one page of the trailing window is gone"
    bench.serve(context)
    assert bench.hit(context) == (40, 40, ""), "computed again, and taken over where it was missing"
    assert bench.window.count(PageState.TREE) == 10


def test_windows_at_ends_of_nodes_outlive_what_lies_before_them() -> None:
    """However long ago an end was used: pages inside a prompt's edge go first, and the ends last, oldest first."""
    bench = Bench()
    old, new = ids(range(24)), ids(range(100, 140))
    bench.serve(old)
    bench.serve(new)
    assert bench.cache.evict(12, "swa") == 12 and bench.window.count(PageState.TREE) == 4
    assert bench.hit(old) == (24, 24, "") and bench.hit(new) == (40, 40, "")
    assert bench.cache.evict(1, "swa") == 1
    assert bench.hit(old) == (24, 0, "swa") and bench.hit(new) == (40, 40, "")
    kept = bench.serve(new, keep=True)
    pages = bench.swa.trailing(kept, 3)
    assert pages[0] == 0 and np.all(pages[1:] == np.flatnonzero(bench.window.states == PageState.TREE)[-2:])
    bench.cache.release(kept)


def test_what_a_receipt_has_moved_on_from_can_be_given_up() -> None:
    """Pages that were in use when others of their node went are found again, though nobody releases them."""
    bench = Bench()
    kept = bench.serve(ids(range(16)), keep=True)
    assert bench.cache.evict(9, "swa") == 2, "the last two are looked at"
    tokens, pages, window = ids(range(100, 116)), bench.full.alloc(4), bench.window.alloc(4)
    assert pages is not None and window is not None
    bench.cache.extend(kept, tokens, pages, {"swa": window})
    assert bench.cache.evict(9, "swa") == 4, "six are left, and the receipt has moved on to the last two"
    bench.cache.release(kept)


def test_a_second_divergence_hits_at_the_branch_point() -> None:
    """The first visitor who diverges is told where; a state kept there serves the next one."""
    bench = Bench()
    prompt = ids(range(24))
    bench.serve(prompt + ids(range(100, 108)))
    assert bench.hit(prompt + ids(range(200, 208))) == (24, 0, "recurrent")
    bench.serve(prompt)
    bench.serve(prompt + ids(range(200, 208)))
    assert bench.hit(prompt + ids(range(300, 308))) == (24, 24, "")
    assert bench.hit(prompt + ids(range(100, 108))) == (32, 32, ""), "a split keeps a state at its depth"


def test_states_go_by_what_they_save_and_when_they_were_used() -> None:
    bench = Bench()
    deep, shallow = ids(range(64)), [ids(range(100 * n, 100 * n + 8)) for n in range(1, 12)]
    bench.serve(deep)
    for context in shallow[:8]:
        bench.serve(context)
    assert bench.cache.evict(7, "recurrent") == 7
    assert [bench.hit(context)[1] for context in shallow[:8]] == [0] * 7 + [8], "equal ones by their last use"
    assert bench.hit(deep) == (64, 64, ""), "worth eight of the others"
    for context in shallow[8:]:
        bench.serve(context)
    for _ in range(10):
        for context in shallow[8:]:
            bench.serve(context)
        bench.cache.evict(3, "recurrent")
    assert bench.hit(deep)[1] == 0, "not for ever: others have been used since"


def test_a_state_is_held_until_it_is_copied() -> None:
    bench = Bench()
    context = ids(range(16))
    bench.serve(context)
    receipt = bench.cache.acquire(bench.cache.match(BASE, context))
    assert bench.states.evictable(bench.cache.tree) == 0 and bench.cache.evict(1, "recurrent") == 0
    (fork,) = bench.cache.fork(receipt, 1)
    bench.cache.copied(receipt)
    assert bench.cache.evict(1, "recurrent") == 1, "neither the receipt nor its fork has a use for it"
    for each in (receipt, fork):
        bench.cache.release(each)
    bench.cache.check()


def test_what_was_filled_in_since_a_match_is_used() -> None:
    bench = Bench()
    context = ids(range(16))
    bench.serve(context, holes=2)
    assert bench.cache.evict(2, "swa") == 2
    found = bench.cache.match(BASE, context)
    assert (found.structural, found.usable) == (16, 0)
    bench.serve(context)
    receipt = bench.cache.acquire(found)
    assert receipt.length == 16, "nothing was added to the tree but pages of a window"
    bench.cache.release(receipt)
