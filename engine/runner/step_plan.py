"""What a burst of decode steps needs to be told.

Owns the value and its bytes, so that one process can decide and others follow. Ignores the decision
and how steps run (`engine.runner.graph_stepper`). What rows are and how they sample is on the
device already.

Shapes: B rows of the burst, P page-table columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from engine.batch import SharedPrefix
from engine.errors import InvalidRequest
from engine.runner.stepper import StepModes


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """`steps` steps of the rows in `slots`, in that order. `page_tables_BP` int32 has every page that
    they may touch; `prefixes` are rows of it that share their first pages."""

    slots: list[int]
    steps: int
    modes: StepModes
    page_tables_BP: np.ndarray
    prefixes: list[SharedPrefix]

    def encode(self) -> bytes:
        pages = np.ascontiguousarray(self.page_tables_BP, dtype="<i4")
        return msgspec.msgpack.encode(_Wire(self.slots, self.steps, self.modes, pages.tobytes(), self.prefixes))

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        """Raises `InvalidRequest` for anything that `encode` cannot have made."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except msgspec.DecodeError as error:
            raise InvalidRequest(field="step plan", expected="an encoded plan", actual=error) from error
        rows = len(wire.slots)
        pages = np.frombuffer(wire.pages[: len(wire.pages) // 4 * 4], dtype="<i4")
        fits = rows > 0 and len(wire.pages) % (4 * rows) == 0 and len(pages) > 0 and wire.steps > 0
        if not fits or not all(0 <= p.start < p.end <= rows for p in wire.prefixes):
            raise InvalidRequest(
                field="step plan",
                expected="steps, rows, as many rows of pages, prefixes of those",
                actual=f"{wire.steps} steps of {rows} rows, {len(wire.pages)} bytes of pages, {wire.prefixes}",
            )
        return StepPlan(wire.slots, wire.steps, wire.modes, pages.reshape(rows, -1), wire.prefixes)


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slots: list[int]
    steps: int
    modes: StepModes
    pages: bytes
    prefixes: list[SharedPrefix]
