"""Recurrent states: immutable snapshots at the ends of nodes.

Owns where snapshots are, who is copying one, and which is worth least. A state cannot be rewound, so a hit
ends at a snapshot or not at all. Slots are those of a pool of their own; what is in them is never changed
while the tree has them.

A snapshot's worth is the tokens that somebody without it would compute again: its depth less that of the
nearest snapshot above. Eviction follows GreedyDual (Young, 1994): worth ages by the worth of what was evicted
since the snapshot's last use, so that equal snapshots go least recently used first and a deep one outlives
several shallow ones, yet not for ever.

A payload is (slot, tokens): the PRIVATE slot with the state after that many tokens, all that are inserted;
None for none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.cache.component import Component
from engine.cache.reclaim import ReclaimQueue
from engine.memory.allocator import PageAllocator, PageState

if TYPE_CHECKING:
    from engine.cache.node import Node
    from engine.cache.radix_tree import RadixTree

_TREE, _PRIVATE = int(PageState.TREE), int(PageState.PRIVATE)  # members of an enumeration are slower


class Snapshot(NamedTuple):
    """A payload: the state in `slot` is that after the insert's `tokens`."""

    slot: int
    tokens: int


class NodeState:
    """A node's snapshot: `slot` 0 is none. `pins` are receipts that have not copied it yet, `credit` what
    eviction had reached at its last use."""

    __slots__ = ("credit", "pins", "slot")

    def __init__(self, slot: int = 0, pins: int = 0, credit: int = 0) -> None:
        self.slot = slot
        self.pins = pins
        self.credit = credit


class RecurrentState(Component):
    name = "recurrent"
    until_copied = True

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._queue = ReclaimQueue(self._key)
        self._pinned = 0
        self._credit = 0

    def evictable(self, tree: RadixTree) -> int:
        return self.allocator.count(_TREE) - self._pinned

    # Matching --------------------------------------------------------------------------------

    def accepts(self, node: Node, boundary: int) -> bool:
        return boundary == node.end and node.data[self.index].slot != 0

    def pin(self, node: Node, length: int) -> Node | None:
        if node.parent is None:
            return None
        data: NodeState = node.data[self.index]
        if not data.slot:
            return None
        pins = data.pins
        data.pins = pins + 1
        self._pinned += not pins
        return node

    def unpin(self, held: Node | None) -> None:
        if held is not None:
            data: NodeState = held.data[self.index]
            data.pins = pins = data.pins - 1
            self._pinned -= not pins
            data.credit = self._credit

    # Structure -------------------------------------------------------------------------------

    def attach(self, payload: Snapshot | None, start: int, end: int) -> tuple[NodeState, list[int]]:
        if payload is None:
            return NodeState(), []
        assert payload.tokens == end, f"a state after {payload.tokens} tokens for an insert of {end}"
        return NodeState(payload.slot), [payload.slot]

    def enter(self, payload: Snapshot | None, length: int) -> NodeState:
        if payload is None:
            return NodeState()
        slot, tokens = payload
        assert tokens == length, f"a state after {tokens} tokens for an insert of {length}"
        self.allocator.hand_over(slot)
        return NodeState(slot)

    def lengthen(self, data: NodeState, payload: Snapshot | None, length: int) -> NodeState | None:
        return None if data.slot else super().lengthen(data, payload, length)

    def pieces(self, value: NodeState) -> list[int]:
        return [value.slot] if value.slot else []

    def grow(
        self, data: NodeState, payload: Snapshot | None, start: int, end: int
    ) -> tuple[NodeState, list[int]] | None:
        return None if data.slot else self.attach(payload, start, end)

    def overlap(
        self, data: NodeState, payload: Snapshot | None, start: int, end: int
    ) -> tuple[NodeState, list[int], list[int]]:
        if payload is None or end != payload.tokens:
            return data, [], []
        if data.slot:
            return data, [], [payload.slot]
        return NodeState(payload.slot), [payload.slot], []

    def split(self, data: NodeState, at: int) -> tuple[NodeState, NodeState]:
        return NodeState(), data

    def trim(self, data: NodeState, keep: int) -> tuple[NodeState, list[int]]:
        return NodeState(), [data.slot] if data.slot else []

    def placed(self, node: Node) -> None:
        """In use now: what it is worth counts from here."""
        data: NodeState = node.data[self.index]
        if data.slot:
            data.credit = self._credit
            self._queue.put(node)
        else:
            self._queue.remove(node)

    def demoted(self, node: Node) -> None:
        self.placed(node)

    def removed(self, nodes: list[Node]) -> None:
        for node in nodes:
            self._queue.remove(node)

    def worth(self, node: Node) -> int:
        """Tokens between the node's end and the nearest snapshot above it."""
        index, above = self.index, node.parent
        while above is not None and above.parent is not None:
            if above.data[index].slot:
                return node.end - above.end
            above = above.parent
        return node.end

    def _key(self, node: Node) -> tuple[int, int, int]:
        return node.root.age, node.rank, node.data[self.index].credit + self.worth(node)

    # Ownership -------------------------------------------------------------------------------

    def adopt(self, pieces: list[int]) -> None:
        self.allocator.transfer(np.array(pieces, np.int32), _PRIVATE, _TREE)

    def disown(self, pieces: list[int]) -> None:
        self.allocator.transfer(np.array(pieces, np.int32), _TREE, _PRIVATE)

    def discard(self, pieces: list[int]) -> None:
        self.allocator.free(np.array(pieces, np.int32), _PRIVATE)

    def release(self, pieces: list[int]) -> None:
        self.allocator.free(np.array(pieces, np.int32), _TREE)

    def drop(self, values: list[NodeState]) -> None:
        slots = [data.slot for data in values if data.slot]
        if slots:
            self.release(slots)

    def evict(self, tree: RadixTree, want: int) -> int:
        freed, in_use = 0, []
        while freed < want:
            entry = self._queue.pop()
            if entry is None:
                break
            node, key = entry
            if node.data[self.index].pins:
                in_use.append(node)
                continue
            if self._key(node) > key:
                # Used since, or what was above it has gone: it has become worth more.
                self._queue.put(node)
                continue
            self._credit = max(self._credit, key[2])
            if tree.spiller is not None:
                tree.spiller.state(node)
            self.release([node.data[self.index].slot])
            node.data[self.index] = NodeState()
            tree.changes += 1
            freed += 1
        for node in in_use:
            self._queue.put(node)
        return freed

    def refill(self, node: Node, slot: int) -> None:
        """The state at the node's end is back in this PRIVATE slot, which passes to the tree."""
        assert not node.data[self.index].slot, "the node has a state"
        self.allocator.hand_over(slot)
        node.data[self.index] = NodeState(slot)
        self.placed(node)

    def count(self, data: NodeState) -> int:
        return int(data.slot != 0)

    def check(self, held: list[tuple[NodeState, int]]) -> None:
        slots = sorted(data.slot for data, _ in held if data.slot)
        assert slots == np.flatnonzero(self.allocator.states == _TREE).tolist(), "snapshots are not those owned"
        queued = {id(node.data[self.index]) for node in self._queue.nodes()}
        assert all(id(data) in queued for data, _ in held if data.slot), "a snapshot that would never be reclaimed"
        pinned = sum(1 for data, _ in held if data.pins)
        assert pinned == self._pinned, f"{self._pinned} pinned snapshots counted, {pinned} found"
        assert all(data.slot and data.pins >= 0 for data, _ in held if data.pins), "a pin on no snapshot"
