"""Page ids and who owns each of them.

Owns the state of every page id of one pool: free, held by the prefix tree, private to a request,
or in flight (read or written by a transfer that outlives its request). Ignores what a page stores
and how large it is. Page 0 belongs to nobody: page tables are padded with it.

Free pages are kept as maximal extents [start, stop) of consecutive ids, in bins by power of two
of their length, so that requests get runs of consecutive ids and a run costs a few dictionary
operations. An extent is named by its stop, which stays when pages are taken from its front.
Choices depend on the order of calls alone: two allocators given the same calls hand out the same
ids.
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

_FEW = 32
"""Up to this many ids a Python loop beats NumPy's call overhead."""

_RESERVED = 255
"""Map value of page 0; equal to no state, so that page 0 passes no ownership test."""

_FILL = [bytes([state]) for state in PageState]

Runs = list[tuple[int, int]]
"""Disjoint ranges [start, stop) of page ids."""


class OwnershipError(AssertionError):
    """Pages were freed or transferred by somebody who does not own them, or listed twice."""


class PageAllocator:
    """Pages 1 .. num_pages of one pool; `num_pages` counts usable pages, page 0 not among them."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"num_pages must not be negative, got {num_pages}"
        self.num_pages = num_pages
        self._map = bytearray(num_pages + 1)
        self._map[0] = _RESERVED
        self.states = np.frombuffer(self._map, dtype=np.uint8)
        """State per page id, uint8 [num_pages + 1]; a live view, for reading."""
        self.states.flags.writeable = False
        self._ids = np.arange(num_pages + 1, dtype=np.int32)
        self._ids.flags.writeable = False
        self._id_bytes = self._ids.tobytes()
        self._counts = [0, 0, 0, 0]
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._bins: list[dict[int, None]] = [{} for _ in range(num_pages.bit_length() + 1)]
        self._filled = 0
        if num_pages:
            self._counts = [0, 0, num_pages, 0]
            self._map[1:] = _FILL[PRIVATE] * num_pages
            self.free(self._ids[1:], PRIVATE)

    @property
    def num_free(self) -> int:
        return self._counts[0]

    def count(self, state: int) -> int:
        """Pages in `state`."""
        return self._counts[state]

    def alloc(self, n: int, after: int = 0) -> np.ndarray | None:
        """Take `n` free pages as PRIVATE: int32 [n], possibly read-only; None if fewer are free.

        One run of consecutive ids where an extent is long enough, else the longest extents. With
        `after`, the run starts at id `after + 1` where that is free, so that a growing request's
        pages stay consecutive.
        """
        if n <= 0:
            assert n == 0, f"cannot allocate {n} pages"
            return self._ids[:0]
        counts = self._counts
        if n > counts[0]:
            return None
        counts[0] -= n
        counts[2] += n
        if after:
            stop = self._stop_of.get(after + 1, 0)
            if stop - after > n:
                return self._take(stop, n)
        order = (n - 1).bit_length()
        fitting = self._filled >> order
        if fitting:
            bin_ = self._bins[order + (fitting & -fitting).bit_length() - 1]
            return self._take(next(reversed(bin_)), n)
        for stop in self._bins[n.bit_length() - 1]:
            if stop - self._start_of[stop] >= n:
                return self._take(stop, n)
        return self._gather(n)

    def free(self, ids: np.ndarray, owner: int) -> None:
        """Give pages held as `owner` back. All or nothing; raises `OwnershipError`."""
        assert owner, "pages that are free cannot be freed"
        filled, stop_of, start_of = self._map, self._stop_of, self._start_of
        bins = self._bins
        for start, stop in self._runs(ids, owner):
            if stop - start == 1:
                filled[start] = 0
            else:
                filled[start:stop] = _FILL[0] * (stop - start)
            if stop in stop_of:
                following = stop_of[stop]
                self._remove_extent(stop, following)
                stop = following
            if start in start_of:
                before = start_of[start]
                self._remove_extent(before, start)
                start = before
            stop_of[start] = stop
            start_of[stop] = start
            order = (stop - start).bit_length() - 1
            bins[order][stop] = None
            self._filled |= 1 << order
        self._counts[owner] -= len(ids)
        self._counts[0] += len(ids)

    def transfer(self, ids: np.ndarray, src: int, dst: int) -> None:
        """Move pages from owner `src` to `dst`, neither of them FREE. All or nothing."""
        assert src and dst, "use alloc and free to move pages from and to FREE"
        n = len(ids)
        counts = self._counts
        if n == 1 and 0 < (page := ids.item(0)) <= self.num_pages and self._map[page] == src:
            self._map[page] = dst
            counts[src] -= 1
            counts[dst] += 1
            return
        fill = _FILL[dst]
        for start, stop in self._runs(ids, src):
            self._map[start:stop] = fill * (stop - start)
        counts[src] -= n
        counts[dst] += n

    def hand_over(self, page: int) -> None:
        """`transfer` of one PRIVATE page to the TREE: most inserts do nothing else."""
        filled = self._map
        if not 0 < page <= self.num_pages or filled[page] != 2:
            raise self._not_owned(range(page, page + 1), PRIVATE)
        filled[page] = 1
        counts = self._counts
        counts[2] -= 1
        counts[1] += 1

    def check(self) -> None:
        """Every page is in exactly one state, the counters and the extents agree with the map."""
        assert self._map[0] == _RESERVED, "page 0 is owned"
        found = np.bincount(self.states[1:], minlength=4).tolist()
        assert found == self._counts, f"states on the map {found}, counted {self._counts}"
        assert sum(self._counts) == self.num_pages, f"{self._counts} do not add up to {self.num_pages}"
        covered = np.zeros(self.num_pages + 1, dtype=np.uint8)
        for start, stop in self._stop_of.items():
            assert stop > start and self._start_of.get(stop) == start, f"extent {start} lacks its end"
            assert stop in self._bins[(stop - start).bit_length() - 1], f"extent {start} is in no bin"
            assert stop not in self._stop_of, f"extents meet at {stop}"
            covered[start:stop] += 1
        assert len(self._stop_of) == len(self._start_of) == sum(map(len, self._bins)), "stray extent"
        assert self._filled == sum(1 << i for i, bin_ in enumerate(self._bins) if bin_), "wrong bin mask"
        assert np.array_equal(covered[1:], self.states[1:] == 0), "extents disagree with the map"

    def _take(self, stop: int, n: int) -> np.ndarray:
        """The first `n` pages of the extent that ends at `stop`."""
        start = self._start_of[stop]
        middle = start + n
        length = stop - start
        order = length.bit_length() - 1
        del self._stop_of[start]
        if length > n:
            self._start_of[stop] = middle
            self._stop_of[middle] = stop
            rest = (length - n).bit_length() - 1
            if rest != order:
                self._drop_from_bin(order, stop)
                self._bins[rest][stop] = None
                self._filled |= 1 << rest
        else:
            del self._start_of[stop]
            self._drop_from_bin(order, stop)
        if n == 1:
            self._map[start] = 2
        else:
            self._map[start:middle] = _FILL[2] * n
        return self._ids[start:middle]

    def _gather(self, n: int) -> np.ndarray:
        parts = []
        while n:
            stop = next(reversed(self._bins[self._filled.bit_length() - 1]))
            length = min(n, stop - self._start_of[stop])
            parts.append(self._take(stop, length))
            n -= length
        return np.concatenate(parts)

    def _remove_extent(self, start: int, stop: int) -> None:
        del self._stop_of[start]
        del self._start_of[stop]
        self._drop_from_bin((stop - start).bit_length() - 1, stop)

    def _drop_from_bin(self, order: int, stop: int) -> None:
        bin_ = self._bins[order]
        del bin_[stop]
        if not bin_:
            self._filled ^= 1 << order

    def _runs(self, ids: np.ndarray, owner: int) -> Runs:
        """`ids` as disjoint runs, all held as `owner`; raises before anything has changed."""
        n = len(ids)
        if n == 0:
            return []
        first: int = ids.item(0)
        total = self.num_pages + 1
        if n == 1:
            if not 0 < first < total or self._map[first] != owner:
                raise self._not_owned(range(first, first + 1), owner)
            return [(first, first + 1)]
        if ids.tobytes() == self._id_bytes[4 * first : 4 * (first + n)]:
            runs = [(first, first + n)]
        else:
            assert ids.dtype == np.int32, f"page ids: expected int32, got {ids.dtype}"
            if n > _FEW:
                ordered = np.sort(ids)
                runs = _runs_of_many(ordered)
                if ordered[0] > 0 and ordered[-1] < total and bool((self.states[ordered] == owner).all()):
                    return runs
            else:
                runs = _runs_of_few(ids.tolist())
        for start, stop in runs:
            if start <= 0 or stop > total or self._map.count(owner, start, stop) != stop - start:
                raise self._not_owned(range(start, stop), owner)
        return runs

    def _not_owned(self, pages: range, owner: int) -> OwnershipError:
        for page in pages:
            if not 0 < page <= self.num_pages:
                return OwnershipError(f"page {page} is outside 1..{self.num_pages}")
            if self._map[page] != owner:
                found = PageState(self._map[page]).name
                return OwnershipError(f"page {page}: expected {PageState(owner).name}, is {found}")
        raise AssertionError(f"all of {pages} are {PageState(owner).name}")


def _runs_of_few(ids: list[int]) -> Runs:
    ids.sort()
    start = ids[0]
    stop = start + 1
    runs = []
    for page in ids[1:]:
        if page != stop:
            if page < stop:
                raise OwnershipError(f"page {page} is listed twice")
            runs.append((start, stop))
            start = page
        stop = page + 1
    runs.append((start, stop))
    return runs


def _runs_of_many(ids: np.ndarray) -> Runs:
    steps = ids[1:] - ids[:-1]
    breaks = (steps != 1).nonzero()[0]
    if len(breaks) and steps[breaks].min() == 0:
        raise OwnershipError(f"a page is listed twice among {len(ids)} pages")
    starts = ids[np.concatenate(([0], breaks + 1))].tolist()
    stops = ids[np.concatenate((breaks, [len(ids) - 1]))].tolist()
    return [(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]
