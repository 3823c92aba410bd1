"""The order in which unpinned leaves are evicted.

Owns two sources of leaves. Released leaves carry the newest stamp there is, so a *line* per rank,
an ordered map appended at the end, stays sorted by itself: entering, leaving and being first cost
the same at any size. A node that becomes a leaf because its last child was evicted belongs
somewhere in the middle: such nodes wait in a heap, from which removal only forgets the node and
forgotten keys are dropped when they surface. Ignores the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cache.node import Node

_RANKS = 2
_RANK_SHIFT = 60

ABSENT, IN_LINE, EXPOSED = 0, 1, 2
"""Where a node's `queued` says it is."""


class LeafQueue:
    """Holds exactly the unpinned leaves of the roots that use it; `num_roots` counts those.

    A node's rank and stamp do not change while it is in here.
    """

    __slots__ = ("_exposed", "_heap", "_lines", "num_roots")

    def __init__(self) -> None:
        self._lines: list[OrderedDict[Node, None]] = [OrderedDict() for _ in range(_RANKS)]
        self._heap: list[int] = []
        self._exposed: dict[int, Node] = {}
        self.num_roots = 0

    def __len__(self) -> int:
        return len(self._exposed) + sum(map(len, self._lines))

    def __contains__(self, node: Node) -> bool:
        return node in self._lines[node.rank] or self._exposed.get(_key(node)) is node

    def append(self, node: Node) -> None:
        """Add a leaf whose stamp is newer than all others'."""
        self._lines[node.rank][node] = None
        node.queued = IN_LINE

    def insert(self, node: Node) -> None:
        """Add a leaf with a stamp of any age."""
        key = _key(node)
        self._exposed[key] = node
        heappush(self._heap, key)
        node.queued = EXPOSED

    def remove(self, node: Node) -> None:
        if node.queued == IN_LINE:
            del self._lines[node.rank][node]
        else:
            del self._exposed[_key(node)]
            if len(self._heap) > 64 + 2 * len(self._exposed):
                self._heap = list(self._exposed)
                heapify(self._heap)
        node.queued = ABSENT

    def pop(self) -> Node | None:
        """Take out the leaf to evict first: the lowest rank's least recently used; None when empty."""
        if self._heap:
            node = self._first_exposed()
            if node is not None:
                self.remove(node)
                return node
        for line in self._lines:
            if line:
                node, _ = line.popitem(last=False)
                node.queued = ABSENT
                return node
        return None

    def _first_exposed(self) -> Node | None:
        """The first of the heap, if no line has one to go before it."""
        heap = self._heap
        while heap and heap[0] not in self._exposed:
            heappop(heap)
        if not heap:
            return None
        for line in self._lines:
            if line:
                return self._exposed[heap[0]] if heap[0] < _key(next(iter(line))) else None
        return self._exposed[heap[0]]


def _key(node: Node) -> int:
    return node.rank << _RANK_SHIFT | node.stamp
