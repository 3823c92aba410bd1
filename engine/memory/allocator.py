"""Page ids and who owns each of them.

Owns the state of every page id of one pool: free, held by the prefix tree, private to a request,
or in flight (read or written by a transfer that outlives its request). Ignores what a page stores
and how large it is. Page 0 belongs to nobody: page tables are padded with it.

Free ids are a stack: what was freed last is handed out first, in the order in which it was freed, and a
fresh pool from its start. Nobody asks for consecutive ids, for whatever reads pages goes through a table of
them. Choices depend on the order of calls alone: two allocators given the same calls hand out the
same ids.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class PageState(IntEnum):
    FREE = 0
    TREE = 1
    PRIVATE = 2
    IN_FLIGHT = 3


FREE, TREE, PRIVATE, IN_FLIGHT = PageState.FREE, PageState.TREE, PageState.PRIVATE, PageState.IN_FLIGHT

_FEW = 64
"""Up to this many ids a Python loop beats the dozen calls to NumPy that move more."""

_RESERVED = 255
"""State of page 0; equal to none, so that page 0 passes no ownership test."""

_FILL = [bytes([state]) for state in PageState]

_INT32, _UINT32 = np.dtype(np.int32), np.dtype(np.uint32)


class OwnershipError(AssertionError):
    """Pages were freed or transferred by somebody who does not own them, or listed twice."""


class PageAllocator:
    """Pages 1 .. num_pages of one pool; `num_pages` counts usable pages, page 0 not among them."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"num_pages must not be negative, got {num_pages}"
        self.num_pages = num_pages
        self._map = bytearray(num_pages + 1)
        self._map[0] = _RESERVED
        self._states = np.frombuffer(self._map, dtype=np.uint8)
        self.states = self._states.view()
        """State per page id, uint8 [num_pages + 1]; a live view, for reading."""
        self.states.flags.writeable = False
        self._ids = np.arange(num_pages + 1, dtype=np.int32)
        self._ids.flags.writeable = False
        self._stack = self._ids[:0:-1].copy()
        """The free ids are the first `num_free`; the last of them is handed out first."""
        self._places = np.zeros(num_pages + 1, dtype=np.int32)
        """Where in a list of ids an id was last met: an id met twice has but one place."""
        self._counts = [num_pages, 0, 0, 0]

    @property
    def num_free(self) -> int:
        return self._counts[0]

    def count(self, state: int) -> int:
        """Pages in `state`."""
        return self._counts[state]

    def alloc(self, n: int) -> np.ndarray | None:
        """Take `n` free pages as PRIVATE: int32 [n], possibly read-only; None if fewer are free."""
        assert n >= 0, f"cannot allocate {n} pages"
        counts = self._counts
        top = counts[0]
        if n > top:
            return None
        counts[0] = rest = top - n
        counts[2] += n
        if n == 1:
            page = self._stack.item(rest)
            self._map[page] = 2
            return self._ids[page : page + 1]
        ids = self._stack[rest:top][::-1].copy()
        self._states[ids] = 2
        return ids

    def free(self, ids: np.ndarray, owner: int) -> None:
        """Give pages held as `owner` back. All or nothing; raises `OwnershipError`."""
        assert owner, "pages that are free cannot be freed"
        n, counts = len(ids), self._counts
        top = counts[0]
        if n == 1 and 0 < (page := ids.item(0)) <= self.num_pages and self._map[page] == owner:
            self._map[page] = 0
            self._stack[top] = page
        else:
            self._move(ids, owner, 0)
            self._stack[top : top + n] = ids[::-1]
        counts[owner] -= n
        counts[0] = top + n

    def transfer(self, ids: np.ndarray, src: int, dst: int) -> None:
        """Move pages from owner `src` to `dst`, neither of them FREE. All or nothing."""
        assert src and dst, "use alloc and free to move pages from and to FREE"
        n, counts = len(ids), self._counts
        if n == 1 and 0 < (page := ids.item(0)) <= self.num_pages and self._map[page] == src:
            self._map[page] = dst
        else:
            self._move(ids, src, dst)
        counts[src] -= n
        counts[dst] += n

    def hand_over(self, page: int) -> None:
        """`transfer` of one PRIVATE page to the TREE: most inserts do nothing else."""
        filled, counts = self._map, self._counts
        if page < 1 or page > self.num_pages or filled[page] != 2:
            raise self._refusal([page], PRIVATE)
        filled[page] = 1
        counts[2] -= 1
        counts[1] += 1

    def check(self) -> None:
        """Every page is in exactly one state, the counters and the free ids agree with the states."""
        assert self._map[0] == _RESERVED, "page 0 is owned"
        found = np.bincount(self.states[1:], minlength=4).tolist()
        assert found == self._counts, f"states on the map {found}, counted {self._counts}"
        free = np.sort(self._stack[: self._counts[0]])
        assert np.array_equal(free, np.flatnonzero(self.states == 0)), "an id on the stack is not free, or there twice"

    def _move(self, ids: np.ndarray, owner: int, to: int) -> None:
        """Give distinct pages held as `owner` another state: all, or none and raise."""
        assert ids.dtype == _INT32, f"page ids: expected int32, got {ids.dtype}"
        if len(ids) > _FEW:
            self._require(ids, owner)
            self._states[ids] = to
            return
        pages, filled, last = ids.tolist(), self._map, self.num_pages
        for i, page in enumerate(pages):
            if not 0 < page <= last or filled[page] != owner:  # a page met before is no longer the owner's
                for moved in pages[:i]:
                    filled[moved] = owner
                raise self._refusal(pages, owner)
            filled[page] = to

    def _require(self, ids: np.ndarray, owner: int) -> None:
        """Raise unless `ids` are distinct pages held as `owner`."""
        n = len(ids)
        try:
            found = self._states[ids.view(_UINT32)]  # a negative id must not count from the end
        except IndexError:
            raise self._refusal(ids.tolist(), owner) from None
        if found.tobytes() != _FILL[owner] * n or n > self.num_pages:
            raise self._refusal(ids.tolist(), owner)
        order = self._ids[:n]
        self._places[ids] = order
        if self._places[ids].tobytes() != order.tobytes():
            raise self._refusal(ids.tolist(), owner)

    def _refusal(self, ids: list[int], owner: int) -> OwnershipError:
        for page in ids:
            if not 0 < page <= self.num_pages:
                return OwnershipError(f"page {page} is outside 1..{self.num_pages}")
            if self._map[page] != owner:
                found = PageState(self._map[page]).name
                return OwnershipError(f"page {page}: expected {PageState(owner).name}, is {found}")
        return OwnershipError(f"a page is listed twice among {len(ids)} pages")
