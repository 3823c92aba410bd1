"""Rows on their way between device and host.

Owns the staging blocks, the stream that copies ride and what is in flight. Units are packed into staging and
unpacked from it in the order of all other work, so that no reader or writer of a pool ever meets a copy; only the
way between staging and the host is taken by a stream of its own, which goes by its order too: a row that is still
on its way out is whole before it is read back, and a row is read before somebody else's arrives in it. Without a
GPU a copy is done when the call returns. Ignores which rows are worth moving.

Shapes: N rows, X bytes of a row, U rows of an arena.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.memory.host_arena import HostArena, HostRow
from engine.memory.host_units import UnitLayout
from engine.memory.transfer import send

BLOCK_BYTES = 32 << 20
"""Staged at once at most, unless one row is larger."""
BLOCKS = 2
"""Of staging in each direction: one travels while the other is filled."""


def staging_bytes(widest: int) -> int:
    """Device memory that staging takes for rows of at most `widest` bytes."""
    return 2 * BLOCKS * max(BLOCK_BYTES, widest)


class Block:
    """Staging memory on a GPU; `free` is when what it last held has been read."""

    __slots__ = ("data_B", "free")

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.data_B = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.free = torch.cuda.Event()

    def rows(self, count: int, row_bytes: int) -> torch.Tensor:
        return self.data_B[: count * row_bytes].view(count, row_bytes)


class Arrival:
    """Rows that come back: whether they are here, which are whole, and their way into the pool."""

    def __init__(self, layout: UnitLayout, rows_NX: torch.Tensor, whole_N: torch.Tensor) -> None:
        self._layout, self._rows_NX, self._whole_N = layout, rows_NX, whole_N
        self.count = len(rows_NX)
        self.event: torch.cuda.Event | None = None
        self.block: Block | None = None

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()

    def whole(self) -> list[bool]:
        """By row; waits for the copy."""
        if self.event is not None:
            self.event.synchronize()
        return self._whole_N.tolist()

    def unpack(self, ids: Sequence[int]) -> None:
        """Into these units, for those of the rows that are whole."""
        whole = self._whole_N.tolist()
        places = [place for place, good in enumerate(whole) if good]
        if places:
            device = self._layout.device
            rows_NX = self._rows_NX
            if len(places) < len(whole):
                rows_NX = rows_NX[send(np.array(places), device)]
            self._layout.unpack(rows_NX, send(np.array([ids[place] for place in places]), device))


class HostLanes:
    """`widest` is the largest row in bytes."""

    def __init__(self, device: torch.device, widest: int) -> None:
        self._device = device
        self._out: list[Block] = []
        self._in: list[Block] = []
        self._stream: torch.cuda.Stream | None = None
        self._block_bytes = max(BLOCK_BYTES, widest)
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._out = [Block(self._block_bytes, device) for _ in range(BLOCKS)]
            self._in = [Block(self._block_bytes, device) for _ in range(BLOCKS)]

    def most(self, layout: UnitLayout) -> int:
        """Rows that one copy may move."""
        return self._block_bytes // layout.row_bytes

    @property
    def ready(self) -> bool:
        """Whether `bring` could start now."""
        return self._stream is None or bool(self._in)

    def keep(self, layout: UnitLayout, ids: Sequence[int], rows: Sequence[HostRow], arena: HostArena) -> None:
        """Copy units to the host; the units are free for others at once."""
        most = self.most(layout)
        for first in range(0, len(ids), most):
            self._keep(layout, ids[first : first + most], rows[first : first + most], arena)

    def bring(self, layout: UnitLayout, rows: Sequence[HostRow], arena: HostArena) -> Arrival:
        """Copy at most `most` rows back."""
        tags_N = send(_tags(rows), self._device)
        if self._stream is None:
            rows_NX = arena.data_UX[torch.tensor([row.slot for row in rows])]
            return Arrival(layout, rows_NX, layout.whole(rows_NX, tags_N))
        block = self._in[-1]
        rows_NX = block.rows(len(rows), layout.row_bytes)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for place, row in enumerate(rows):
                rows_NX[place].copy_(arena.data_UX[row.slot], non_blocking=True)
            tags_N.record_stream(self._stream)
            whole_N = layout.whole(rows_NX, tags_N).to("cpu", non_blocking=True)
        arrival, event = Arrival(layout, rows_NX, whole_N), torch.cuda.Event()
        event.record(self._stream)
        arrival.event, arrival.block = event, self._in.pop()
        return arrival

    def end(self, arrival: Arrival) -> None:
        """Nobody needs what arrived any longer, beyond what has been launched. It must have arrived."""
        if arrival.block is not None:
            self._in.insert(0, arrival.block)
            arrival.block = None

    def _keep(self, layout: UnitLayout, ids: Sequence[int], rows: Sequence[HostRow], arena: HostArena) -> None:
        ids_N, tags_N = send(np.array(ids), self._device), send(_tags(rows), self._device)
        if self._stream is None:
            rows_NX = torch.empty(len(ids), layout.row_bytes, dtype=torch.uint8)
            layout.pack(ids_N, tags_N, rows_NX)
            arena.data_UX[torch.tensor([row.slot for row in rows])] = rows_NX
            return
        self._out.append(block := self._out.pop(0))
        main = torch.cuda.current_stream(self._device)
        main.wait_event(block.free)
        rows_NX = block.rows(len(ids), layout.row_bytes)
        layout.pack(ids_N, tags_N, rows_NX)
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            for place, row in enumerate(rows):
                arena.data_UX[row.slot].copy_(rows_NX[place], non_blocking=True)
        block.free.record(self._stream)


def _tags(rows: Sequence[HostRow]) -> np.ndarray:
    return np.array([row.tag for row in rows], np.int64)
