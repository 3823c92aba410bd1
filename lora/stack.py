"""First factors of adapters as further outputs of the products they share inputs with.

Owns which adapter lies at which place behind the weights, and the table that tells kernels. Ignores how factors
get there (`lora.kernels.stack`) and who reads the products.

What a product costs is reading its weight, so a few more rows of it cost little, and launches of their own
much. There is room for some ranks a part: for several adapters of few ranks, or fewer of more. An adapter is
known by its load, not by its slot, so that whoever was in a slot before is never taken for who is now; and
what lies behind weights is gone when their memory was given back.

Shapes: S slots, M moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lora.device_pool import DevicePool
from lora.kernels.stack import Rooms, stack_factors

ALIGNED = 64
"""Columns behind a part at least: rows of products then start at multiples of 128 bytes. At 8B and 128 rows, one
adapter of rank 16 with 16 columns behind cost 1.5 to 3 us a layer more than four with 64 (H200)."""
MOST_PLACES = 8


@dataclass(frozen=True, slots=True)
class StackRoom:
    """`ranks` of each part fit behind the weights: `wide` are those with the room, [N + room, K], by site.
    `releases` says how often their memory was given back so far."""

    wide: Mapping[int, torch.Tensor]
    ranks: int
    releases: Callable[[], int]


class Stack:
    """`places_S` int32 is each slot's place, -1 without one."""

    def __init__(self, pool: DevicePool, room: StackRoom) -> None:
        self.pool = pool
        self._room = room
        self._rooms = Rooms(pool, room.wide)
        self._seen = room.releases()
        self._rank = 0
        self._loads: list[int | None] = []
        """By place, which load's factors are there."""
        self._used: list[int] = []
        self._clock = 0
        slots = pool.offsets_SX2.shape[0]
        self._table_U = torch.full((slots + 2 * MOST_PLACES,), -1, dtype=torch.int32, device=pool.device)
        self.places_S = self._table_U[:slots]

    def places_for(self, slots: int, rank: int) -> int:
        """How many places a step of so many adapters takes: 1, 2, 4, 8, so that few kinds of steps exist, and of
        small ranks as many as keep rows aligned; 0 where there is not room for all of them."""
        room = min(MOST_PLACES, self._room.ranks // rank)
        found = max(1 << (slots - 1).bit_length(), min(room, ALIGNED // rank))
        return found if slots and room > 1 and found <= room else 0

    def weight(self, site: int, places: int, rank: int) -> torch.Tensor:
        """The weight of a site's product with so many places behind it."""
        widths = self.pool.geometry.widths(site)
        return self._room.wide[site][: sum(widths) + places * len(widths) * rank]

    def ensure(self, slots: Collection[int], places: int, rank: int) -> int:
        """Have these slots' first factors in the first `places`, for launches from here on, and return how many had
        to be copied there. Adapters have been awaited. Those used last stay where there is room."""
        if rank != self._rank or self._seen != self._room.releases():
            self._rank, self._seen = rank, self._room.releases()
            room = min(MOST_PLACES, self._room.ranks // rank)
            self._loads, self._used = [None] * room, [0] * room
        assert len(slots) <= places <= len(self._loads), f"{len(slots)} adapters, {places} places"
        wanted = {self.pool.load_number(slot): slot for slot in sorted(slots)}
        self._clock += 1
        there = set[int]()
        for place, load in enumerate(self._loads[:places]):
            if load in wanted:
                self._used[place] = self._clock
                there.add(load)
        missing = [load for load in wanted if load not in there]
        if missing:
            self._move(missing, wanted, places)
        return len(missing)

    def _move(self, missing: list[int], slots: dict[int, int], places: int) -> None:
        idle = [place for place in range(places) if self._loads[place] not in slots]
        idle.sort(key=lambda place: (self._loads[place] is not None, self._used[place]))
        moves = []
        for place, load in zip(idle, missing, strict=False):
            if load in self._loads:
                self._loads[self._loads.index(load)] = None
            self._loads[place], self._used[place] = load, self._clock
            moves.append((place, slots[load]))
        table_U = np.full(self._table_U.shape[0], -1, dtype=np.int32)
        for slot in self.pool.held_slots:
            load = self.pool.load_number(slot)
            if load in self._loads:
                table_U[slot] = self._loads.index(load)
        end = len(self.places_S) + 2 * len(moves)
        table_U[len(self.places_S) : end] = np.asarray(moves, dtype=np.int32).reshape(-1)
        host = torch.from_numpy(table_U)
        self._table_U.copy_(host.pin_memory() if self._table_U.is_cuda else host, non_blocking=True)
        moves_M2 = self._table_U[len(self.places_S) : end].view(-1, 2)
        stack_factors(self.pool, self._rooms, moves_M2, self._rank)
