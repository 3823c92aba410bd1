"""The order in which a component gives its units back.

Owns an addressable queue of nodes: a key per node and a heap from which stale keys are dropped as they
surface. Ignores what keys mean and what nodes hold.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cache.node import Node

Key = tuple[Any, ...]

WAITING = 256
"""Nodes that wait at most: sorting them in takes well below a millisecond."""


class ReclaimQueue:
    """Nodes by ascending `key(node)`. Requests put nodes in far more often than anybody takes one out, so what was
    put in waits, and its key is looked up once when somebody comes or many wait. A key may have grown since: whoever
    takes a node out looks at it again, so that using a node costs nothing here. One that has become less is put in
    again. Keys start with the root's age and the node's rank: what goes first whatever its use."""

    __slots__ = ("_entries", "_heap", "_key", "_puts", "_waiting")

    def __init__(self, key: Callable[[Node], Key]) -> None:
        self._key = key
        self._entries: dict[Node, tuple[Key, int, Node]] = {}
        """Of those sorted in, by node; what is in the heap alone is stale."""
        self._heap: list[tuple[Key, int, Node]] = []
        self._waiting: dict[Node, None] = {}
        self._puts = 0

    def nodes(self) -> list[Node]:
        """Everybody in here."""
        return [*self._entries, *self._waiting]

    def put(self, node: Node) -> None:
        """Add a node, or look its key up anew."""
        waiting = self._waiting
        waiting[node] = None
        if len(waiting) > WAITING:
            self._sort_in()

    def remove(self, node: Node) -> None:
        self._waiting.pop(node, None)
        self._entries.pop(node, None)

    def pop(self) -> tuple[Node, Key] | None:
        """Take out the first node and its key; None when empty."""
        if self._waiting:
            self._sort_in()
        while self._heap:
            entry = heappop(self._heap)
            node = entry[2]
            if self._entries.get(node) is entry:
                del self._entries[node]
                return node, entry[0]
        return None

    def _sort_in(self) -> None:
        entries, heap, key = self._entries, self._heap, self._key
        for node in self._waiting:
            self._puts += 1
            entries[node] = entry = (key(node), self._puts, node)
            heappush(heap, entry)
        self._waiting.clear()
        if len(heap) > 64 + 2 * len(entries):
            self._heap = list(entries.values())
            heapify(self._heap)
