"""Per-slot page ids of windowed layers.

Owns a table beside the request table's, by the same slots and columns: a column is a page of tokens of the
sequence. Ignores who owns the pages. A row is filled between two ends that both move up: behind its window it
gives pages back, ahead it takes them as it grows.
"""

from __future__ import annotations

import numpy as np


class WindowTable:
    """`pages_SP` int32 [num_slots, max_pages]; row s has pages in columns [firsts[s], ends[s]), 0 elsewhere."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.pages_SP = np.zeros((num_slots, max_pages), dtype=np.int32)
        # Asked for every row of every step: lists answer faster than arrays.
        self.firsts = [0] * num_slots
        self.ends = [0] * num_slots

    def fill(self, slot: int, first: int, pages: np.ndarray) -> None:
        """An empty row gets pages for the columns from `first` on."""
        self.firsts[slot] = first
        self.ends[slot] = first
        self.append(slot, pages)

    def append(self, slot: int, pages: np.ndarray) -> None:
        end = self.ends[slot]
        self.pages_SP[slot, end : end + len(pages)] = pages
        self.ends[slot] = end + len(pages)

    def advance(self, slot: int, first: int) -> None:
        """Forget the columns before `first`."""
        self.pages_SP[slot, self.firsts[slot] : first] = 0
        self.firsts[slot] = first

    def clear(self, slot: int) -> None:
        self.pages_SP[slot, self.firsts[slot] : self.ends[slot]] = 0
        self.firsts[slot] = self.ends[slot] = 0

    def pages(self, slot: int, start: int, end: int) -> np.ndarray:
        """A copy of the slot's columns [start, end)."""
        return self.pages_SP[slot, start:end].copy()

    def check(self) -> None:
        columns_P = np.arange(self.pages_SP.shape[1])
        firsts_S, ends_S = np.array(self.firsts), np.array(self.ends)
        inside_SP = (columns_P >= firsts_S[:, None]) & (columns_P < ends_S[:, None])
        assert np.array_equal(self.pages_SP != 0, inside_SP), "a row has pages outside its ends, or a hole between"
