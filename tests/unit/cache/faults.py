"""A component that fails on order, and a picture of the cache to tell whether it left a trace."""

from __future__ import annotations

from engine.cache import PrefixCache
from engine.cache.full import FullAttention
from engine.cache.node import Node


class Injected(Exception):
    pass


class FaultyFullAttention(FullAttention):
    """Full attention whose n-th call from now raises; `fuse` None never does."""

    fuse: int | None = None

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Injected

    def enter(self, payload, length):
        self._burn()
        return super().enter(payload, length)

    def lengthen(self, data, payload, length):
        self._burn()
        return super().lengthen(data, payload, length)

    def attach(self, payload, start, end):
        self._burn()
        return super().attach(payload, start, end)

    def grow(self, data, payload, start, end):
        self._burn()
        return super().grow(data, payload, start, end)

    def overlap(self, data, payload, start, end):
        self._burn()
        return super().overlap(data, payload, start, end)

    def split(self, data, at):
        self._burn()
        return super().split(data, at)

    def adopt(self, pieces):
        self._burn()
        super().adopt(pieces)

    def discard(self, pieces):
        self._burn()
        super().discard(pieces)


def fingerprint(cache: PrefixCache) -> tuple:
    """Everything that can make a later operation come out differently, except the clock's reading."""

    def describe(node: Node) -> tuple:
        children = tuple(describe(child) for child in node.children.values())
        data = tuple(node.data)
        return node.edge, node.end, data, node.pins, node.stamp, node.rank, node.queued, children

    roots = [*cache.tree.roots.values(), *cache.tree.doomed]
    described = tuple((root.namespace, root.retired, root.doomed, describe(root)) for root in roots)
    return described, cache.allocator.states.tobytes(), cache.allocator.num_free, cache.stats()
