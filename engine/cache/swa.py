"""Sliding windows: page ids of layers that look back a bounded number of tokens.

Owns the rule that a hit needs the pages of its trailing window alone, and which pages are given up: a
node's first ones, wherever the node is. What remains of a node is therefore always its end, and where a
hit may end within a node follows from one number. Pages are those of a pool of their own.

Ends of nodes are where hits end: of prompts, of turns, where requests parted. So what lies before a node's last
window goes first, from all nodes, and windows at ends only after it.

A payload is a request's int32 array of PRIVATE ids, 0 for pages it no longer has, all of them before
those it has; None for none at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.cache.component import Component
from engine.cache.handles import live_node
from engine.cache.reclaim import ReclaimQueue
from engine.memory.allocator import PageAllocator, PageState

if TYPE_CHECKING:
    from engine.cache.handles import Receipt
    from engine.cache.node import Node
    from engine.cache.radix_tree import RadixTree

_INT32 = np.dtype(np.int32)
_TREE, _PRIVATE = int(PageState.TREE), int(PageState.PRIVATE)  # members of an enumeration are slower


class WindowPages:
    """A node's ids as bytes, the first `holes` of them 0. `used` is the time of the last release."""

    __slots__ = ("holes", "ids", "used")

    def __init__(self, ids: bytes, holes: int, used: int = 0) -> None:
        self.ids = ids
        self.holes = holes
        self.used = used

    def __len__(self) -> int:
        return len(self.ids) // 4

    @property
    def live(self) -> np.ndarray:
        return np.frombuffer(self.ids, _INT32, offset=4 * self.holes)


