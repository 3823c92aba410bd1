"""The tree's invariants, recomputed from nothing.

Owns what must always hold between nodes, pins, counters and queues. Ignores speed.
"""

from __future__ import annotations

from engine.cache.node import Node, Root
from engine.cache.radix_tree import TOKEN_BYTES, RadixTree


def check_tree(tree: RadixTree, num_receipts: int) -> None:
    """Raise AssertionError naming the first thing that does not hold."""
    roots = [*tree.roots.values(), *tree.doomed]
    nodes = [node for root in roots for node in _below(root)]
    own_pins = 0
    for root in roots:
        assert root.parent is None and not root.edge and root.end == 0, "a root has an edge"
        assert root.children or root.pins, f"an empty root remains: {root.namespace}"
        assert root.doomed == (root in tree.doomed), f"doomed root is reachable: {root.namespace}"
        own_pins += _check_pins(root)
    for namespace, root in tree.roots.items():
        assert root.namespace == namespace, f"{root.namespace} is kept under {namespace}"
    for node in nodes:
        _check_node(tree, node)
        own_pins += _check_pins(node)
    assert own_pins == num_receipts, f"{own_pins} pins for {num_receipts} receipts"
    assert len({node.stamp for node in nodes}) == len(nodes), "two nodes share a stamp"
    total = sum(len(node.edge) for node in nodes)
    pinned = sum(len(node.edge) for node in nodes if node.pins)
    counted = tree.num_nodes, tree.total_bytes, tree.pinned_bytes
    assert counted == (len(nodes), total, pinned), f"counted {counted}, found {(len(nodes), total, pinned)}"
    _check_queues(tree, roots, nodes)
    for i, component in enumerate(tree.components):
        component.check([(node.data[i], len(node.edge) // TOKEN_BYTES) for node in nodes])


def _below(root: Root) -> list[Node]:
    nodes: list[Node] = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    return nodes[1:]


def _check_node(tree: RadixTree, node: Node) -> None:
    page = tree.page_bytes
    parent = node.parent
    assert parent is not None and node.root is parent.root, "a node hangs under another root"
    assert node.edge and len(node.edge) % page == 0, f"edge of {len(node.edge)} bytes, page of {page}"
    assert parent.children.get(node.edge[:page]) is node, "a child is not under its first page"
    assert node.end == parent.end + len(node.edge) // TOKEN_BYTES, "depths do not add up"
    assert len(node.data) == len(tree.components), "a component has no value here"
    assert node.pins or not node.root.doomed, "an unpinned node remains under a flushed root"


def _check_pins(node: Node) -> int:
    own = node.pins - sum(1 for child in node.children.values() if child.pins)
    assert own >= 0, f"{node.pins} pins, fewer than pinned children"
    return own


def _check_queues(tree: RadixTree, roots: list[Root], nodes: list[Node]) -> None:
    users = {id(queue): 0 for queue in tree.queues.values()}
    for root in roots:
        assert id(root.queue) in users, f"nobody evicts from {root.namespace}"
        users[id(root.queue)] += 1
    for epoch, queue in tree.queues.items():
        assert queue.num_roots == users[id(queue)], f"epoch {epoch}: queue of {queue.num_roots} roots"
    leaves = 0
    for node in nodes:
        is_free_leaf = not node.pins and not node.children
        assert bool(node.queued) == is_free_leaf == (node in node.root.queue), "queue and unpinned leaves differ"
        leaves += is_free_leaf
    queued = sum(len(queue) for queue in tree.queues.values())
    assert queued == leaves, f"{queued} queued, {leaves} unpinned leaves"
