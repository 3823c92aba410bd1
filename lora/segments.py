"""Which rows of a step belong to which adapter.

Owns the order of rows by slot and the tables kernels walk. Ignores factors. Rows of the base policy
appear nowhere, so that they cost nothing and nothing can be added to them, unless a kernel that does more
than add wants every row: then they come first.

Shapes: T rows of the step, A rows with an adapter, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lora.device_pool import BASE


@dataclass(frozen=True, slots=True)
class Run:
    """Entries [start, end) of `Segments.rows_A`, which all belong to `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Segments:
    """`rows_A` int64 are the rows with an adapter, or all, by slot and then in their own order."""

    rows_A: np.ndarray
    runs: tuple[Run, ...]

    @staticmethod
    def of(slots_T: np.ndarray, with_base: bool = False) -> Segments:
        order_T = np.argsort(slots_T, kind="stable")
        rows_A = order_T if with_base else order_T[np.searchsorted(slots_T[order_T], BASE, side="right") :]
        sorted_A = slots_T[rows_A]
        starts = np.flatnonzero(np.diff(sorted_A, prepend=-1)).tolist()
        ends = [*starts[1:], len(rows_A)]
        runs = tuple(Run(int(sorted_A[start]), start, end) for start, end in zip(starts, ends, strict=False))
        return Segments(rows_A.astype(np.int64), runs)

    @property
    def slots(self) -> set[int]:
        """Those of adapters."""
        return {run.slot for run in self.runs} - {BASE}


def max_tiles(rows: int, adapters: int, block: int) -> int:
    """Tiles that `rows` rows of at most `adapters` adapters can need: what a launch is sized to."""
    return rows // block + min(adapters, rows)


@dataclass(slots=True)
class Tiles:
    """Device tables of fixed size, for steps of at most so many rows. Tile n is (slot, first entry of
    `rows_T`, rows), at most `block` of them; unused tiles have no rows. `places_T2` says of every row of
    the step its slot and its entry."""

    rows_T: torch.Tensor
    places_T2: torch.Tensor
    tiles_N3: torch.Tensor
    block: int

    @staticmethod
    def empty(rows: int, adapters: int, block: int, device: torch.device) -> Tiles:
        tiles = max(1, max_tiles(rows, adapters, block))
        return Tiles(
            torch.zeros(max(1, rows), dtype=torch.int32, device=device),
            torch.zeros(max(1, rows), 2, dtype=torch.int32, device=device),
            torch.zeros(tiles, 3, dtype=torch.int32, device=device),
            block,
        )

    @property
    def num_tiles(self) -> int:
        return self.tiles_N3.shape[0]

    def fill(self, segments: Segments) -> None:
        """Describe a step, without waiting for the device."""
        rows_T = np.zeros(self.rows_T.shape[0], dtype=np.int32)
        rows_T[: len(segments.rows_A)] = segments.rows_A
        places_T2 = np.zeros((self.places_T2.shape[0], 2), dtype=np.int32)
        for run in segments.runs:
            entries_S = np.arange(run.start, run.end)
            places_T2[segments.rows_A[entries_S]] = np.stack((np.full(len(entries_S), run.slot), entries_S), 1)
        tiles_N3 = np.zeros((self.num_tiles, 3), dtype=np.int32)
        entries = [
            (run.slot, start, min(self.block, run.end - start))
            for run in segments.runs
            for start in range(run.start, run.end, self.block)
        ]
        assert len(entries) <= self.num_tiles, f"{len(entries)} tiles, room for {self.num_tiles}"
        tiles_N3[: len(entries)] = np.asarray(entries, dtype=np.int32).reshape(-1, 3)
        for table, values in ((self.rows_T, rows_T), (self.places_T2, places_T2), (self.tiles_N3, tiles_N3)):
            host = torch.from_numpy(values)
            table.copy_(host.pin_memory() if table.is_cuda else host, non_blocking=True)
