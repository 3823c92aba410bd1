"""Adapters on the device: the memory kernels read, and the tables they find things by.

Owns one run of elements, its slots, and the order of copies against readers. Ignores which adapter
should be there (`lora.residency`).

A slot is a row of the tables; its factors lie anywhere in the run, as long as they are together, so that
ranks of every size share the memory without a slot of the largest. Slot 0 is the base policy: rank 0
everywhere, nothing is ever written to it. Copies run on a stream of their own: they wait for every
reader launched before the memory was given back, and readers wait for the copy of their slot.

Shapes: U elements, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lora.extents import Extents
from lora.geometry import Geometry, Kind
from lora.packing import ALIGNMENT, Packed, SiteLayout, table_rows, views

BASE = 0


@dataclass(frozen=True, slots=True)
class Traits:
    """What of a slot decides which kernels serve it: its widest and narrowest padded rank, whether anything has
    a bias, and whether it adapts the embedding and the head."""

    rank: int
    least: int
    biased: bool
    embedding: bool
    head: bool

    @staticmethod
    def of(packed: Packed, geometry: Geometry) -> Traits:
        adapted = [site for site, layout in enumerate(packed.sites) if layout.rank]
        ranks, kinds = {packed.sites[site].rank for site in adapted}, {geometry.sites[site].kind for site in adapted}
        return Traits(max(ranks), min(ranks), packed.biased, Kind.EMBEDDING in kinds, Kind.HEAD in kinds)


class DevicePool:
    """`num_bytes` of factors for at most `max_slots` adapters beside the base, in `storage_U` (uint8) where the
    caller has the memory.

    `offsets_SX2` int64, `ranks_SX4` int32 and `scales_SX3` float32 are `table_rows` of every slot, for
    X sites.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        device: torch.device,
        num_bytes: int,
        max_slots: int,
        storage_U: torch.Tensor | None = None,
    ) -> None:
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        elements = num_bytes // dtype.itemsize // ALIGNMENT * ALIGNMENT
        # Nothing is read before it was written, and the host gives memory only as it is touched.
        if storage_U is None:
            storage_U = torch.empty(elements * dtype.itemsize, dtype=torch.uint8, device=device)
        self.values_U = storage_U[: elements * dtype.itemsize].view(dtype)
        shape = 1 + max_slots, len(geometry.sites)
        self.offsets_SX2 = torch.zeros(*shape, 2, dtype=torch.int64, device=device)
        self.ranks_SX4 = torch.zeros(*shape, 4, dtype=torch.int32, device=device)
        self.scales_SX3 = torch.zeros(*shape, 3, dtype=torch.float32, device=device)
        self._extents = Extents(elements)
        self._free_slots = list(range(max_slots, 0, -1))
        self._held: dict[int, tuple[int, Packed]] = {}
        self._traits: dict[int, Traits] = {}
        self._loads: dict[int, int] = {}
        self._num_loads = 0
        self._ready: dict[int, torch.cuda.Event] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read: torch.cuda.Event | None = None
        """Behind every launch that may read memory given back since, and behind the tables' first zeros."""
        if self._stream is not None:
            self._read = _recorded(torch.cuda.current_stream(device))

    def load(self, packed: Packed) -> int | None:
        """Copy an adapter in; its slot, or None where there is no room. Readers call `await_ready`."""
        if not self._free_slots:
            return None
        start = self._extents.take(_whole(packed))
        if start is None:
            return None
        slot = self._free_slots.pop()
        self._held[slot] = start, packed
        self._traits[slot] = Traits.of(packed, self.geometry)
        self._num_loads += 1
        self._loads[slot] = self._num_loads
        if self._stream is None:
            self._copy(slot, start, packed)
            return slot
        if self._read is not None:
            self._stream.wait_event(self._read)
        with torch.cuda.stream(self._stream):
            self._copy(slot, start, packed)
            self._ready[slot] = _recorded(self._stream)
        return slot

    def free(self, slot: int) -> None:
        """The memory is overwritten only when all launched so far has run."""
        start, _ = self._held.pop(slot)
        del self._traits[slot], self._loads[slot]
        self._extents.give_back(start)
        self._free_slots.append(slot)
        self._ready.pop(slot, None)
        if self._stream is not None:
            # A copy that nobody waited for must not outlive the slot either.
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._read = _recorded(torch.cuda.current_stream(self.device))

    def await_ready(self, slots: set[int]) -> None:
        """Make launches from here on see these slots' factors."""
        for slot in sorted(slots & set(self._ready)):
            torch.cuda.current_stream(self.device).wait_event(self._ready.pop(slot))

    @staticmethod
    def size_of(packed: Packed) -> int:
        """Bytes that an adapter takes."""
        return _whole(packed) * packed.values_U.itemsize

    def could_load(self, packed: Packed, slots: list[int]) -> bool:
        """Whether there is room once these slots are free."""
        if not (self._free_slots or slots):
            return False
        return self._extents.longest_without([self._held[slot][0] for slot in slots]) >= _whole(packed)

    def layout(self, slot: int, site: int) -> SiteLayout:
        return SiteLayout() if slot == BASE else self._held[slot][1].sites[site]

    def traits(self, slot: int) -> Traits:
        """Of an adapter's slot."""
        return self._traits[slot]

    def load_number(self, slot: int) -> int:
        """What tells an adapter's stay in a slot from every other one."""
        return self._loads[slot]

    def factors(self, slot: int, site: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Views of a slot's factors at a site that it adapts, as `packing.views` gives them."""
        start, packed = self._held[slot]
        run_U = self.values_U[start : start + packed.values_U.numel()]
        return views(run_U, packed.sites[site], self.geometry, site)

    @property
    def held_bytes(self) -> int:
        return sum(packed.num_bytes for _, packed in self._held.values())

    @property
    def held_slots(self) -> list[int]:
        return list(self._held)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def check(self) -> None:
        """Assert that every slot and element is held or free."""
        self._extents.check()
        assert sorted([*self._held, *self._free_slots]) == list(range(1, self.offsets_SX2.shape[0])), "a slot is lost"
        held = sum(_whole(packed) for _, packed in self._held.values())
        assert held == self._extents.size - self._extents.num_free, "an extent is held by nobody"

    def _copy(self, slot: int, start: int, packed: Packed) -> None:
        count = packed.values_U.numel()
        self.values_U[start : start + count].copy_(packed.values_U, non_blocking=True)
        tables = self.offsets_SX2, self.ranks_SX4, self.scales_SX3
        for table, rows in zip(tables, table_rows(packed, start), strict=True):
            table[slot].copy_(self._staged(rows), non_blocking=True)

    def _staged(self, rows: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(rows)
        return tensor if self._stream is None else tensor.pin_memory()


def _whole(packed: Packed) -> int:
    return int(-(-packed.values_U.numel() // ALIGNMENT) * ALIGNMENT)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event
