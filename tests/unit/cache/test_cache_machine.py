"""Random operations on the prefix cache against a dictionary of page prefixes.

The oracle knows nothing of trees: a namespace is a dictionary from the bytes of a prefix to the page
that holds its last page of tokens. All integrity checks run after every operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache import Namespace, PrefixCache, Receipt
from engine.memory.allocator import PageAllocator, PageState
from tests.unit.cache.faults import FaultyFullAttention, Injected, fingerprint
from tests.unit.cache.machines import run_machine

IDENTITIES = [
    Namespace(),
    Namespace(adapter="a"),
    Namespace(salt="a"),
    Namespace(adapter="a", adapter_rev=1),
    Namespace(adapter="a1"),
]


PAGES = st.lists(st.sampled_from((0, 0, 1, 2)), max_size=7)
FEW_PAGES = st.lists(st.sampled_from((0, 0, 1, 2)), min_size=1, max_size=4)
IDENTITY = st.sampled_from((0, 0, 0, 1, 2, 3, 4))
AGE = st.sampled_from((0, 0, 0, 1))
WHICH = st.integers(0, 7)


@dataclass(eq=False)
class Space:
    """The oracle's namespace: page by prefix. Flushing replaces it; receipts keep the old one."""

    namespace: Namespace
    pages: dict[bytes, int] = field(default_factory=dict)
    flushed: bool = False
    retired: bool = False


@dataclass(eq=False)
class Held:
    receipt: Receipt
    space: Space
    tokens: bytes