class SlidingWindow(Component):
    """`window` counts the token that looks. `allocator` is that of the windowed layers' pool."""

    name = "swa"

    def __init__(self, allocator: PageAllocator, page_size: int, window: int) -> None:
        assert window > 1, f"a window of {window} looks at nothing but the token itself"
        self.allocator = allocator
        self.page_size = page_size
        self.reach = -(-(window - 1) // page_size) * page_size
        """Tokens before a boundary, whole pages, that the token after it needs."""
        self._reach = self.reach // page_size
        self._queue = ReclaimQueue(self._key)
        self._clock = 0

    def evictable(self, tree: RadixTree) -> int:
        """Live pages that no receipt's window reaches; O(nodes under receipts)."""
        held = 0
        for root in (*tree.roots.values(), *tree.doomed):
            nodes: list[Node] = [root]
            for node in nodes:
                nodes.extend(child for child in node.children.values() if child.pins)
            ends: dict[Node, float] = {}
            for node in reversed(nodes[1:]):
                below = [child for child in node.children.values() if child.pins]
                own = node.pins > len(below)
                ends[node] = node.end if own else min(ends[child] for child in below)
                held += self._reached(node, ends[node])
        return self.allocator.count(_TREE) - held

    def trailing(self, receipt: Receipt, count: int) -> np.ndarray:
        """Ids of the last `count` pages before a receipt's end, 0 for those that are gone: int32."""
        parts: list[bytes] = []
        found, step = 0, live_node(receipt)
        while step.parent is not None and found < count:
            data: WindowPages = step.data[self.index]
            parts.append(data.ids)
            found += len(data)
            step = step.parent
        parts.reverse()
        return np.frombuffer(b"".join(parts), _INT32, offset=4 * (found - count))

    # Matching --------------------------------------------------------------------------------

    def accepts(self, node: Node, boundary: int) -> bool:
        index, low, step = self.index, boundary - self.reach, node
        while (parent := step.parent) is not None:
            if holes := step.data[index].holes:
                return parent.end + holes * self.page_size <= low
            if parent.end <= low:
                return True
            step = parent
        return True

    def used(self, node: Node, length: int) -> None:
        low = length - self.reach if length > self.reach else 0
        self._clock = clock = self._clock + 1
        if length and not node.rank:
            self.placed(node)  # it goes before others now
        index, step = self.index, node
        while step is not None and step.end > low:
            step.data[index].used = clock
            step = step.parent

    def _key(self, node: Node) -> tuple[int, int, bool, int]:
        data: WindowPages = node.data[self.index]
        return node.root.age, node.rank, self._surplus(data) <= 0, data.used

    def _surplus(self, data: WindowPages) -> int:
        """Pages before the window at a node's end, if more than 0."""
        return len(data.ids) // 4 - data.holes - self._reach

    def _nearest_end(self, node: Node) -> float:
        """Depth of the shallowest receipt at or below `node`, if its window reaches into it."""
        best = node.end + self.reach
        nodes = [node] if node.pins else []
        for each in nodes:
            if each.end < best:
                below = [child for child in each.children.values() if child.pins]
                if each.pins > len(below):
                    best = each.end
                nodes.extend(below)
        return best

    def _reached(self, node: Node, end: float) -> int:
        """Pages at a node's end that the window before `end` covers."""
        assert node.parent is not None, "roots hold no pages"
        return int(max(0, node.end - max(node.parent.end, end - self.reach))) // self.page_size

    # Structure -------------------------------------------------------------------------------

    def attach(self, payload: np.ndarray | None, start: int, end: int) -> tuple[WindowPages, list[np.ndarray]]:
        offered, holes = self._offer(payload, start, end)
        return WindowPages(offered.tobytes(), holes), [offered[holes:]] if holes < len(offered) else []

    def enter(self, payload: np.ndarray | None, length: int) -> WindowPages:
        if payload is not None and len(payload) == 1 and (page := payload.item(0)):
            self.allocator.hand_over(page)
            return WindowPages(payload.tobytes(), 0)
        return super().enter(payload, length)

    def pieces(self, value: WindowPages) -> list[np.ndarray]:
        return [value.live] if value.holes < len(value) else []

    def grow(
        self, data: WindowPages, payload: np.ndarray | None, start: int, end: int
    ) -> tuple[WindowPages, list[np.ndarray]] | None:
        value, pieces = self.attach(payload, start, end)
        if value.holes and data.holes < len(data):
            return None
        return WindowPages(data.ids + value.ids, data.holes + value.holes, data.used), pieces

    def overlap(
        self, data: WindowPages, payload: np.ndarray | None, start: int, end: int
    ) -> tuple[WindowPages, list[np.ndarray], list[np.ndarray]]:
        if payload is None:
            return data, [], []
        offered, first = self._offer(payload, start, end)
        spare = offered[max(first, data.holes) :]
        surplus = [spare] if len(spare) else []
        if first >= data.holes:
            return data, [], surplus
        taken = offered[first : data.holes]
        ids = data.ids[: 4 * first] + taken.tobytes() + data.ids[4 * data.holes :]
        return WindowPages(ids, first, data.used), [taken], surplus

    def split(self, data: WindowPages, at: int) -> tuple[WindowPages, WindowPages]:
        cut, holes = at // self.page_size, data.holes
        return (
            WindowPages(data.ids[: 4 * cut], min(holes, cut), data.used),
            WindowPages(data.ids[4 * cut :], max(holes - cut, 0), data.used),
        )

    def trim(self, data: WindowPages, keep: int) -> tuple[WindowPages, list[np.ndarray]]:
        cut = keep // self.page_size
        gone = np.frombuffer(data.ids, _INT32, offset=4 * max(cut, data.holes))
        return WindowPages(data.ids[: 4 * cut], min(data.holes, cut), data.used), [gone] if len(gone) else []

    def placed(self, node: Node) -> None:
        """In use now."""
        data: WindowPages = node.data[self.index]
        if not data.used:
            data.used = self._clock
        if 4 * data.holes < len(data.ids):
            self._queue.put(node)

    def demoted(self, node: Node) -> None:
        self.placed(node)

    def removed(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._queue.remove(node)

    def _offer(self, payload: np.ndarray | None, start: int, end: int) -> tuple[np.ndarray, int]:
        """The ids for payload tokens [start, end), and how many are missing before the first."""
        if payload is None:
            count = (end - start) // self.page_size
            return np.zeros(count, np.int32), count
        offered = payload[start // self.page_size : end // self.page_size]
        if offered[0]:
            return offered, 0
        missing = len(offered) - int(np.count_nonzero(offered))
        assert not offered[:missing].any(), "pages of a window may be missing before others only"
        return offered, missing

    # Ownership -------------------------------------------------------------------------------

    def adopt(self, pieces: list[np.ndarray]) -> None:
        self.allocator.transfer(_joined(pieces), _PRIVATE, _TREE)

    def disown(self, pieces: list[np.ndarray]) -> None:
        self.allocator.transfer(_joined(pieces), _TREE, _PRIVATE)

    def discard(self, pieces: list[np.ndarray]) -> None:
        self.allocator.free(_joined(pieces), _PRIVATE)

    def release(self, pieces: list[np.ndarray]) -> None:
        self.allocator.free(_joined(pieces), _TREE)

    def drop(self, values: list[WindowPages]) -> None:
        ids = b"".join([data.ids[4 * data.holes :] for data in values])
        self.allocator.free(np.frombuffer(ids, _INT32), _TREE)

    def evict(self, tree: RadixTree, want: int) -> int:
        """Nodes least recently used first, each from its start, up to what receipts look at."""
        freed, in_use = 0, []
        while freed < want:
            entry = self._queue.pop()
            if entry is None:
                break
            node, key = entry
            data: WindowPages = node.data[self.index]
            if self._key(node) > key:
                self._queue.put(node)
                continue
            live, surplus = len(data) - data.holes, self._surplus(data)
            last = surplus if surplus > 0 else live
            free = min(last, live - self._reached(node, self._nearest_end(node)))
            if free <= 0:
                in_use.append(node)
                continue
            count = min(free, want - freed)
            if tree.spiller is not None:
                tree.spiller.windows(node, data.holes, data.holes + count)
            self.allocator.free(data.live[:count], _TREE)
            holes = data.holes + count
            node.data[self.index] = WindowPages(bytes(4 * holes) + data.ids[4 * holes :], holes, data.used)
            if count < free or (free == last and holes < len(data)):
                self.placed(node)
            elif holes < len(data):
                in_use.append(node)
            tree.changes += 1
            freed += count
        for node in in_use:  # behind everybody, as if used now
            node.data[self.index].used = self._clock
            self.placed(node)
        return freed

    def refill(self, node: Node, ids: np.ndarray) -> None:
        """The last of a node's missing pages are back in these PRIVATE pages, which pass to the tree."""
        data: WindowPages = node.data[self.index]
        holes = data.holes - len(ids)
        self.allocator.transfer(ids, _PRIVATE, _TREE)
        node.data[self.index] = WindowPages(
            bytes(4 * holes) + ids.tobytes() + data.ids[4 * data.holes :], holes, data.used
        )
        self.placed(node)

    def count(self, data: WindowPages) -> int:
        return len(data) - data.holes

    def check(self, held: list[tuple[WindowPages, int]]) -> None:
        ids = [np.zeros(0, np.int32)]
        for data, tokens in held:
            assert len(data) * self.page_size == tokens, "pages do not cover the edge"
            assert data.ids[: 4 * data.holes] == bytes(4 * data.holes), "a page before the holes' end"
            assert data.live.all(), "a hole after the first page"
            ids.append(data.live)
        queued = {id(node.data[self.index]) for node in self._queue.nodes()}
        assert all(id(data) in queued for data, _ in held if self.count(data)), "pages that would never be reclaimed"
        expected = np.flatnonzero(self.allocator.states == _TREE)
        assert np.array_equal(np.sort(np.concatenate(ids)), expected), "the tree's window pages are not those it owns"


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
