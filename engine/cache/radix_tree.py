"""The tree of cached prefixes: structure, pins and the order of eviction.

Owns nodes and what holds between them: edges are non-empty runs of whole pages, children differ in
their first page, a node present means all its ancestors present. Walks compare bytes in place and
cost the tokens compared plus the nodes passed. Pins are hierarchical: a node counts the receipts
that end at it plus its pinned children, so pinning stops at the first ancestor already pinned.
Exactly the unpinned leaves sit in their root's leaf queue. Ignores epochs, receipts and which
request asks: that is `prefix_cache`; and what nodes store, which is the components'.

Everything is a function of the order of calls: no wall clock, no hash order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.cache.component import Component
from engine.cache.key import Namespace
from engine.cache.leaf_queue import LeafQueue
from engine.cache.node import Node, Root
from engine.cache.spill import Spiller

TOKEN_BYTES = 4


class RadixTree:
    """Nodes of all namespaces over one page size. Lengths with suffix `_bytes` are edge bytes."""

    def __init__(self, page_size: int, components: tuple[Component, ...]) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.components = components
        self.refusing = tuple(reversed(components))
        """The last are those that may refuse to lengthen a node."""
        self.picky = tuple((i, c) for i, c in enumerate(components) if not c.every_boundary)
        """The components that restrict where a hit may end."""
        restricting = [component for _, component in self.picky]
        self._acceptors = tuple((component.name, component.accepts) for component in restricting)
        self._placers = tuple(each.placed for each in restricting if type(each).placed is not Component.placed)
        self.users = tuple(each.used for each in restricting if type(each).used is not Component.used)
        self.holders = tuple(each for each in restricting if type(each).pin is not Component.pin)
        """Those that hold something for a receipt, and of them those that do for longer than copying takes."""
        self.lasting = tuple(each for each in self.holders if not each.until_copied)
        for index, component in enumerate(components):
            component.index = index
        self.roots: dict[Namespace, Root] = {}
        self.doomed: dict[Root, None] = {}
        self.queues: dict[int, LeafQueue] = {}
        """By epoch; evicted in ascending order."""
        self.changes = 0
        """Counts what may send an earlier walk elsewhere."""
        self.clock = 0
        self.num_nodes = 0
        self.total_bytes = 0
        self.pinned_bytes = 0
        self.swept_tokens = 0
        """Tokens freed under doomed roots as their last pins went."""
        self.spiller: Spiller | None = None
        """Told of all that eviction is about to free, where something outlives it."""

    # Walking ---------------------------------------------------------------------------------

    def descend(self, node: Node, tokens: bytes, pos: int, end: int) -> tuple[Node, int, Node | None, int]:
        """Follow `tokens[pos:end]` (bytes, whole pages) down from the end of `node`.

        Returns the last node wholly matched, the position reached with it, the child matched in
        part or None, and how many of that child's bytes matched.
        """
        page = self.page_bytes
        continues = tokens.startswith
        while pos < end:
            child = node.children.get(tokens[pos : pos + page])
            if child is None:
                break
            edge = child.edge
            below = pos + len(edge)
            if below > end or not continues(edge, pos):
                return node, pos, child, self._common(edge, tokens, pos, end)
            node = child
            pos = below
        return node, pos, None, 0

    def _common(self, edge: bytes, tokens: bytes, pos: int, end: int) -> int:
        """Bytes, in whole pages, that `edge` shares with `tokens[pos:end]`; the first page does."""
        high = min(len(edge), end - pos)
        if tokens.startswith(edge[:high], pos):
            return high
        low = page = self.page_bytes
        while high - low > page:
            middle = low + (high - low) // (2 * page) * page
            if tokens.startswith(edge[low:middle], pos + low):
                low = middle
            else:
                high = middle
        return low

    def usable(self, node: Node, reached: int) -> tuple[Node, int, str]:
        """The deepest boundary all components accept on the path to depth `reached` inside `node`.

        Returns the node that holds it, its depth in tokens, and the component that refused the deepest.
        """
        blamed = ""
        while node.parent is not None:
            for name, accepts in self._acceptors:
                if not accepts(node, reached):
                    blamed = blamed or name
                    break
            else:
                return node, reached, blamed
            node = node.parent
            reached = node.end
        return node, 0, blamed

    # Structure -------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Root:
        """The namespace's root, made if it is not there."""
        root = self.roots.get(namespace)
        if root is None:
            queue = self.queues.get(namespace.epoch)
            if queue is None:
                queue = self.queues[namespace.epoch] = LeafQueue()
            queue.num_roots += 1
            root = self.roots[namespace] = Root(namespace, queue)
        return root

    def drop_root(self, root: Root) -> None:
        """Forget a root without nodes or pins."""
        if root.doomed:
            del self.doomed[root]
        else:
            del self.roots[root.namespace]
        root.queue.num_roots -= 1

    def doom(self, root: Root) -> None:
        """Make a root unreachable for matches; its pinned nodes go as they are released."""
        del self.roots[root.namespace]
        root.doomed = True
        self.doomed[root] = None
        self.changes += 1

    def split(self, node: Node, at: int) -> tuple[Node, Callable[[], None]]:
        """Cut `node` after `at` bytes; the new upper half and what undoes the cut.

        The node itself becomes the lower half, so that receipts and queues keep naming it.
        """
        parent, edge, data = node.parent, node.edge, node.data
        assert parent is not None and 0 < at < len(edge), f"cut at {at} of {len(edge)} bytes"
        halves = [component.split(data[i], at // TOKEN_BYTES) for i, component in enumerate(self.components)]
        page = self.page_bytes
        key = edge[:page]
        upper = Node(parent, edge[:at], node.end - (len(edge) - at) // TOKEN_BYTES, [half[0] for half in halves])
        upper.pins = 1 if node.pins else 0
        self.clock += 1
        upper.stamp = self.clock
        upper.rank = node.rank
        node.edge = edge[at:]
        upper.children[edge[at : at + page]] = node
        node.data = [half[1] for half in halves]
        node.parent = upper
        parent.children[key] = upper
        self.num_nodes += 1
        self.changes += 1
        self.settle(upper)
        self.settle(node)

        def undo() -> None:
            parent.children[key] = node
            node.parent, node.edge, node.data = parent, edge, data
            upper.parent = None
            self.num_nodes -= 1
            self.changes += 1
            self._remove([upper])
            self.settle(node)

        return upper, undo

    def add_child(self, parent: Node, edge: bytes, data: list[Any]) -> Node:
        """A new node under one that is pinned, or about to be; whoever pins it next gives it its stamp."""
        node = Node(parent, edge, parent.end + len(edge) // TOKEN_BYTES, data)
        parent.children[edge[: self.page_bytes]] = node
        self.num_nodes += 1
        self.total_bytes += len(edge)
        self.changes += 1
        for placed in self._placers:
            placed(node)
        return node

    def settle(self, node: Node) -> None:
        """Tell the restricting components that the node's values are in place."""
        for placed in self._placers:
            placed(node)

    def demote(self, root: Root) -> None:
        """Tell the restricting components that the root was retired."""
        if self.picky:
            nodes: list[Node] = [*root.children.values()]
            for node in nodes:
                nodes.extend(node.children.values())
                for _, component in self.picky:
                    component.demoted(node)

    def _remove(self, nodes: list[Node]) -> None:
        for _, component in self.picky:
            component.removed(nodes)

    def remove_child(self, node: Node) -> None:
        """Undo `add_child`."""
        parent = node.parent
        assert parent is not None and not node.children and not node.pins and not node.queued, "not a free leaf"
        del parent.children[node.edge[: self.page_bytes]]
        node.parent = None
        self.num_nodes -= 1
        self.total_bytes -= len(node.edge)
        self.changes += 1
        self._remove([node])

    def grow(self, node: Node, edge: bytes, data: list[Any]) -> None:
        """Lengthen a pinned leaf; `data` are its new values."""
        node.edge += edge
        node.end += len(edge) // TOKEN_BYTES
        node.data = data
        self.total_bytes += len(edge)
        self.pinned_bytes += len(edge)
        self.changes += 1
        self.settle(node)

    def shrink(self, node: Node, edge: bytes, data: list[Any]) -> None:
        """Undo `grow`, given what the node had before."""
        cut = len(node.edge) - len(edge)
        node.edge = edge
        node.end -= cut // TOKEN_BYTES
        node.data = data
        self.total_bytes -= cut
        self.pinned_bytes -= cut
        self.changes += 1
        self.settle(node)

    def move_leaves(self, root: Root, queue: LeafQueue) -> None:
        """Let `queue` hold the root's unpinned leaves from now on."""
        old = root.queue
        old.num_roots -= 1
        queue.num_roots += 1
        root.queue = queue
        nodes: list[Node] = [root]
        for node in nodes:
            nodes.extend(node.children.values())
            if node.queued:
                old.remove(node)
                queue.insert(node)

    # Pins ------------------------------------------------------------------------------------

    def pin(self, node: Node, count: int = 1) -> None:
        """Hold the path to `node`, `count` times."""
        if node.queued:
            node.root.queue.remove(node)
        pins = node.pins
        node.pins = pins + count
        if pins:
            return
        step, held = node.parent, 0
        while step is not None:
            pins = step.pins
            step.pins = pins + 1
            if pins:
                held = step.end
                break
            step = step.parent
        self.pinned_bytes += (node.end - held) * TOKEN_BYTES

    def sink(self, child: Node) -> None:
        """Move a pin from a node to a child that has none: the node then has one more pinned child."""
        if child.queued:
            child.root.queue.remove(child)
        child.pins = 1
        self.pinned_bytes += len(child.edge)

    def unpin(self, node: Node) -> None:
        """Undo one pin; a leaf that nothing holds any longer may be evicted, in a doomed root goes."""
        node.pins = pins = node.pins - 1
        if pins:
            return
        step, held = node.parent, 0
        while step is not None:
            step.pins = pins = step.pins - 1
            if pins:
                held = step.end
                break
            step = step.parent
        self.pinned_bytes -= (node.end - held) * TOKEN_BYTES
        root = node.root
        if root.doomed:
            self._sweep_up(node)
        elif node is not root:
            if not node.children:
                root.queue.append(node)
            return
        if not root.children and not root.pins:
            self.drop_root(root)

    # Eviction --------------------------------------------------------------------------------

    def evict_leaves(self, want: int) -> int:
        """Free up to `want` pages of unpinned leaves, oldest epochs first, then cold, then least recent.

        The last leaf is cut to what is needed, never taken whole.
        """
        needed = want * self.page_bytes
        page = self.page_bytes
        victims: list[Node] = []
        told = False
        for epoch in sorted(self.queues):
            queue = self.queues[epoch]
            while needed > 0:
                node = queue.pop()
                if node is None:
                    break
                size = len(node.edge)
                if size > needed:
                    if self.spiller is not None:
                        self.spiller.evicted(victims, node, size - needed)
                        told = True
                    self._trim(node, size - needed)
                    queue.insert(node)
                    needed = 0
                    break
                needed -= size
                victims.append(node)
                parent = node.parent
                assert parent is not None, "a root is never queued"
                del parent.children[node.edge[:page]]
                if parent.stamp < node.stamp:
                    parent.stamp = node.stamp
                if not parent.children and not parent.pins:
                    if parent is node.root:
                        self.drop_root(node.root)
                    else:
                        queue.insert(parent)
            if needed <= 0:
                break
        if self.spiller is not None and not told:
            self.spiller.evicted(victims)
        self._drop(victims)
        return want - max(needed, 0) // page

    def drop_unpinned(self, root: Root) -> int:
        """Free everything below `root` that nothing holds; the tokens freed."""
        before = self.total_bytes
        order: list[Node] = [root]
        for node in order:
            order.extend(node.children.values())
        victims = [node for node in reversed(order) if not node.pins and node is not root]
        for node in victims:
            if node.queued:
                root.queue.remove(node)
            assert node.parent is not None, "only roots have no parent"
            del node.parent.children[node.edge[: self.page_bytes]]
        self._drop(victims)
        return (before - self.total_bytes) // TOKEN_BYTES

    def _sweep_up(self, node: Node) -> None:
        """Free what the release of `node` has left unpinned under a doomed root."""
        victims: list[Node] = []
        while node.parent is not None and not node.pins and not node.children:
            del node.parent.children[node.edge[: self.page_bytes]]
            self.swept_tokens += len(node.edge) // TOKEN_BYTES
            victims.append(node)
            node = node.parent
        self._drop(victims)

    def _trim(self, node: Node, keep: int) -> None:
        """Cut an unpinned leaf to its first `keep` bytes."""
        cut = len(node.edge) - keep
        for i, component in enumerate(self.components):
            node.data[i], pieces = component.trim(node.data[i], keep // TOKEN_BYTES)
            if pieces:
                component.release(pieces)
        node.edge = node.edge[:keep]
        node.end -= cut // TOKEN_BYTES
        self.total_bytes -= cut
        self.changes += 1
        self.settle(node)

    def _drop(self, victims: list[Node]) -> None:
        """Account for nodes already taken out of their parents, and free what they held."""
        if not victims:
            return
        self.num_nodes -= len(victims)
        self.changes += 1
        self._remove(victims)
        for node in victims:
            node.parent = None
            self.total_bytes -= len(node.edge)
        for i, component in enumerate(self.components):
            component.drop([node.data[i] for node in victims])
