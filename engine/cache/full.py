"""Full attention: one page id for every page of tokens in the tree.

Owns how page ids follow the tree's edges and how they change owner. A payload is a request's int32
array of PRIVATE page ids. A node's value is the same ids as bytes, which slice and join at a
fraction of what small arrays cost. Every page boundary is usable and the path's pins hold every
page, so this component adds no rule of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.cache.component import Component
from engine.memory.allocator import PageAllocator, PageState

if TYPE_CHECKING:
    from engine.cache.node import Node
    from engine.cache.radix_tree import RadixTree

_INT32 = np.dtype(np.int32)
_ID_BYTES = 4
_TREE, _PRIVATE = int(PageState.TREE), int(PageState.PRIVATE)  # members of an enumeration are slower


class FullAttention(Component):
    name = "full"
    every_boundary = True

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator = allocator
        self.page_size = page_size

    def attach(self, payload: np.ndarray, start: int, end: int) -> tuple[bytes, list[np.ndarray]]:
        pages = payload[start // self.page_size : end // self.page_size] if start else payload
        return pages.tobytes(), [pages]

    def enter(self, payload: np.ndarray, length: int) -> bytes:
        if len(payload) == 1:
            self.allocator.hand_over(payload.item(0))
        else:
            self.allocator.transfer(payload, _PRIVATE, _TREE)
        return payload.tobytes()

    def lengthen(self, data: bytes, payload: np.ndarray, length: int) -> bytes:
        return data + self.enter(payload, length)

    def pieces(self, value: bytes) -> list[np.ndarray]:
        return [np.frombuffer(value, _INT32)]

    def grow(self, data: bytes, payload: np.ndarray, start: int, end: int) -> tuple[bytes, list[np.ndarray]]:
        pages = payload[start // self.page_size : end // self.page_size] if start else payload
        return data + pages.tobytes(), [pages]

    def overlap(
        self, data: bytes, payload: np.ndarray, start: int, end: int
    ) -> tuple[bytes, list[np.ndarray], list[np.ndarray]]:
        return data, [], [payload[start // self.page_size : end // self.page_size]]

    def split(self, data: bytes, at: int) -> tuple[bytes, bytes]:
        cut = at // self.page_size * _ID_BYTES
        return data[:cut], data[cut:]

    def trim(self, data: bytes, keep: int) -> tuple[bytes, list[np.ndarray]]:
        cut = keep // self.page_size * _ID_BYTES
        return data[:cut], [np.frombuffer(data, _INT32, offset=cut)]

    def adopt(self, pieces: list[np.ndarray]) -> None:
        pages = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        self.allocator.transfer(pages, _PRIVATE, _TREE)

    def disown(self, pieces: list[np.ndarray]) -> None:
        self.allocator.transfer(_joined(pieces), _TREE, _PRIVATE)

    def discard(self, pieces: list[np.ndarray]) -> None:
        self.allocator.free(_joined(pieces), _PRIVATE)

    def release(self, pieces: list[np.ndarray]) -> None:
        self.allocator.free(_joined(pieces), _TREE)

    def drop(self, values: list[bytes]) -> None:
        self.allocator.free(np.frombuffer(b"".join(values), _INT32), _TREE)

    def evict(self, tree: RadixTree, want: int) -> int:
        return tree.evict_leaves(want)

    def evictable(self, tree: RadixTree) -> int:
        return (tree.total_bytes - tree.pinned_bytes) // tree.page_bytes

    def count(self, data: bytes) -> int:
        return len(data) // _ID_BYTES

    def check(self, held: list[tuple[bytes, int]]) -> None:
        for data, tokens in held:
            assert len(data) // _ID_BYTES * self.page_size == tokens, "pages do not cover the edge"
        pages = np.frombuffer(b"".join([data for data, _ in held]), _INT32)
        expected = np.flatnonzero(self.allocator.states == _TREE)
        assert np.array_equal(np.sort(pages), expected), "the tree's pages are not those it owns"


def path_pages(node: Node, count: int | None = None) -> np.ndarray:
    """The last `count` page ids on the path to `node`, or all of them: int32, read-only."""
    parts: list[bytes] = []
    found = 0
    step: Node | None = node
    while step is not None and step.parent is not None and (count is None or found < count):
        pages = step.data[0]
        parts.append(pages)
        found += len(pages) // _ID_BYTES
        step = step.parent
    parts.reverse()
    surplus = 0 if count is None else found - count
    return np.frombuffer(b"".join(parts), _INT32, offset=surplus * _ID_BYTES)


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
