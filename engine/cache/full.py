"""Full attention: one page id for every page of tokens in the tree.

Owns how page ids follow the tree's edges and how they change owner. A node's value is its int32
array of page ids; a payload is a request's array of PRIVATE page ids. Every page boundary is
usable and the path's pins hold every page, so this component adds no rule of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.cache.component import Component
from engine.cache.handles import join_pages
from engine.memory.allocator import PageAllocator, PageState

if TYPE_CHECKING:
    from engine.cache.radix_tree import RadixTree

_TREE, _PRIVATE = PageState.TREE, PageState.PRIVATE


class FullAttention(Component):
    name = "full"
    every_boundary = True

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self.allocator = allocator
        self.page_size = page_size

    def attach(self, payload: np.ndarray, start: int, end: int) -> tuple[np.ndarray, list[np.ndarray]]:
        pages = payload[start // self.page_size : end // self.page_size].copy()
        return pages, [pages]

    def grow(self, data: np.ndarray, payload: np.ndarray, start: int, end: int) -> tuple[np.ndarray, list[np.ndarray]]:
        pages = payload[start // self.page_size : end // self.page_size] if start else payload
        return join_pages([data, pages]), [pages]

    def overlap(
        self, data: np.ndarray, payload: np.ndarray, start: int, end: int
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        return data, [], [payload[start // self.page_size : end // self.page_size]]

    def split(self, data: np.ndarray, at: int) -> tuple[np.ndarray, np.ndarray]:
        cut = at // self.page_size
        return data[:cut], data[cut:]

    def trim(self, data: np.ndarray, keep: int) -> tuple[np.ndarray, list[np.ndarray]]:
        cut = keep // self.page_size
        return data[:cut], [data[cut:]]

    def adopt(self, pieces: list[np.ndarray]) -> None:
        self.allocator.transfer(pieces[0] if len(pieces) == 1 else join_pages(pieces), _PRIVATE, _TREE)

    def disown(self, pieces: list[np.ndarray]) -> None:
        self.allocator.transfer(join_pages(pieces), _TREE, _PRIVATE)

    def discard(self, pieces: list[np.ndarray]) -> None:
        self.allocator.free(join_pages(pieces), _PRIVATE)

    def release(self, pieces: list[np.ndarray]) -> None:
        self.allocator.free(join_pages(pieces), _TREE)

    def drop(self, values: list[np.ndarray]) -> None:
        self.allocator.free(join_pages(values), _TREE)

    def evict(self, tree: RadixTree, want: int) -> int:
        return tree.evict_leaves(want)

    def count(self, data: np.ndarray) -> int:
        return len(data)

    def check(self, held: list[tuple[np.ndarray, int]]) -> None:
        for data, tokens in held:
            assert data.dtype == np.int32 and len(data) * self.page_size == tokens, "pages do not cover the edge"
        pages = join_pages([data for data, _ in held]) if held else np.empty(0, np.int32)
        expected = np.flatnonzero(self.allocator.states == _TREE)
        assert np.array_equal(np.sort(pages), expected), "the tree's pages are not those it owns"
