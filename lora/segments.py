"""Which rows of a step belong to which adapter.

Owns the order of rows by slot and the tables kernels walk. Ignores factors. Rows of the base policy come
first or appear nowhere: kernels that only add skip them either way, kernels that do more than add
want every row.

Shapes: T rows of the step, A rows in the order by slot, N tiles.
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


def count_tiles(slots_T: np.ndarray, block: int) -> int:
    """Tiles that all rows take, those of the base among them."""
    counts = np.bincount(slots_T)
    return int((-(-counts // block)).sum())


def most_tiles(rows: int, slots: int, block: int) -> int:
    """Tiles that rows take at most, however they are divided over so many slots."""
    slots = min(rows, slots)
    return slots + (rows - slots) // block


def tile_tier(rows: int, tiles: int, block: int) -> int:
    """How many tiles a launch is sized to: what `rows` rows of one slot take, doubled until `tiles` fit. Tiles
    beyond those of a step cost a launch little, and a graph for every number would cost much."""
    tier = max(1, -(-rows // block))
    while tier < tiles:
        tier *= 2
    return min(tier, max(1, rows))


class Tiles:
    """Device tables of fixed size, for steps of at most so many rows. Tile n of `tiles_N3` is (slot, first entry
    of `rows_T`, rows), at most `block` of them; unused tiles have no rows."""

    def __init__(self, rows: int, tiles: int, block: int, device: torch.device) -> None:
        self.block = block
        self._table_U = torch.zeros(max(1, rows) + 3 * max(1, tiles), dtype=torch.int32, device=device)
        self.rows_T = self._table_U[: max(1, rows)]
        self.tiles_N3 = self._table_U[max(1, rows) :].view(-1, 3)

    @property
    def num_tiles(self) -> int:
        return self.tiles_N3.shape[0]

    def fill(self, segments: Segments) -> None:
        """Describe a step, without waiting for the device."""
        table_U = np.zeros(self._table_U.shape[0], dtype=np.int32)
        table_U[: len(segments.rows_A)] = segments.rows_A
        entries = [
            (run.slot, start, min(self.block, run.end - start))
            for run in segments.runs
            for start in range(run.start, run.end, self.block)
        ]
        assert len(entries) <= self.num_tiles, f"{len(entries)} tiles, room for {self.num_tiles}"
        end = len(self.rows_T) + 3 * len(entries)
        table_U[len(self.rows_T) : end] = np.asarray(entries, dtype=np.int32).reshape(-1)
        host = torch.from_numpy(table_U)
        self._table_U.copy_(host.pin_memory() if self._table_U.is_cuda else host, non_blocking=True)
