"""Cached units that outlive device memory: what is kept on the host, and what is known of it.

Owns a room for each kind of unit (pages, window pages, states), divided as the device's memory is, and counts what
comes and goes. A unit is all that lies under one id, so that keys, index keys and a drafter's states move together.
Nothing that fails here is ever more than a miss. Ignores tokens and trees: units are known by namespace and digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.cache.key import Namespace
from engine.errors import InvalidRequest
from engine.memory.host_arena import HostArena, HostRow
from engine.memory.host_lanes import Arrival, HostLanes
from engine.memory.host_units import UnitLayout
from engine.metrics import EngineCounters

Kinds = dict[str, list[torch.Tensor]]
"""By component: the tensors [units, ...] that hold its units."""

FAULTS = (RuntimeError, MemoryError, OSError)
"""What a copy may fail with: it is then a miss."""


class HostTier:
    """`num_bytes` of the host's memory for units of these kinds, those on a GPU pinned."""

    def __init__(self, kinds: Kinds, num_bytes: int, counters: EngineCounters) -> None:
        self.limit_bytes = num_bytes
        self.counters = counters
        self.layouts = {kind: UnitLayout(tensors) for kind, tensors in kinds.items()}
        device = next(iter(self.layouts.values())).device
        self.arenas = {
            kind: HostArena(rows, self.layouts[kind].row_bytes, device.type == "cuda", counters)
            for kind, rows in _division(kinds, self.layouts, num_bytes).items()
        }
        self.lanes = HostLanes(device, max(layout.row_bytes for layout in self.layouts.values()))

    def gauges(self) -> dict[str, int]:
        used = sum(arena.used * arena.row_bytes for arena in self.arenas.values())
        return {"host_bytes": used, "host_limit_bytes": self.limit_bytes}

    def knows(self, space: Namespace) -> bool:
        return any(arena.knows(space) for arena in self.arenas.values())

    def find(self, kind: str, space: Namespace, digest: bytes) -> HostRow | None:
        return self.arenas[kind].find(space, digest)

    def keep(self, kind: str, space: Namespace, units: Sequence[tuple[bytes, int]]) -> None:
        """Copy units (digest, id) to the host, unless it has them; the later ones outlive the earlier ones."""
        arena = self.arenas[kind]
        rows: list[HostRow] = []
        ids: list[int] = []
        for digest, unit in units[-arena.num_rows :]:
            row = arena.find(space, digest)
            if row is not None:
                arena.touch(row)
            elif (row := arena.put(space, digest)) is not None:
                rows.append(row)
                ids.append(unit)
        placed = [(row, unit) for row, unit in zip(rows, ids, strict=True) if row.slot >= 0]
        if not placed:
            return
        try:
            self.lanes.keep(self.layouts[kind], [unit for _, unit in placed], [row for row, _ in placed], arena)
        except FAULTS:
            self.counters.host_failed += len(placed)
            for row, _ in placed:
                arena.drop(row)
            return
        self.counters.host_spilled += len(placed)
        self.counters.host_spilled_bytes += len(placed) * arena.row_bytes

    def bring(self, kind: str, rows: Sequence[HostRow]) -> Arrival | None:
        """Start to copy rows back; None where it failed."""
        try:
            return self.lanes.bring(self.layouts[kind], rows, self.arenas[kind])
        except FAULTS:
            self.counters.host_failed += len(rows)
            return None

    def arrived(self, kind: str, arrival: Arrival, ids: Sequence[int]) -> list[bool]:
        """Put rows that are whole into these units. Which were; waits for the copy."""
        try:
            whole = arrival.whole()
            arrival.unpack(ids)
        except FAULTS:
            whole = [False] * len(ids)
        finally:
            self.lanes.end(arrival)
        good = sum(whole)
        self.counters.host_failed += len(whole) - good
        self.counters.host_restored += good
        self.counters.host_restored_bytes += good * self.arenas[kind].row_bytes
        return whole

    def forget(self, predicate: Callable[[Namespace], bool]) -> None:
        """Nothing of these namespaces is ever found again."""
        for arena in self.arenas.values():
            for space in arena.spaces():
                if predicate(space):
                    arena.forget(space)

    def check(self) -> None:
        for arena in self.arenas.values():
            arena.check()


def _division(kinds: Kinds, layouts: dict[str, UnitLayout], num_bytes: int) -> dict[str, int]:
    """Rows of each kind: memory is divided as the device's is."""
    device = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kinds.items()}
    total = sum(device.values())
    rows = {kind: num_bytes * device[kind] // total // layouts[kind].row_bytes for kind in kinds}
    if not all(rows.values()):
        least = max(-(-layouts[kind].row_bytes * total // device[kind]) for kind in kinds)
        raise InvalidRequest(
            field="cache.host_mib", expected=f"0 or at least {-(-least >> 20)}", actual=num_bytes >> 20
        )
    return rows
