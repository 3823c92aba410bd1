"""Inserting a stretch of tokens below a node, as a transaction.

Owns the order of an insert's steps and how each is undone. Components first say what would change
hands; every change then notes how to undo it; freeing the request's duplicates, which cannot be
undone, comes last, and moving the pin, which cannot fail, after it. Ignores receipts and counters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.cache.component import Component
from engine.cache.node import Node
from engine.cache.radix_tree import TOKEN_BYTES, RadixTree


def insert(tree: RadixTree, node: Node, tokens: bytes, payloads: list[Any]) -> tuple[Node, int, list[Any] | None]:
    """Make the path for `tokens` below `node`, all or nothing.

    Returns its last node, the bytes the tree had already, and what the restricting components
    hold for a receipt that ends there. The tree's own pin is still where it was.
    """
    step = Insertion(tree, payloads)
    try:
        target, known = step.insert(node, tokens)
        held = hold(tree, target, target.end, copying=False) if tree.picky else None
        if held is not None:
            step.undo.append(lambda: let_go(tree, held))
        step.discard_surplus()
    except BaseException:
        step.roll_back()
        raise
    above = target.parent
    if above is not None and above.queued:
        above.root.queue.remove(above)  # an evictable leaf below the receipt's node got a child
    return target, known, held


def append(tree: RadixTree, node: Node, tokens: bytes, payloads: list[Any]) -> tuple[Node, list[Any]]:
    """As `insert`, for tokens of which nothing is known below `node`: most inserts of a tree with several
    components, and far fewer steps."""
    components, length = tree.components, len(tokens) // TOKEN_BYTES
    offers: list[Any] = []
    if node.pins == 1 and not node.children and node.parent is not None:
        offers = [component.grow(node.data[i], payloads[i], 0, length) for i, component in enumerate(components)]
    grows = bool(offers) and None not in offers
    if not grows:
        offers = [component.attach(payloads[i], 0, length) for i, component in enumerate(components)]
    taken: list[tuple[Component, list[Any]]] = []
    edge, data, fresh = node.edge, node.data, None
    try:
        for component, (_, pieces) in zip(components, offers, strict=True):
            if pieces:
                component.adopt(pieces)
                taken.append((component, pieces))
        values = [value for value, _ in offers]
        if grows:
            tree.grow(node, tokens, values)
            fresh = node
        else:
            fresh = tree.add_child(node, tokens, values)
        return fresh, hold(tree, fresh, fresh.end, copying=False)
    except BaseException:
        if fresh is node:
            tree.shrink(node, edge, data)
        elif fresh is not None:
            tree.remove_child(fresh)
        for component, pieces in reversed(taken):
            component.disown(pieces)
        raise


class Insertion:
    """One insert under way; `payloads[i]` is what the request hands over for component i."""

    __slots__ = ("payloads", "surplus", "tree", "undo")

    def __init__(self, tree: RadixTree, payloads: list[Any]) -> None:
        self.tree = tree
        self.payloads = payloads
        self.surplus: list[list[Any]] = []
        self.undo: list[Callable[[], None]] = []

    def insert(self, node: Node, tokens: bytes) -> tuple[Node, int]:
        """Make the path for `tokens` below `node`. Returns its last node and the bytes the tree had."""
        tree, payloads = self.tree, self.payloads
        num_bytes = len(tokens)
        last, known, child, common = tree.descend(node, tokens, 0, num_bytes)
        if child is not None:
            last, revert = tree.split(child, common)
            self.undo.append(revert)
            known += common
        if known:
            self._overlap(node, last)
            if known == num_bytes:
                return last, known
            tokens = tokens[known:]
        start, end = known // TOKEN_BYTES, num_bytes // TOKEN_BYTES
        if last is node and node.pins == 1 and not node.children and node.parent is not None:
            offers = [c.grow(node.data[i], payloads[i], start, end) for i, c in enumerate(tree.components)]
            grown = [offer for offer in offers if offer is not None]
            if len(grown) == len(offers):
                self._adopt([pieces for _, pieces in grown])
                edge, data = node.edge, node.data
                tree.grow(node, tokens, [value for value, _ in grown])
                self.undo.append(lambda: tree.shrink(node, edge, data))
                return node, known
        attached = [c.attach(payloads[i], start, end) for i, c in enumerate(tree.components)]
        self._adopt([pieces for _, pieces in attached])
        fresh = tree.add_child(last, tokens, [value for value, _ in attached])
        self.undo.append(lambda: tree.remove_child(fresh))
        return fresh, known

    def discard_surplus(self) -> None:
        """Free the request's duplicates."""
        for component, pieces in zip(self.tree.components, self.surplus, strict=False):
            if pieces:
                component.discard(pieces)

    def roll_back(self) -> None:
        for action in reversed(self.undo):
            action()

    def _overlap(self, above: Node, last: Node) -> None:
        """Offer the payloads to the nodes between `above` (excluded) and `last` (included)."""
        components, payloads = self.tree.components, self.payloads
        self.surplus = [[] for _ in components]
        base = above.end
        node = last
        while node is not above:
            parent = node.parent
            assert parent is not None, "the path leads back to where the insert began"
            start, end = parent.end - base, node.end - base
            offers = [c.overlap(node.data[i], payloads[i], start, end) for i, c in enumerate(components)]
            self._adopt([kept for _, kept, _ in offers])
            for pieces, (_, _, spare) in zip(self.surplus, offers, strict=True):
                pieces.extend(spare)
            self._replace(node, [value for value, _, _ in offers])
            node = parent

    def _replace(self, node: Node, data: list[Any]) -> None:
        old = node.data

        def undo() -> None:
            node.data = old
            self.tree.settle(node)

        self.undo.append(undo)
        node.data = data
        self.tree.settle(node)

    def _adopt(self, pieces: list[list[Any]]) -> None:
        for component, taken in zip(self.tree.components, pieces, strict=True):
            if taken:
                component.adopt(taken)
                self.undo.append(lambda component=component, taken=taken: component.disown(taken))


def hold(tree: RadixTree, node: Node, length: int, copying: bool) -> list[Any]:
    """What each restricting component holds for a hit of `length` tokens at `node`; all or nothing. None
    stands for what a receipt that is not `copying` states has no use for."""
    held: list[Any] = []
    try:
        for _, component in tree.picky:
            held.append(component.pin(node, length) if copying or not component.until_copied else None)
    except BaseException:
        let_go(tree, held)
        raise
    return held


def let_go(tree: RadixTree, held: list[Any]) -> None:
    """Give back what `hold` returned."""
    for (_, component), taken in zip(tree.picky, held, strict=False):
        if taken is not None:
            component.unpin(taken)
