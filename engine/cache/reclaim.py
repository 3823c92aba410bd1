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
    node out looks at it again, so that using a node costs nothing here."""

    __slots__ = ("_entries", "_heap", "_puts")

    def __init__(self) -> None:
        self._entries: dict[Node, tuple[Key, int]] = {}
        self._heap: list[tuple[Key, int, Node]] = []
        self._puts = 0

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def put(self, node: Node, key: Key) -> None:
        """Add a node, or give it another key."""
        self._puts += 1
        self._entries[node] = key, self._puts
        heappush(self._heap, (key, self._puts, node))
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(key, count, node) for node, (key, count) in self._entries.items()]
            heapify(self._heap)

    def remove(self, node: Node) -> None:
        self._entries.pop(node, None)

    def pop(self) -> tuple[Node, Key] | None:
        """Take out the first node and its key; None when empty."""
        while self._heap:
            key, count, node = heappop(self._heap)
            if self._entries.get(node) == (key, count):
                del self._entries[node]
                return node, key
        return None


def age(node: Node) -> tuple[int, int]:
    """What goes first whatever its use: retired roots, earlier epochs, what was released as cold."""
    root = node.root
    return -1 if root.retired else root.namespace.epoch, node.rank
