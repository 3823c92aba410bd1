"""Other kinds of state plug in behind the same tree: a sliding window and snapshots, as small models.

Both have ids of their own. The window needs its last tokens' states present, and loses pages
anywhere (tombstones); a snapshot exists at node ends only. The oracle is a dictionary of prefixes.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from engine.cache import Namespace, PrefixCache
from engine.cache.component import Component
from engine.cache.full import FullAttention
from engine.memory.allocator import PageAllocator, PageState

PAGE, WINDOW = 2, 4
BASE = Namespace()


class OwnIds(Component):
    """Ids from an allocator of its own; 0 stands for nothing."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(500)
        self.fail = False
        self.held = 0

    def pin(self, node, length):
        if self.fail:
            raise RuntimeError("no room")
        self.held += 1
        return node, length

    def unpin(self, held):
        self.held -= 1

    def adopt(self, pieces):
        self.allocator.transfer(np.array(pieces, np.int32), PageState.PRIVATE, PageState.TREE)

    def disown(self, pieces):
        self.allocator.transfer(np.array(pieces, np.int32), PageState.TREE, PageState.PRIVATE)

    def discard(self, pieces):
        self.allocator.free(np.array(pieces, np.int32), PageState.PRIVATE)

    def release(self, pieces):
        self.allocator.free(np.array(pieces, np.int32), PageState.TREE)

    def drop(self, values):
        self.release([piece for value in values for piece in self.ids(value)])

    def ids(self, data) -> list[int]:
        raise NotImplementedError

    def without(self, data, piece):
        raise NotImplementedError

    def evict(self, tree, want):
        """In tree order: which goes first is no matter here."""
        index, freed = tree.components.index(self), 0
        stack = list(tree.roots.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            for piece in self.ids(node.data[index]) if node.parent is not None and not node.pins else ():
                if freed < want:
                    node.data[index] = self.without(node.data[index], piece)
                    self.release([piece])
                    tree.changes += 1
                    freed += 1
        return freed

    def count(self, data):
        return len(self.ids(data))

    def check(self, held):
        ids = sorted(piece for data, _ in held for piece in self.ids(data))
        assert ids == np.flatnonzero(self.allocator.states == PageState.TREE).tolist()


class Window(OwnIds):
    """A value is a tuple of one id per page; a payload a list of them."""

    name = "window"

    def begin(self):
        return math.inf

    def step(self, state, data, start, end, whole):
        first = start + PAGE
        for k, page in enumerate(data[: (end - start) // PAGE]):
            state = state + PAGE if page else 0
            if state < min(start + (k + 1) * PAGE, WINDOW):
                first = start + (k + 2) * PAGE
        return state, first

    def attach(self, payload, start, end):
        value = tuple(payload[start // PAGE : end // PAGE])
        return value, list(value)

    def grow(self, data, payload, start, end):
        value, pieces = self.attach(payload, start, end)
        return data + value, pieces

    def overlap(self, data, payload, start, end):
        offered = payload[start // PAGE : end // PAGE]
        taken = [new for old, new in zip(data, offered, strict=True) if not old]
        spare = [new for old, new in zip(data, offered, strict=True) if old]
        return tuple(old or new for old, new in zip(data, offered, strict=True)), taken, spare

    def split(self, data, at):
        return data[: at // PAGE], data[at // PAGE :]

    def trim(self, data, keep):
        return data[: keep // PAGE], [page for page in data[keep // PAGE :] if page]

    def ids(self, data):
        return [page for page in data if page]

    def without(self, data, piece):
        return tuple(0 if page == piece else page for page in data)


class Snapshots(OwnIds):
    """A value is the id at the node's end; a payload that of the insert's end and its length."""

    name = "snapshot"

    def step(self, state, data, start, end, whole):
        return state, end if whole and data else end + 1

    def attach(self, payload, start, end):
        return payload[0], self.ids(payload[0])

    def grow(self, data, payload, start, end):
        return None if data else self.attach(payload, start, end)

    def overlap(self, data, payload, start, end):
        piece, total = payload
        if not piece or end != total:
            return data, [], []
        return (data, [], [piece]) if data else (piece, [piece], [])

    def split(self, data, at):
        return 0, data

    def trim(self, data, keep):
        return 0, self.ids(data)

    def ids(self, data):
        return [data] if data else []

    def without(self, data, piece):
        return 0


class Bench:
    """A cache with the three components, and the dictionaries that say what it should hold."""

    def __init__(self, rng: random.Random, kinds: tuple[str, ...]) -> None:
        self.rng = rng
        self.full = PageAllocator(300)
        self.extra = {kind.name: kind() for kind in (Window, Snapshots) if kind.name in kinds}
        self.cache = PrefixCache(self.full, PAGE, (FullAttention(self.full, PAGE), *self.extra.values()))
        self.pages: dict[str, dict[bytes, int]] = {"full": {}, "window": {}, "snapshot": {}}

    def tokens(self) -> bytes:
        pages = [self.rng.choice(((0, 0), (0, 1), (2, 2))) for _ in range(self.rng.randrange(1, 7))]
        return np.array(list(itertools.chain(*pages)), np.int32).tobytes()

    def expected(self, tokens: bytes) -> tuple[int, int]:
        structural = usable = 0
        for end in range(PAGE, len(tokens) // 4 + 1, PAGE):
            if tokens[: 4 * end] not in self.pages["full"]:
                break
            structural = end
            needed = range(end, max(0, end - WINDOW), -PAGE)
            window = "window" not in self.extra or all(tokens[: 4 * p] in self.pages["window"] for p in needed)
            if window and ("snapshot" not in self.extra or tokens[: 4 * end] in self.pages["snapshot"]):
                usable = end
        return structural, usable

    def ids(self, name: str, n: int) -> list[int]:
        pages = self.extra[name].allocator.alloc(n)
        assert pages is not None
        return pages.tolist()

    def serve(self) -> None:
        tokens = self.tokens()
        found = self.cache.match(BASE, tokens)
        assert (found.structural, found.usable) == self.expected(tokens)
        assert (found.limited_by in self.extra) == (found.usable < found.structural)
        receipt = self.cache.acquire(found)
        begin = receipt.length
        assert begin == found.usable
        rest = tokens[4 * begin :]
        ends = range(begin + PAGE, len(tokens) // 4 + 1, PAGE)
        pages = self.full.alloc(len(ends))
        assert pages is not None
        states = {}
        if "window" in self.extra:
            states["window"] = self.ids("window", len(ends))
        if "snapshot" in self.extra:
            piece = self.ids("snapshot", 1)[0] if ends and self.rng.random() < 0.6 else 0
            states["snapshot"] = piece, len(rest) // 4
        before = self.contents()
        if self.rng.random() < 0.3 and ends and self.extra:
            failing = self.rng.choice(list(self.extra.values()))
            failing.fail = True
            with pytest.raises(RuntimeError):
                self.cache.extend(receipt, rest, pages, states)
            failing.fail = False
            assert self.contents() == before and receipt.length == begin
            self.cache.check()
        self.cache.extend(receipt, rest, pages, states)
        for k, end in enumerate(ends):
            self.pages["full"].setdefault(tokens[: 4 * end], int(pages[k]))
            if "window" in states:
                self.pages["window"].setdefault(tokens[: 4 * end], states["window"][k])
        if states.get("snapshot", (0, 0))[0]:
            self.pages["snapshot"].setdefault(tokens, states["snapshot"][0])
        forks = self.cache.fork(receipt, 2)
        for each in (receipt, *forks):
            self.cache.release(each)

    def contents(self) -> list[bytes]:
        return [self.full.states.tobytes(), *(each.allocator.states.tobytes() for each in self.extra.values())]

    def evict(self, name: str) -> None:
        before = self.cache.evict(self.rng.randrange(4), name)
        gone = 0
        for kind, held in self.pages.items():
            allocator = self.full if kind == "full" else self.extra[kind].allocator if kind in self.extra else None
            for prefix in [prefix for prefix, page in held.items() if allocator and not allocator.states[page]]:
                del held[prefix]
                gone += kind == name
                assert name == "full" or kind == name, "nothing else goes with it"
        assert gone == before

    def check(self) -> None:
        self.cache.check()
        for each in self.extra.values():
            each.allocator.check()
            assert each.held == 0 and each.allocator.count(PageState.PRIVATE) == 0
            assert each.allocator.count(PageState.TREE) == len(self.pages[each.name])
        assert self.full.count(PageState.TREE) == len(self.pages["full"])


@pytest.mark.parametrize("kinds", [("window",), ("snapshot",), ("window", "snapshot")], ids="+".join)
def test_hits_end_where_every_component_agrees(kinds: tuple[str, ...]) -> None:
    limited = 0
    for seed in range(8):
        bench = Bench(random.Random(seed), kinds)
        for _ in range(40):
            if bench.rng.random() < 0.7:
                bench.serve()
            else:
                bench.evict(bench.rng.choice(("full", *kinds)))
            bench.check()
            structural, usable = bench.expected(bench.tokens())
            limited += usable < structural
        bench.cache.reset()
        assert bench.full.num_free == 300
        assert all(each.allocator.num_free == 500 for each in bench.extra.values())
    assert limited > 20, "the components had to matter"
