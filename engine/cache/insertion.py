"""Inserting a stretch of tokens below a node, as a transaction.

Owns the order of an insert's steps and how each is undone. Components first say what would change
hands; every change then notes how to undo it; freeing the request's duplicates, which cannot be
undone, comes last, and moving the pin, which cannot fail, after it. Ignores receipts and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.cache.component import Component, Held
from engine.cache.node import Node
from engine.cache.radix_tree import TOKEN_BYTES, RadixTree


def insert(tree: RadixTree, node: Node, tokens: bytes, payloads: Sequence[Any]) -> tuple[Node, int, list[Held] | None]:
    """Make the path for `tokens` below `node`, all or nothing.

    Returns its last node, the bytes the tree had already, and what the restricting components
    hold for a receipt that ends there. The tree's own pin is still where it was.
    """
    step = Insertion(tree, payloads)
    try:
        target, known = step.insert(node, tokens)
        held = hold(tree.lasting, target, target.end) if tree.lasting else None
        if held:
            step.undo.append(lambda: let_go(held))
        step.discard_surplus()
    except BaseException:
        step.roll_back()
        raise
    above = target.parent
    if above is not None and above.queued:
        above.root.queue.remove(above)  # an evictable leaf below the receipt's node got a child
    return target, known, held


def append(tree: RadixTree, node: Node, tokens: bytes, payloads: Sequence[Any]) -> tuple[Node, list[Held] | None]:
    """As `insert`, for tokens of which nothing is known below `node`: most inserts, in far fewer steps."""
    length = len(tokens) // TOKEN_BYTES
    if node.pins == 1 and not node.children and node.parent is not None:
        values = _lengthened(tree, node, payloads, length)
        if values is not None:
            return node, _grow(tree, node, tokens, values)
    values, fresh = [], None
    try:
        for component in tree.components:
            values.append(component.enter(payloads[component.index], length))
        fresh = tree.add_child(node, tokens, values)
        return fresh, hold(tree.lasting, fresh, fresh.end) if tree.lasting else None
    except BaseException:
        if fresh is not None:
            tree.remove_child(fresh)
        for component, value in reversed(list(zip(tree.components, values, strict=False))):
            component.leave(value)
        raise


def _lengthened(tree: RadixTree, node: Node, payloads: Sequence[Any], length: int) -> list[Any] | None:
    """The values of a longer `node`, what they take over adopted; None if its present end must stay one."""
    data = node.data
    if len(data) == 1:
        value = tree.components[0].lengthen(data[0], payloads[0], length)
        return None if value is None else [value]
    values: list[Any] = data
    done: list[Component] = []
    try:
        for component in tree.refusing:
            index = component.index
            value = component.lengthen(data[index], payloads[index], length)
            if value is None:
                if done:
                    _shorten(node, values, done)
                return None
            if values is data:
                values = list(data)
            values[index] = value
            done.append(component)
    except BaseException:
        _shorten(node, values, done)
        raise
    return values


def _shorten(node: Node, values: list[Any], done: list[Component]) -> None:
    """Undo `lengthen` for those components."""
    size = len(node.edge) // TOKEN_BYTES
    for component in reversed(done):
        component.leave(component.split(values[component.index], size)[1])


def _grow(tree: RadixTree, node: Node, tokens: bytes, values: list[Any]) -> list[Held] | None:
    edge, data = node.edge, node.data
    tree.grow(node, tokens, values)
    if not tree.lasting:
        return None
    try:
        return hold(tree.lasting, node, node.end)
    except BaseException:
        tree.shrink(node, edge, data)
        _shorten(node, values, list(tree.components))
        raise


class Insertion:
    """One insert under way; `payloads[i]` is what the request hands over for component i."""

    __slots__ = ("payloads", "surplus", "tree", "undo")

    def __init__(self, tree: RadixTree, payloads: Sequence[Any]) -> None:
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
            values = [value for value, _, _ in offers]
            if any(value is not known for value, known in zip(values, node.data, strict=True)):
                self._replace(node, values)
            node = parent

    def _replace(self, node: Node, data: list[Any]) -> None:
        old = node.data

        def undo() -> None:
            node.data = old
            self.tree.changes += 1
            self.tree.settle(node)

        self.undo.append(undo)
        node.data = data
        self.tree.changes += 1  # hits may end here that could not before
        self.tree.settle(node)

    def _adopt(self, pieces: list[list[Any]]) -> None:
        for component, taken in zip(self.tree.components, pieces, strict=True):
            if taken:
                component.adopt(taken)
                self.undo.append(lambda component=component, taken=taken: component.disown(taken))


def hold(components: tuple[Component, ...], node: Node, length: int) -> list[Held] | None:
    """What these components hold for a hit of `length` tokens at `node`, None for nothing; all or nothing."""
    held: list[Held] | None = None
    try:
        for component in components:
            taken = component.pin(node, length)
            if taken is not None:
                held = [(component, taken)] if held is None else [*held, (component, taken)]
    except BaseException:
        let_go(held or [])
        raise
    return held


def let_go(held: list[Held]) -> None:
    """Give back what `hold` returned."""
    for component, taken in held:
        component.unpin(taken)
