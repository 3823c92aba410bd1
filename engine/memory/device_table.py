"""Decode state that lives on the device, indexed by slot.

Owns the columns a steady decode step reads and writes without the host: what to feed next, where,
how to sample, when to stop, and the ring that results are left in. What only some rows need lies
in `engine.memory.device_columns` (further results) and `engine.memory.device_edits` (edits of
logits). Ignores pages, which travel with each burst of steps, and which rows take part.

Shapes: S slots, K stop ids, W ring width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.memory.device_columns import DeviceColumns
from engine.memory.device_edits import DeviceEdits
from engine.memory.transfer import send
from engine.sampling.params import RowSampling

RUNNING, STOPPED, BAD = 0, 1, 2
"""Values of `finished_S`: goes on, ended by an id or its length, logits that are not numbers."""

DEFINITIONS = ("processed", "temperature", "raw")


@dataclass(slots=True)
class RowState:
    """What the host knows of a row when it hands it to the device. `row` matters where logits are
    edited or further columns wanted; stop ids beyond `DeviceTable.MAX_STOPS` are the host's to see."""

    slot: int
    last_token: int
    computed: int
    new: int
    max_new: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    definition: int
    stop_ids: tuple[int, ...]
    row: RowSampling
    sample_id: int = 0
    """Tells apart the rejection noise of samples that share a seed."""


class DeviceTable:
    """`edits` is there where the device edits logits; elsewhere the host's rows do.

    `computed_S` int64 counts tokens whose keys and values exist; the next input `last_token_S`
    stands at that position. `new_S` int32 counts new tokens; token number i lies in ring column
    i % W. `finished_S` int32 rows are no-ops until the host hands the slot out again. `position_S`
    and `active_S` are notes of the step under way."""

    MAX_STOPS = 32

    def __init__(self, num_slots: int, ring: int, device: torch.device) -> None:
        self.device = device
        self.ring = ring

        def column(dtype: torch.dtype, *width: int, fill: float = 0) -> torch.Tensor:
            return torch.full((num_slots, *width), fill, dtype=dtype, device=device)

        self.last_token_S = column(torch.int64)
        self.computed_S = column(torch.int64)
        self.new_S = column(torch.int32)
        self.max_new_S = column(torch.int32)
        self.finished_S = column(torch.int32, fill=STOPPED)
        self.seed_S = column(torch.int64)
        self.sample_id_S = column(torch.int64)
        self.temperature_S = column(torch.float64, fill=1)
        self.top_k_S = column(torch.int32)
        self.top_p_S = column(torch.float64, fill=1)
        self.min_p_S = column(torch.float64)
        self.position_S = column(torch.int64)
        self.active_S = column(torch.uint8)
        self.definition_S = column(torch.int32)
        self.stop_ids_SK = column(torch.int32, self.MAX_STOPS, fill=-1)
        self.ring_ids_SW = column(torch.int32, ring)
        self.ring_logprobs_SW = column(torch.float32, ring)
        self.columns = DeviceColumns(num_slots, ring, device)
        self.edits: DeviceEdits | None = None

    @property
    def moves(self) -> int:
        """Rises whenever a buffer of edits or columns moves: whoever remembers addresses forgets them then."""
        return self.columns.generation + (0 if self.edits is None else self.edits.generation)

    def admit(self, rows: list[RowState]) -> None:
        """Write rows that join; earlier work in the stream still sees the slot's former state."""
        if not rows:
            return
        slots = send(np.array([row.slot for row in rows], dtype=np.int64), self.device)
        seeds = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)
        stops = np.full((len(rows), self.MAX_STOPS), -1, dtype=np.int32)
        for number, row in enumerate(rows):
            known = row.stop_ids[: self.MAX_STOPS]
            stops[number, : len(known)] = known
        columns = [
            (self.last_token_S, np.array([row.last_token for row in rows], dtype=np.int64)),
            (self.computed_S, np.array([row.computed for row in rows], dtype=np.int64)),
            (self.new_S, np.array([row.new for row in rows], dtype=np.int32)),
            (self.max_new_S, np.array([row.max_new for row in rows], dtype=np.int32)),
            (self.finished_S, np.zeros(len(rows), dtype=np.int32)),
            (self.seed_S, seeds),
            (self.sample_id_S, np.array([row.sample_id for row in rows], dtype=np.uint64).view(np.int64)),
            (self.temperature_S, np.array([row.temperature for row in rows], dtype=np.float64)),
            (self.top_k_S, np.array([row.top_k for row in rows], dtype=np.int32)),
            (self.top_p_S, np.array([row.top_p for row in rows], dtype=np.float64)),
            (self.min_p_S, np.array([row.min_p for row in rows], dtype=np.float64)),
            (self.definition_S, np.array([row.definition for row in rows], dtype=np.int32)),
            (self.stop_ids_SK, stops),
        ]
        for target, values in columns:
            target.index_copy_(0, slots, send(values, self.device))
        numbers = [row.slot for row in rows]
        self.columns.admit(numbers, [row.row.want for row in rows])
        if self.edits is not None:
            self.edits.admit(numbers, [row.row for row in rows])

    def release(self, slots: list[int]) -> None:
        """Give back what these slots hold beside their columns: nobody steps them any more."""
        self.columns.release(slots)
        if self.edits is not None:
            self.edits.release(slots)
