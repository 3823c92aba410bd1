"""The order in which unpinned leaves are evicted.

Owns a heap of integer keys (rank, then logical time) beside the map from key to node. Removing a
node only forgets the map entry; the heap drops forgotten keys when they surface, and is rebuilt
when they outnumber half of the live ones. Ignores the tree.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.cache.node import Node

_RANK_SHIFT = 56


class LeafQueue:
    """Holds exactly the unpinned leaves of the roots that use it; `num_roots` counts those."""

    __slots__ = ("_heap", "_nodes", "num_roots")

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._nodes: dict[int, Node] = {}
        self.num_roots = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: Node) -> bool:
        return self._nodes.get(node.queued) is node

    def push(self, node: Node) -> None:
        node.queued = key = node.rank << _RANK_SHIFT | node.stamp
        self._nodes[key] = node
        heappush(self._heap, key)

    def remove(self, node: Node) -> None:
        del self._nodes[node.queued]
        node.queued = 0
        if len(self._heap) > 64 + len(self._nodes) * 3 // 2:
            self._heap = list(self._nodes)
            heapify(self._heap)

    def pop(self) -> Node | None:
        """The node to evict first, taken out; None when empty."""
        while self._heap:
            node = self._nodes.pop(heappop(self._heap), None)
            if node is not None:
                node.queued = 0
                return node
        return None
