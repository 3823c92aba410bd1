"""The prefix cache: the one interface between requests and cached attention states.

Owns the life of a cached prefix as requests see it: read-only matches, receipts, transactional
inserts, forks, weight epochs, eviction and flushing. Ignores scheduling, and what tokens mean.
The structure below is `radix_tree`'s; how states follow it is the components'.

Nothing here makes reference cycles that outlive a node, so the engine may freeze and disable the
cyclic garbage collector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from engine.cache.component import Component
from engine.cache.full import FullAttention, path_pages
from engine.cache.handles import CacheStats, Extension, Match, Receipt, live_node
from engine.cache.insertion import append, hold, insert, let_go
from engine.cache.integrity import check_tree
from engine.cache.key import Namespace
from engine.cache.leaf_queue import LeafQueue
from engine.cache.node import COLD, NORMAL, Root
from engine.cache.radix_tree import TOKEN_BYTES, RadixTree
from engine.cache.recurrent import RecurrentState
from engine.memory.allocator import PageAllocator

_RETIRED = -1
"""Key of the retired roots' leaf queue: before every epoch."""

_INT32 = np.dtype(np.int32)


class PrefixCache:
    """Prefixes of whole pages, by namespace. Tokens are little-endian int32 bytes throughout.

    `components` defaults to full attention alone; if given, full attention comes first.
    """

    def __init__(
        self, allocator: PageAllocator, page_size: int, components: tuple[Component, ...] | None = None
    ) -> None:
        assert page_size > 0, f"page_size must be positive, got {page_size}"
        self.allocator = allocator
        self.page_size = page_size
        self.components = components or (FullAttention(allocator, page_size),)
        assert isinstance(self.components[0], FullAttention), "the first component holds the full-attention pages"
        self.tree = RadixTree(page_size, self.components)
        self._others = tuple(component.name for component in self.components[1:])
        self._epoch = 0
        self._receipts = 0
        self._lookup_tokens = self._hit_tokens = 0
        self._inserted_tokens = self._duplicate_tokens = 0
        self._evicted_tokens = self._flushed_tokens = 0

    # Requests --------------------------------------------------------------------------------

    def match(self, namespace: Namespace, tokens: bytes, limit: int | None = None) -> Match:
        """How much of `tokens` is cached. Changes nothing. `limit` caps the tokens a hit may use:
        a request that needs logits passes its length - 1."""
        tree = self.tree
        length = len(tokens)
        if limit is not None and limit * TOKEN_BYTES < length:
            length = limit * TOKEN_BYTES if limit > 0 else 0
        length -= length % tree.page_bytes
        root = tree.roots.get(namespace)
        if root is None:
            return Match(namespace, tokens, length, None, 0, 0, "", tree.changes)
        node, pos, child, common = tree.descend(root, tokens, 0, length)
        if child is not None:
            node = child
        structural = usable = (pos + common) // TOKEN_BYTES
        limit_name = ""
        if tree.picky:
            node, usable, limit_name = tree.usable(node, structural)
        return Match(namespace, tokens, length, node, structural, usable, limit_name, tree.changes)

    def acquire(self, match: Match) -> Receipt:
        """Pin what `match` found, or what is there by now if the tree has changed since."""
        tree = self.tree
        if match.changes != tree.changes:
            match = self.match(match.namespace, match.tokens, match.num_bytes // TOKEN_BYTES)
        length = match.usable
        node = match.node if length else tree.root(match.namespace)
        assert node is not None, "a match of some length names its node"
        undo: Callable[[], None] | None = None
        try:
            if node.end != length:
                node, undo = tree.split(node, len(node.edge) - (node.end - length) * TOKEN_BYTES)
            held = hold(tree.holders, node, length) if tree.holders else None
        except BaseException:
            if undo is not None:
                undo()
            self._drop_if_unused(node.root)
            raise
        tree.pin(node)
        tree.clock += 1
        node.stamp = tree.clock
        node.rank = NORMAL
        self._receipts += 1
        self._lookup_tokens += match.num_bytes // TOKEN_BYTES
        self._hit_tokens += length
        return Receipt(node, length, held)

    def acquire_known(self, match: Match, limit: int) -> Receipt:
        """Pin all that the tree knows of the first `limit` tokens, whether a hit may end there or not: for whoever
        brings the states that are missing. The match stays what it was."""
        tree = self.tree
        node, _, child, common = tree.descend(tree.root(match.namespace), match.tokens, 0, limit * TOKEN_BYTES)
        if child is not None:
            node, _ = tree.split(child, common)
        tree.pin(node)
        tree.clock += 1
        node.stamp = tree.clock
        self._receipts += 1
        return Receipt(node, node.end, None)

    def extend(
        self, receipt: Receipt, tokens: bytes, pages: np.ndarray, states: Mapping[str, Any] | None = None
    ) -> Extension:
        """Insert `tokens`, whole pages that follow the receipt's, held in the PRIVATE `pages`.

        What the tree has is kept from the tree and the request's duplicates are freed; the rest
        passes to the tree. The receipt then covers all of it. `states` are the other components'
        payloads by name. If anything raises, all is as before.
        """
        tree = self.tree
        node = receipt.node or live_node(receipt)
        num_bytes, start = len(tokens), receipt.length
        assert num_bytes == len(pages) * tree.page_bytes, f"{num_bytes} token bytes for {len(pages)} pages"
        assert pages.dtype == _INT32, f"page ids: expected int32, got {pages.dtype}"
        if not num_bytes:
            return Extension(start, start, pages, 0)
        payloads: list[Any] = [pages]
        for name in self._others:
            payloads.append(None if states is None else states.get(name))
        if not node.children or tokens[: tree.page_bytes] not in node.children:
            known, (target, held) = 0, append(tree, node, tokens, payloads)
        else:
            target, known, held = insert(tree, node, tokens, payloads)
        if target is not node:
            if not target.pins and target.parent is node:
                tree.sink(target)
            else:
                tree.pin(target)
                tree.unpin(node)
        tree.clock += 1
        target.stamp = tree.clock
        target.rank = NORMAL
        if receipt.held:
            let_go(receipt.held)
        receipt.held = held
        receipt.node = target
        receipt.length = target.end
        self._inserted_tokens += (num_bytes - known) // TOKEN_BYTES
        if known:
            self._duplicate_tokens += known // TOKEN_BYTES
            pages = path_pages(target, len(pages))
        return Extension(start, receipt.length, pages, known // tree.page_bytes)

    def fork(self, receipt: Receipt, n: int) -> list[Receipt]:
        """`n` further receipts for what `receipt` covers, each to be released on its own. States that are
        copied before use are the forked requests' to hand on; these receipts hold none of them."""
        node, length, tree = live_node(receipt), receipt.length, self.tree
        if not tree.lasting:
            if n:
                tree.pin(node, n)
            self._receipts += n
            return [Receipt(node, length, None) for _ in range(n)]
        forks: list[Receipt] = []
        try:
            for _ in range(n):
                held = hold(tree.lasting, node, length)
                tree.pin(node)
                self._receipts += 1
                forks.append(Receipt(node, length, held))
        except BaseException:
            for fork in forks:
                self.release(fork)
            raise
        return forks

    def release(self, receipt: Receipt, cold: bool = False) -> None:
        """Let go of exactly what the receipt took. `cold` hints that nobody will come back for it
        (its group has finished): it is then evicted before what was released without the hint."""
        tree = self.tree
        node = receipt.node or live_node(receipt)
        node.rank = COLD if cold else NORMAL
        if receipt.held:
            let_go(receipt.held)
            receipt.held = None
        for used in tree.users:
            used(node, receipt.length)
        receipt.node = None
        self._receipts -= 1
        tree.clock += 1
        node.stamp = tree.clock
        tree.unpin(node)

    def snapshot(self, receipt: Receipt) -> int:
        """Slot of the recurrent state that an acquired receipt starts from, held until `copied`."""
        for component in self.components:
            if isinstance(component, RecurrentState):
                slot = live_node(receipt).data[component.index].slot
                assert slot, f"no state at the end of a hit of {receipt.length} tokens"
                return slot
        raise AssertionError("no component has recurrent states")

    def copied(self, receipt: Receipt) -> None:
        """The states that an acquired receipt starts from have been copied: they need not stay."""
        held = receipt.held
        if held:
            kept = []
            for each in held:
                component, taken = each
                if component.until_copied:
                    component.unpin(taken)
                else:
                    kept.append(each)
            receipt.held = kept

    # Memory ----------------------------------------------------------------------------------

    def evict(self, want: int, component: str = "full") -> int:
        """Free up to `want` pages (or the component's units) of unpinned data; the number freed."""
        for owner in self.components:
            if owner.name == component:
                before = self.tree.total_bytes
                freed = owner.evict(self.tree, want)
                self._evicted_tokens += (before - self.tree.total_bytes) // TOKEN_BYTES
                return freed
        raise AssertionError(f"no component {component!r} among {[owner.name for owner in self.components]}")

    @property
    def evictable_pages(self) -> int:
        """Full-attention pages that `evict` could free now."""
        return (self.tree.total_bytes - self.tree.pinned_bytes) // self.tree.page_bytes

    # Versions --------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        return self._epoch

    def bump_epoch(self) -> int:
        """Start a new weight epoch and return it.

        Everything of earlier epochs becomes evict-first at once. Receipts on it stay valid, may be
        extended and forked, and namespaces of earlier epochs may still be matched by requests that
        belong to them; no request of the new epoch can see any of it.
        """
        queues = self.tree.queues
        for epoch in [epoch for epoch, queue in queues.items() if not queue.num_roots]:
            del queues[epoch]
        self._epoch += 1
        if self.tree.spiller is not None:
            self.tree.spiller.forget(lambda space: space.epoch < self._epoch)
        return self._epoch

    def retire(self, predicate: Callable[[Namespace], bool]) -> int:
        """Make all present roots whose namespace fits evict-first (an adapter was dropped, a salt
        expired); the number of roots."""
        tree = self.tree
        if tree.spiller is not None:
            tree.spiller.forget(predicate)
        retired = [root for root in tree.roots.values() if not root.retired and predicate(root.namespace)]
        for root in retired:
            queue = tree.queues.setdefault(_RETIRED, LeafQueue())
            root.retired, root.age = True, _RETIRED
            tree.move_leaves(root, queue)
            tree.demote(root)
        return len(retired)

    def flush(self, scope: Literal["all", "stale"] = "all") -> int:
        """Forget everything, or what earlier epochs and retired roots hold; the tokens freed now.

        Nothing flushed is ever matched again. What receipts hold is freed as they are released.
        """
        assert scope in ("all", "stale"), f"scope: expected 'all' or 'stale', got {scope!r}"
        tree = self.tree
        freed = 0
        if tree.spiller is not None and scope == "all":
            tree.spiller.forget(lambda space: True)
        for root in list(tree.roots.values()):
            if scope == "stale" and root.namespace.epoch >= self._epoch and not root.retired:
                continue
            tree.doom(root)
            freed += tree.drop_unpinned(root)
            self._drop_if_unused(root)
        self._flushed_tokens += freed
        return freed

    def reset(self) -> None:
        """Forget everything before the pools are dropped. Nothing may be pinned. The epoch stays."""
        assert self._receipts == 0, f"reset with {self._receipts} receipts alive"
        self.flush("all")
        self.tree.queues.clear()

    # Observation -----------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        tree = self.tree
        return CacheStats(
            epoch=self._epoch,
            tokens=tree.total_bytes // TOKEN_BYTES,
            pinned_tokens=tree.pinned_bytes // TOKEN_BYTES,
            evictable_tokens=(tree.total_bytes - tree.pinned_bytes) // TOKEN_BYTES,
            nodes=tree.num_nodes,
            roots=len(tree.roots) + len(tree.doomed),
            receipts=self._receipts,
            lookup_tokens=self._lookup_tokens,
            hit_tokens=self._hit_tokens,
            inserted_tokens=self._inserted_tokens,
            duplicate_tokens=self._duplicate_tokens,
            evicted_tokens=self._evicted_tokens,
            flushed_tokens=self._flushed_tokens + tree.swept_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of the tree, its components and the allocator; O(everything)."""
        self.allocator.check()
        check_tree(self.tree, self._receipts)

    # Helpers ---------------------------------------------------------------------------------

    def _drop_if_unused(self, root: Root) -> None:
        if not root.children and not root.pins:
            self.tree.drop_root(root)
