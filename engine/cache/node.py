"""Nodes of the radix tree: plain records.

Owns their fields. Ignores every rule about them, which is `radix_tree`'s and the components'.
"""

from __future__ import annotations

from typing import Any

from engine.cache.key import Namespace
from engine.cache.leaf_queue import LeafQueue

COLD, NORMAL = 0, 1
"""Ranks: cold nodes are evicted before all normal ones of the same standing."""


class Node:
    """One edge and the states at and along it.

    `edge` holds the edge's tokens as little-endian int32 bytes, a whole number of pages; `end` is
    the depth in tokens at its lower end. `children` are keyed by the bytes of their first page.
    `data[i]` is what component i keeps here. `pins` counts receipts that end here plus pinned
    children, so a node is pinned exactly if something at or below it is. `stamp` is the logical
    time of the last use, unique among nodes; a child's passes to its parent when it goes.
    `queued` says where in its root's leaf queue the node is, 0 outside it.
    """

    __slots__ = ("children", "data", "edge", "end", "parent", "pins", "queued", "rank", "root", "stamp")

    parent: Node | None
    root: Root

    def __init__(self, parent: Node | None, edge: bytes, end: int, data: list[Any]) -> None:
        self.parent = parent
        self.edge = edge
        self.end = end
        self.data = data
        self.children: dict[bytes, Node] = {}
        self.pins = 0
        self.stamp = 0
        self.rank = NORMAL
        self.queued = 0
        if parent is not None:
            self.root = parent.root


class Root(Node):
    """The empty prefix of one namespace.

    `age` orders what components evict: the namespace's epoch, or less than any once retired. `queue` holds
    its unpinned leaves. A `retired` root is evict-first whatever its epoch. A `doomed` one has been flushed: no
    longer reachable, its pinned nodes go as they are released.
    """

    __slots__ = ("age", "doomed", "namespace", "queue", "retired")

    def __init__(self, namespace: Namespace, queue: LeafQueue) -> None:
        super().__init__(None, b"", 0, [])
        self.root = self
        self.namespace = namespace
        self.age = namespace.epoch
        self.queue = queue
        self.retired = False
        self.doomed = False
