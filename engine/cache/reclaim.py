"""The order in which a component gives its units back.

Owns an addressable queue of nodes: a key per node and a heap from which stale keys are dropped as they
surface. Ignores what keys mean and what nodes hold.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cache.node import Node

Key = tuple[Any, ...]


class ReclaimQueue:
    """Nodes by ascending key; equal keys in the order of `put`. A key may have grown since: whoever takes a
    node out looks at it again, so that using a node costs nothing here. Keys start with the root's age and the
    node's rank: what goes first whatever its use."""

    __slots__ = ("_heap", "_puts", "entries")

    def __init__(self) -> None:
        self.entries: dict[Node, tuple[Key, int, Node]] = {}
        """By node, for asking whether it is here and for taking it out; what is in the heap alone is stale."""
        self._heap: list[tuple[Key, int, Node]] = []
        self._puts = 0

    def put(self, node: Node, key: Key) -> None:
        """Add a node, or give it another key."""
        self._puts = count = self._puts + 1
        self.entries[node] = entry = (key, count, node)
        heap = self._heap
        heappush(heap, entry)
        if len(heap) > 64 + 2 * len(self.entries):
            self._heap = list(self.entries.values())
            heapify(self._heap)

    def remove(self, node: Node) -> None:
        self.entries.pop(node, None)

    def pop(self) -> tuple[Node, Key] | None:
        """Take out the first node and its key; None when empty."""
        while self._heap:
            entry = heappop(self._heap)
            node = entry[2]
            if self.entries.get(node) is entry:
                del self.entries[node]
                return node, entry[0]
        return None
