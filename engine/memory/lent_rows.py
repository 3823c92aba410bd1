"""Rows of a device buffer that few slots need, lent to those that do.

Owns which row belongs to which slot and how many rows exist. Ignores what rows hold: whoever has
the buffer enlarges it (`grown`) when `capacity` has passed its length.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

FIRST_ROWS = 8


class LentRows:
    """A slot may hold several rows, each under a key; slots that ask for equal keys share a row.
    A row is free again once its last holder has given it back."""

    def __init__(self) -> None:
        self.capacity = 0
        self._free: list[int] = []
        self._row_of: dict[Hashable, int] = {}
        self._users: dict[Hashable, int] = {}
        self._held: dict[int, list[Hashable]] = {}

    def take(self, slot: int, key: Hashable) -> tuple[int, bool]:
        """The key's row, and whether it is new and has to be filled."""
        fresh = key not in self._row_of
        if fresh:
            if not self._free:
                rows = max(FIRST_ROWS, 2 * self.capacity)
                self._free = list(range(rows - 1, self.capacity - 1, -1))
                self.capacity = rows
            self._row_of[key] = self._free.pop()
            self._users[key] = 0
        self._users[key] += 1
        self._held.setdefault(slot, []).append(key)
        return self._row_of[key], fresh

    def give_back(self, slot: int) -> None:
        """Whatever the slot holds."""
        for key in self._held.pop(slot, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._free.append(self._row_of.pop(key))

    @property
    def num_lent(self) -> int:
        return len(self._row_of)


def grown(buffer: torch.Tensor, rows: int) -> torch.Tensor:
    """A longer copy, zeros at its end."""
    larger = torch.zeros((rows, *buffer.shape[1:]), dtype=buffer.dtype, device=buffer.device)
    larger[: buffer.shape[0]] = buffer
    return larger