class CacheMachine(RuleBasedStateMachine):
    @initialize(page_size=st.integers(1, 4), num_pages=st.integers(6, 60))
    def start(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.page_bytes = 4 * page_size
        self.allocator = PageAllocator(num_pages)
        self.component = FaultyFullAttention(self.allocator, page_size)
        self.cache = PrefixCache(self.allocator, page_size, (self.component,))
        self.spaces: dict[Namespace, Space] = {}
        self.flushed: list[Space] = []
        self.held: list[Held] = []
        self.matches: list = []
        self.private: list[np.ndarray] = []

    # Helpers

    def tokens(self, codes: list[int], ragged: int = 0) -> bytes:
        """One page per code, of few kinds so that prefixes meet, and some tokens of a last page."""
        size = self.page_size
        kinds = ([0] * size, [0] * (size - 1) + [1], [2] * size)
        tokens = [token for code in codes for token in kinds[code]]
        return np.array(tokens + [0] * (ragged % size), np.int32).tobytes()

    def namespace(self, identity: int, age: int) -> Namespace:
        base = IDENTITIES[identity]
        epoch = max(0, self.cache.current_epoch - age)
        return Namespace(epoch=epoch, adapter=base.adapter, adapter_rev=base.adapter_rev, salt=base.salt)

    def prefixes(self, tokens: bytes) -> list[bytes]:
        return [tokens[:end] for end in range(self.page_bytes, len(tokens) + 1, self.page_bytes)]

    def known(self, namespace: Namespace, tokens: bytes, limit: int | None) -> int:
        """Tokens of the longest prefix in the dictionary."""
        space = self.spaces.get(namespace)
        count = 0
        for prefix in self.prefixes(tokens if limit is None else tokens[: 4 * limit]):
            if space is None or prefix not in space.pages:
                break
            count += self.page_size
        return count

    def pinned(self, space: Space) -> set[bytes]:
        return {prefix for held in self.held if held.space is space for prefix in self.prefixes(held.tokens)}

    def all_spaces(self) -> list[Space]:
        return [*self.spaces.values(), *self.flushed]

    def forget_unpinned(self, space: Space) -> int:
        keep = self.pinned(space)
        gone = [prefix for prefix in space.pages if prefix not in keep]
        for prefix in gone:
            del space.pages[prefix]
        return len(gone) * self.page_size

    def pick(self, seed: int) -> Held:
        return self.held[seed % len(self.held)]

    # Operations

    @rule(identity=IDENTITY, age=AGE, codes=PAGES, ragged=st.integers(0, 3), cap=st.booleans())
    def match(self, identity: int, age: int, codes: list[int], ragged: int, cap: bool) -> None:
        namespace, tokens = self.namespace(identity, age), self.tokens(codes, ragged)
        limit = max(0, len(tokens) // 4 - 1) if cap else None
        before = fingerprint(self.cache), self.cache.tree.clock, self.cache.tree.changes
        found = self.cache.match(namespace, tokens, limit)
        assert before == (fingerprint(self.cache), self.cache.tree.clock, self.cache.tree.changes)
        assert found.usable == found.structural == self.known(namespace, tokens, limit)
        assert found.limited_by == ""
        self.matches = [*self.matches[-4:], (found, limit)]

    @rule(identity=IDENTITY, age=AGE, requests=st.lists(FEW_PAGES, min_size=1, max_size=4), keep=st.booleans())
    def serve(self, identity: int, age: int, requests: list[list[int]], keep: bool) -> None:
        """Requests from match to insert, and to release unless they are kept."""
        for codes in requests:
            self._serve(identity, age, codes, keep)
            self.sound()

    def _serve(self, identity: int, age: int, codes: list[int], keep: bool) -> None:
        self.match(identity, age, codes, 0, True)
        self.acquire(0, False)
        held = self.held[-1]
        rest = self.tokens(codes)[len(held.tokens) :]
        short = len(rest) // self.page_bytes - self.allocator.num_free
        if short > 0:
            self.evict(short)
        self._extend(held, rest)
        if not keep:
            self.release(-1, False)

    @precondition(lambda self: self.matches)
    @rule(which=WHICH, late=st.booleans())
    def acquire(self, which: int, late: bool) -> None:
        """`late` takes a match from before other operations."""
        found, limit = self.matches.pop(which % len(self.matches) if late else -1)
        namespace = found.namespace
        expected = self.known(namespace, found.tokens, limit)
        receipt = self.cache.acquire(found)
        space = self.spaces.setdefault(namespace, Space(namespace))
        tokens = found.tokens[: 4 * expected]
        assert receipt.length == expected and receipt.live and receipt.namespace == namespace
        assert receipt.pages().tolist() == [space.pages[prefix] for prefix in self.prefixes(tokens)]
        self.held.append(Held(receipt, space, tokens))

    @precondition(lambda self: self.held)
    @rule(which=WHICH, codes=FEW_PAGES)
    def extend(self, which: int, codes: list[int]) -> None:
        self._extend(self.pick(which), self.tokens(codes))

    def _extend(self, held: Held, tokens: bytes) -> None:
        pages = self.allocator.alloc(len(tokens) // self.page_bytes)
        if pages is None:
            return
        ids = pages.tolist()
        before = len(held.tokens) // self.page_bytes
        done = self.cache.extend(held.receipt, tokens, pages)
        held.tokens += tokens
        canonical, duplicates = [], 0
        for prefix, page in zip(self.prefixes(held.tokens)[before:], ids, strict=True):
            duplicates += prefix in held.space.pages
            canonical.append(held.space.pages.setdefault(prefix, page))
        assert done.pages.tolist() == canonical and done.duplicates == duplicates
        assert (done.start, done.end) == (before * self.page_size, len(held.tokens) // 4)
        assert held.receipt.length == len(held.tokens) // 4
        assert held.receipt.pages().tolist() == [held.space.pages[prefix] for prefix in self.prefixes(held.tokens)]

    @precondition(lambda self: self.held)
    @rule(which=WHICH, codes=FEW_PAGES, fuse=st.integers(0, 4))
    def extend_fails(self, which: int, codes: list[int], fuse: int) -> None:
        """Whatever step fails, all is as before."""
        held, tokens = self.pick(which), self.tokens(codes)
        pages = self.allocator.alloc(len(tokens) // self.page_bytes)
        if pages is None:
            return
        before, length = fingerprint(self.cache), held.receipt.length
        self.component.fuse = fuse
        try:
            self.cache.extend(held.receipt, tokens, pages)
        except Injected:
            assert fingerprint(self.cache) == before and held.receipt.length == length
            self.allocator.free(pages, PageState.PRIVATE)
        else:
            added = self.prefixes(held.tokens + tokens)[len(held.tokens) // self.page_bytes :]
            held.tokens += tokens
            for prefix, page in zip(added, pages.tolist(), strict=True):
                held.space.pages.setdefault(prefix, page)
        finally:
            self.component.fuse = None

    @precondition(lambda self: self.matches)
    @rule()
    def acquire_fails(self) -> None:
        found, limit = self.matches[-1]
        before = fingerprint(self.cache)
        self.component.fuse = 0
        try:
            receipt = self.cache.acquire(found)
        except Injected:
            assert fingerprint(self.cache) == before
            self.matches.pop()
        else:
            assert receipt.length == self.known(found.namespace, found.tokens, limit)
            tokens = found.tokens[: 4 * receipt.length]
            space = self.spaces.setdefault(found.namespace, Space(found.namespace))
            self.held.append(Held(receipt, space, tokens))
        finally:
            self.component.fuse = None

    @precondition(lambda self: self.held)
    @rule(which=WHICH, n=st.integers(0, 3))
    def fork(self, which: int, n: int) -> None:
        held = self.pick(which)
        for receipt in self.cache.fork(held.receipt, n):
            assert receipt.length == held.receipt.length
            self.held.append(Held(receipt, held.space, held.tokens))

    @precondition(lambda self: self.held)
    @rule(which=WHICH, cold=st.booleans())
    def release(self, which: int, cold: bool) -> None:
        held = self.held.pop(which % len(self.held))
        self.cache.release(held.receipt, cold)
        if held.space.flushed:
            self.forget_unpinned(held.space)

    @rule(n=st.integers(1, 3))
    def reserve(self, n: int) -> None:
        """A request's private pages; refused without trace if there are too few."""
        before = fingerprint(self.cache)
        pages = self.allocator.alloc(n)
        if pages is None:
            assert self.allocator.num_free < n and fingerprint(self.cache) == before
        else:
            self.private.append(pages)

    @precondition(lambda self: self.private)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        self.allocator.free(self.private.pop(which % len(self.private)), PageState.PRIVATE)

    @rule(want=st.integers(0, 6))
    def evict(self, want: int) -> None:
        evictable = self.cache.evictable_pages
        assert evictable == sum(len(space.pages) - len(self.pinned(space)) for space in self.all_spaces())
        freed = self.cache.evict(want)
        assert freed == min(want, evictable)
        taken: dict[Namespace, int] = {}
        left: dict[Namespace, int] = {}
        for space in self.all_spaces():
            keep = self.pinned(space)
            gone = [prefix for prefix, page in space.pages.items() if self.allocator.states[page] == PageState.FREE]
            assert keep.isdisjoint(gone)
            for prefix in gone:
                del space.pages[prefix]
            parents = {prefix[: -self.page_bytes] for prefix in space.pages} - {b""}
            assert parents <= space.pages.keys()
            if space.flushed:
                assert not gone
            else:
                taken[space.namespace] = len(gone)
                left[space.namespace] = len(space.pages) - len(keep)
        assert sum(taken.values()) == freed
        ages = {name: -1 if space.retired else name.epoch for name, space in self.spaces.items()}
        newest_taken = max((ages[name] for name in ages if taken[name]), default=-2)
        assert not any(left[name] for name in ages if ages[name] < newest_taken), "a newer epoch went first"

    @rule(event=st.sampled_from(("bump", "bump", "retire", "flush all", "flush stale")), identity=IDENTITY)
    def change_versions(self, event: str, identity: int) -> None:
        if event == "bump":
            epoch = self.cache.current_epoch
            assert self.cache.bump_epoch() == self.cache.current_epoch == epoch + 1
        elif event == "retire":
            self._retire(IDENTITIES[identity])
        else:
            self._flush(event == "flush all")

    def _retire(self, base: Namespace) -> None:
        before = fingerprint(self.cache)[1:]
        chosen = base.adapter, base.adapter_rev, base.salt
        self.cache.retire(lambda namespace: (namespace.adapter, namespace.adapter_rev, namespace.salt) == chosen)
        assert before == fingerprint(self.cache)[1:]
        for root in self.cache.tree.roots.values():
            self.spaces[root.namespace].retired = root.retired

    def _flush(self, everything: bool) -> None:
        expected = 0
        for namespace, space in list(self.spaces.items()):
            if everything or namespace.epoch < self.cache.current_epoch or space.retired:
                del self.spaces[namespace]
                space.flushed = True
                self.flushed.append(space)
                expected += self.forget_unpinned(space)
        assert self.cache.flush("all" if everything else "stale") == expected

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        in_tree = sum(len(space.pages) for space in self.all_spaces())
        assert self.allocator.count(PageState.TREE) == in_tree
        assert self.allocator.count(PageState.PRIVATE) == sum(map(len, self.private))
        stats = self.cache.stats()
        assert stats.tokens == in_tree * self.page_size and stats.receipts == len(self.held)
        assert stats.tokens - stats.pinned_tokens == stats.evictable_tokens
        present = {root.namespace for root in self.cache.tree.roots.values()}
        for namespace, space in list(self.spaces.items()):
            if namespace not in present:
                assert not space.pages
                del self.spaces[namespace]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for held in self.held:
            self.cache.release(held.receipt)
        for pages in self.private:
            self.allocator.free(pages, PageState.PRIVATE)
        self.cache.check()
        assert self.cache.stats().pinned_tokens == 0
        self.cache.reset()
        self.cache.check()
        assert self.allocator.num_free == self.allocator.num_pages


def test_random_operations_agree_with_the_dictionary() -> None:
    run_machine(CacheMachine, 90, 60, True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_operations_agree_with_the_dictionary() -> None:
    run_machine(CacheMachine, 1000, 100, False)
