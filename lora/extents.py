"""Which parts of a run of elements are taken.

Owns first-fit allocation with neighbours merged on return. Ignores what is stored.
"""

from __future__ import annotations


class Extents:
    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)] if size else []
        self._taken: dict[int, int] = {}

    def take(self, count: int) -> int | None:
        """The start of `count` neighbouring elements, or None where there are none."""
        assert count > 0, f"{count} elements"
        for index, (start, length) in enumerate(self._free):
            if length >= count:
                self._free[index : index + 1] = [(start + count, length - count)] if length > count else []
                self._taken[start] = count
                return start
        return None

    def give_back(self, start: int) -> None:
        self._free = _merged([*self._free, (start, self._taken.pop(start))])

    def longest_without(self, starts: list[int]) -> int:
        """The longest free extent if these were given back."""
        free = _merged([*self._free, *((start, self._taken[start]) for start in starts)])
        return max((length for _, length in free), default=0)

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    def check(self) -> None:
        """Assert that free and taken extents tile the run."""
        end = 0
        for start, length in sorted([*self._free, *self._taken.items()]):
            assert start == end and length > 0, f"extent at {start}, expected {end}"
            end += length
        assert end == self.size, f"extents cover {end} of {self.size}"


def _merged(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, length in sorted(extents):
        if merged and sum(merged[-1]) == begin:
            merged[-1] = merged[-1][0], merged[-1][1] + length
        else:
            merged.append((begin, length))
    return merged
