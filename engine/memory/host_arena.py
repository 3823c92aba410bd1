"""Rows of host memory, by what they hold.

Owns one kind of unit's room on the host: which namespace and digest each row belongs to, and the order in which rows
are given up. Ignores how rows are filled (`engine.memory.host_lanes`) and what digests are of.

Forgetting a namespace costs nothing at once: its rows are taken first when room is wanted.

Shapes: U rows, X bytes of a row.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

from engine.cache.key import Namespace
from engine.memory.slab import HostSlab
from engine.metrics import EngineCounters


class HostRow:
    """`slot` is a row of the arena, -1 once it is somebody else's. `held` rows are being read."""

    __slots__ = ("digest", "held", "slot", "space")

    def __init__(self, space: Namespace, digest: bytes, slot: int) -> None:
        self.space: Namespace | None = space
        """None once dropped."""
        self.digest = digest
        self.slot = slot
        self.held = 0

    @property
    def tag(self) -> int:
        return int.from_bytes(self.digest[:8], "little", signed=True)


class HostArena:
    """`pinned` memory is registered with the GPU's driver, so that copies need not wait for the host."""

    def __init__(self, num_rows: int, row_bytes: int, pinned: bool, counters: EngineCounters) -> None:
        assert num_rows > 0, f"an arena of {num_rows} rows holds nothing"
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self.data_UX = HostSlab(num_rows * row_bytes).data_U.view(num_rows, row_bytes)
        if pinned:
            _register(self.data_UX)
        self._counters = counters
        self._free = list(range(num_rows - 1, -1, -1))
        self._spaces: dict[Namespace, dict[bytes, HostRow]] = {}
        self._forgotten: list[dict[bytes, HostRow]] = []
        self._order: OrderedDict[HostRow, None] = OrderedDict()
        self._held: dict[HostRow, None] = {}

    @property
    def used(self) -> int:
        """Rows that hold something, forgotten ones included until they are taken."""
        return self.num_rows - len(self._free)

    def knows(self, space: Namespace) -> bool:
        return space in self._spaces

    def find(self, space: Namespace, digest: bytes) -> HostRow | None:
        rows = self._spaces.get(space)
        return None if rows is None else rows.get(digest)

    def touch(self, row: HostRow) -> None:
        """Used now."""
        if not row.held:
            self._order.move_to_end(row)

    def put(self, space: Namespace, digest: bytes) -> HostRow | None:
        """A row for something new; None where all are held."""
        if not self._free and not self._make_room():
            return None
        row = HostRow(space, digest, self._free.pop())
        self._spaces.setdefault(space, {})[digest] = row
        self._order[row] = None
        return row

    def drop(self, row: HostRow) -> None:
        """What it holds is not worth keeping."""
        space, row.space = row.space, None
        rows = None if space is None else self._spaces.get(space)
        if space is not None and rows is not None and rows.get(row.digest) is row:
            del rows[row.digest]
            if not rows:
                del self._spaces[space]
        if not row.held and row.slot >= 0:
            self._give_up(row)

    def hold(self, row: HostRow) -> None:
        """Keep it until `let_go`."""
        if not row.held:
            del self._order[row]
            self._held[row] = None
        row.held += 1

    def let_go(self, row: HostRow) -> None:
        row.held -= 1
        if not row.held:
            del self._held[row]
            self._order[row] = None
            if row.space is None:
                self._give_up(row)

    def forget(self, space: Namespace) -> None:
        rows = self._spaces.pop(space, None)
        if rows is not None:
            self._forgotten.append(rows)
            for row in self._held:
                if rows.get(row.digest) is row:
                    del rows[row.digest]
                    row.space = None

    def spaces(self) -> list[Namespace]:
        return list(self._spaces)

    def check(self) -> None:
        known = [row for rows in self._spaces.values() for row in rows.values()]
        known += [row for rows in self._forgotten for row in rows.values() if row.slot >= 0]
        slots = [row.slot for row in known] + self._free
        slots += [row.slot for row in self._held if row.space is None]
        assert sorted(slots) == list(range(self.num_rows)), "a row of host memory is lost or listed twice"
        assert all((row in self._order) != bool(row.held) for row in known), "a row can never be given up"

    def _make_room(self) -> bool:
        while self._forgotten:
            rows = self._forgotten[-1]
            if not rows:
                self._forgotten.pop()
                continue
            _, row = rows.popitem()
            if row.slot >= 0:
                row.space = None
                self._give_up(row)
                return True
        if not self._order:
            return False
        self.drop(next(iter(self._order)))
        return True

    def _give_up(self, row: HostRow) -> None:
        del self._order[row]
        self._free.append(row.slot)
        row.slot = -1
        self._counters.host_dropped += 1


def _register(data: torch.Tensor) -> None:
    """Pin memory that torch did not allocate: its own pinned allocations are rounded up to powers of two."""
    runtime: Any = torch.cuda.cudart()
    status = runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0)
    if int(status) != 0:
        raise RuntimeError(f"pinning {data.nbytes} bytes of host memory failed: {status}")
    weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
