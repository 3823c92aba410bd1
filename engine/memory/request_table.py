"""Per-slot state of the sequences that hold pages.

Owns the fixed table indexed by slot: page ids and page counts. Host arrays today; a device
mirror can be indexed by the same slots. Ignores who owns the pages.
"""

from __future__ import annotations

import numpy as np

from engine.memory.window_table import WindowTable


class RequestTable:
    """`pages_SP` int32 [num_slots, max_pages], rows filled from the left, 0 beyond `num_pages_S`.

    `max_pages` bounds one sequence: the context length rounded up to pages. `states_S` are the live slots
    of recurrent states, None for models without any; `windows` the pages of windowed layers, where those
    have their own.
    """

    states_S: np.ndarray | None = None
    windows: WindowTable | None = None

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.pages_SP = np.zeros((num_slots, max_pages), dtype=np.int32)
        self.num_pages_S = np.zeros(num_slots, dtype=np.int32)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return self.pages_SP.shape[0]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """An empty slot, or None when all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} returned twice"
        self.pages_SP[slot, : self.num_pages_S[slot]] = 0
        self.num_pages_S[slot] = 0
        self._free.append(slot)

    def append(self, slot: int, pages: np.ndarray) -> None:
        count = int(self.num_pages_S[slot])
        self.pages_SP[slot, count : count + len(pages)] = pages
        self.num_pages_S[slot] = count + len(pages)

    def append_each(self, slots_M: np.ndarray, counts_M: np.ndarray, pages: np.ndarray) -> None:
        """The first `counts_M[0]` pages to the first slot, and so on."""
        ends_M = np.cumsum(counts_M)
        columns = np.arange(len(pages)) + np.repeat(self.num_pages_S[slots_M] - (ends_M - counts_M), counts_M)
        self.pages_SP[np.repeat(slots_M, counts_M), columns] = pages
        self.num_pages_S[slots_M] += counts_M

    def pages(self, slot: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """A copy of the slot's page ids [start, end)."""
        stop = int(self.num_pages_S[slot]) if end is None else end
        return self.pages_SP[slot, start:stop].copy()

    def check(self) -> None:
        assert len(set(self._free)) == len(self._free), "a slot is listed free twice"
        for slot in self._free:
            assert self.num_pages_S[slot] == 0, f"free slot {slot} holds pages"
