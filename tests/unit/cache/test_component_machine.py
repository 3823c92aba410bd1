"""Random operations on a tree with pages, windows and recurrent states, against dictionaries of prefixes.

The oracle knows nothing of trees: per kind of state, the prefixes whose last page (or end) has one. Where a
hit may end is looked up boundary by boundary. All integrity checks run after every operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache import Namespace, PrefixCache, Receipt
from engine.cache.full import FullAttention
from engine.cache.recurrent import RecurrentState, Snapshot
from engine.cache.swa import SlidingWindow
from engine.memory.allocator import PageAllocator, PageState
from tests.unit.cache.faults import Injected
from tests.unit.cache.machines import run_machine

CODES = st.lists(st.sampled_from((0, 0, 1, 2)), min_size=1, max_size=7)
WHICH = st.integers(0, 7)
SPACE = st.sampled_from(("", "", "", "a"))
REQUEST = st.tuples(SPACE, CODES, WHICH, st.booleans(), st.booleans())


class Faulty:
    """Before a component: its n-th call from now raises."""

    fuse: int | None = None

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Injected


def faulty(kind: type, *methods: str) -> type:
    def wrap(name: str):
        def call(self, *args):
            self._burn()
            return getattr(kind, name)(self, *args)

        return call

    return type(f"Faulty{kind.__name__}", (Faulty, kind), {name: wrap(name) for name in methods})


BOTH = ("enter", "lengthen", "attach", "grow", "overlap", "split", "adopt")
Full, Window = faulty(FullAttention, *BOTH, "discard"), faulty(SlidingWindow, *BOTH, "pin")
Recurrent = faulty(RecurrentState, *BOTH, "pin")


@dataclass(eq=False)
class Space:
    """What a namespace should hold, by prefix."""

    namespace: Namespace
    full: dict[bytes, int] = field(default_factory=dict)
    swa: dict[bytes, int] = field(default_factory=dict)
    recurrent: dict[bytes, int] = field(default_factory=dict)
    flushed: bool = False


@dataclass(eq=False)
class Held:
    receipt: Receipt
    space: Space
    tokens: bytes
    copying: bool


def picture(cache: PrefixCache) -> tuple:
    """Everything that can make a later operation come out differently."""

    def values(data) -> tuple:
        full, *others = data
        shown = [full]
        for value in others:
            slots = {name: getattr(value, name) for name in value.__slots__ if name not in ("used", "credit")}
            shown.append(tuple(map(str, slots.items())))
        return tuple(shown)

    def describe(node) -> tuple:
        children = tuple(describe(child) for child in node.children.values())
        return node.edge, node.end, values(node.data) if node.data else (), node.pins, node.rank, children

    roots = [*cache.tree.roots.values(), *cache.tree.doomed]
    pools = [component.allocator.states.tobytes() for component in cache.components]
    return tuple((root.namespace, root.doomed, describe(root)) for root in roots), pools, cache.stats()


class ComponentMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from((1, 2, 4)),
        window=st.integers(2, 9),
        pages=st.integers(8, 40),
        slots=st.integers(2, 8),
        kinds=st.sampled_from(("swa", "recurrent", "both", "both")),
    )
    def start(self, page_size: int, window: int, pages: int, slots: int, kinds: str) -> None:
        self.page_size, self.page_bytes = page_size, 4 * page_size
        self.full = Full(PageAllocator(pages), page_size)
        self.swa = Window(PageAllocator(pages), page_size, window) if kinds != "recurrent" else None
        self.recurrent = Recurrent(PageAllocator(slots)) if kinds != "swa" else None
        self.components = tuple(each for each in (self.full, self.swa, self.recurrent) if each is not None)
        self.cache = PrefixCache(self.full.allocator, page_size, self.components)
        self.window = window
        self.spaces: dict[Namespace, Space] = {}
        self.flushed: list[Space] = []
        self.held: list[Held] = []
        self.matches: list = []

    # The oracle

    def tokens(self, codes: list[int]) -> bytes:
        kinds = ([0] * self.page_size, [0] * (self.page_size - 1) + [1], [2] * self.page_size)
        return np.array([token for code in codes for token in kinds[code]], np.int32).tobytes()

    def prefixes(self, tokens: bytes) -> list[bytes]:
        return [tokens[:end] for end in range(self.page_bytes, len(tokens) + 1, self.page_bytes)]

    def seen(self, prefix: bytes) -> list[bytes]:
        """The prefixes whose pages hold what the token after `prefix` looks at."""
        length = len(prefix) // 4
        first = max(0, length - (self.window - 1)) // self.page_size
        return self.prefixes(prefix)[first:]

    def expected(self, space: Space | None, tokens: bytes) -> tuple[int, int, str]:
        """Structural and usable depth, and the first component that refuses the structural one."""
        structural, usable, limit = 0, 0, ""
        for prefix in self.prefixes(tokens):
            if space is None or prefix not in space.full:
                break
            structural, limit = len(prefix) // 4, ""
            if self.recurrent is not None and prefix not in space.recurrent:
                limit = "recurrent"
            if self.swa is not None and any(each not in space.swa for each in self.seen(prefix)):
                limit = "swa"
            if not limit:
                usable = structural
        return structural, usable, limit

    def all_spaces(self) -> list[Space]:
        return [*self.spaces.values(), *self.flushed]

    def pinned(self, space: Space, kind: str) -> set[bytes]:
        held = [each for each in self.held if each.space is space and each.tokens]
        if kind == "full":
            return {prefix for each in held for prefix in self.prefixes(each.tokens)}
        if kind == "swa":
            reach = self.swa.reach // self.page_size
            return {prefix for each in held for prefix in self.prefixes(each.tokens)[-reach:]}
        return {each.tokens for each in held if each.copying}

    def forget_freed(self) -> dict[str, int]:
        """Take what the pools have back out of the dictionaries; how much of each kind."""
        gone = {}
        for component in self.components:
            states, kind = component.allocator.states, component.name
            gone[kind] = 0
            for space in self.all_spaces():
                table = getattr(space, kind)
                freed = [prefix for prefix, unit in table.items() if states[unit] == PageState.FREE]
                assert self.pinned(space, kind).isdisjoint(freed), f"{kind} went while it was held"
                gone[kind] += len(freed)
                for prefix in freed:
                    del table[prefix]
        return gone

    # Operations

    @rule(salt=SPACE, codes=CODES, cap=st.booleans())
    def match(self, salt: str, codes: list[int], cap: bool) -> None:
        namespace, tokens = Namespace(epoch=self.cache.current_epoch, salt=salt), self.tokens(codes)
        limit = len(tokens) // 4 - 1 if cap else None
        before = picture(self.cache), self.cache.tree.clock, self.cache.tree.changes
        found = self.cache.match(namespace, tokens, limit)
        assert before == (picture(self.cache), self.cache.tree.clock, self.cache.tree.changes)
        expected = self.expected(self.spaces.get(namespace), tokens[: 4 * limit] if cap else tokens)
        assert (found.structural, found.usable, found.limited_by) == expected
        self.matches = [*self.matches[-3:], found]

    @precondition(lambda self: self.matches)
    @rule(which=WHICH, fuse=st.sampled_from((None, None, 0, 1)))
    def acquire(self, which: int, fuse: int | None) -> None:
        found = self.matches[which % len(self.matches)]
        before = picture(self.cache)
        receipt = self.injecting(fuse, lambda: self.cache.acquire(found))
        if receipt is None:
            assert picture(self.cache) == before
            return
        space = self.spaces.setdefault(found.namespace, Space(found.namespace))
        usable = self.expected(space, found.tokens[: found.num_bytes])[1]
        assert receipt.length == usable
        self.held.append(Held(receipt, space, found.tokens[: 4 * usable], self.recurrent is not None and usable > 0))

    def injecting(self, fuse: int | None, call):
        for component in self.components:
            component.fuse = fuse
        try:
            return call()
        except Injected:
            return None
        finally:
            for component in self.components:
                component.fuse = None

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=6), keep=st.booleans())
    def serve(self, requests: list[tuple[str, list[int], int, bool, bool]], keep: bool) -> None:
        """Requests from match to insert, making room, and to release unless they are kept."""
        for salt, codes, holes, snapshot, copy in requests:
            self.match(salt, codes, True)
            self.acquire(-1, None)
            held = self.held[-1]
            if copy:
                self.copied(-1)
            self._extend(held, self.tokens(codes)[len(held.tokens) :], holes, snapshot, None, evict=True)
            self.sound()
            if not keep:
                self.release(-1, False)
                self.sound()

    @precondition(lambda self: self.held)
    @rule(which=WHICH, codes=CODES, holes=WHICH, snapshot=st.booleans(), fuse=st.sampled_from((None, 0, 1, 2, 3, 5)))
    def extend(self, which: int, codes: list[int], holes: int, snapshot: bool, fuse: int | None) -> None:
        self._extend(self.held[which % len(self.held)], self.tokens(codes), holes, snapshot, fuse)

    def take(self, component, count: int, evict: bool) -> np.ndarray | None:
        short = count - component.allocator.num_free
        if evict and short > 0:
            self.evict(component.name, short)
        return component.allocator.alloc(count)

    def _extend(
        self, held: Held, tokens: bytes, holes: int, snapshot: bool, fuse: int | None, evict: bool = False
    ) -> None:
        count, whole = len(tokens) // self.page_bytes, held.tokens + tokens
        pages, states, taken = self.take(self.full, count, evict), {}, []
        if pages is None:
            return
        taken.append((self.full, pages))
        if self.swa is not None:
            holes = min(holes, max(0, count - self.swa.reach // self.page_size))
            window = self.take(self.swa, count - holes, evict)
            if window is None:
                return self.give_back(taken)
            taken.append((self.swa, window))
            states["swa"] = np.concatenate((np.zeros(holes, np.int32), window))
        if self.recurrent is not None and snapshot and count:
            slot = self.take(self.recurrent, 1, evict)
            if slot is not None:
                taken.append((self.recurrent, slot))
                states["recurrent"] = Snapshot(int(slot[0]), len(tokens) // 4)
        before, length = picture(self.cache), held.receipt.length
        done = self.injecting(fuse, lambda: self.cache.extend(held.receipt, tokens, pages, states))
        if done is None:
            assert picture(self.cache) == before and held.receipt.length == length
            return self.give_back(taken)
        self.record(held, whole, len(held.tokens) // self.page_bytes, pages, states)
        assert held.receipt.length == len(whole) // 4
        assert held.receipt.pages().tolist() == [held.space.full[prefix] for prefix in self.prefixes(whole)]

    def record(self, held: Held, whole: bytes, first: int, pages: np.ndarray, states: dict) -> None:
        space, window = held.space, states.get("swa")
        for place, prefix in enumerate(self.prefixes(whole)[first:]):
            space.full.setdefault(prefix, int(pages[place]))
            if window is not None and window[place]:
                space.swa.setdefault(prefix, int(window[place]))
        if "recurrent" in states:
            space.recurrent.setdefault(whole, states["recurrent"].slot)
        held.copying = held.copying and held.tokens == whole
        held.tokens = whole

    def give_back(self, taken: list) -> None:
        for component, units in taken:
            component.allocator.free(units, PageState.PRIVATE)

    @precondition(lambda self: self.held)
    @rule(which=WHICH, n=st.integers(1, 2))
    def fork(self, which: int, n: int) -> None:
        held = self.held[which % len(self.held)]
        for receipt in self.cache.fork(held.receipt, n):
            self.held.append(Held(receipt, held.space, held.tokens, False))

    @precondition(lambda self: self.held)
    @rule(which=WHICH)
    def copied(self, which: int) -> None:
        held = self.held[which % len(self.held)]
        self.cache.copied(held.receipt)
        held.copying = False

    @precondition(lambda self: self.held)
    @rule(which=WHICH, cold=st.booleans())
    def release(self, which: int, cold: bool) -> None:
        self.cache.release(self.held.pop(which % len(self.held)).receipt, cold)
        self.forget_freed()

    @rule(kind=st.sampled_from(("full", "swa", "swa", "recurrent")), want=st.integers(1, 5))
    def evict(self, kind: str, want: int) -> None:
        component = getattr(self, kind)
        if component is None:
            return
        live = [(space, prefix) for space in self.all_spaces() for prefix in getattr(space, kind)]
        evictable = sum(prefix not in self.pinned(space, kind) for space, prefix in live)
        assert evictable == component.evictable(self.cache.tree)
        freed = self.cache.evict(want, kind)
        gone = self.forget_freed()
        assert freed == gone[kind] == min(want, evictable)
        assert kind == "full" or all(count == 0 for other, count in gone.items() if other != kind)

    @rule(event=st.sampled_from(("bump", "retire", "flush")))
    def change_versions(self, event: str) -> None:
        if event == "bump":
            self.cache.bump_epoch()
        elif event == "retire":
            self.cache.retire(lambda namespace: namespace.salt == "a")
        else:
            self.flushed += self.spaces.values()
            self.spaces = {}
            self.cache.flush()
            self.forget_freed()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        for component in self.components:
            component.allocator.check()
            units = sorted(unit for space in self.all_spaces() for unit in getattr(space, component.name).values())
            assert units == np.flatnonzero(component.allocator.states == PageState.TREE).tolist()
            assert component.allocator.count(PageState.PRIVATE) == 0

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for held in self.held:
            self.cache.release(held.receipt)
        self.cache.check()
        self.cache.reset()
        assert all(each.allocator.num_free == each.allocator.num_pages for each in self.components)


def test_random_operations_agree_with_the_dictionaries() -> None:
    run_machine(ComponentMachine, 20, 40, True)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_random_operations_agree_with_the_dictionaries() -> None:
    run_machine(ComponentMachine, 1000, 100, False)
