"""What a burst of decode steps needs to be told.

Owns the value and its bytes, so that one process can decide and others follow. Ignores the decision
and how steps run (`engine.runner.graph_stepper`). What rows are and how they sample is on the
device already.

Shapes: B rows of the burst, P page-table columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.batch import SharedPrefix
from engine.errors import InvalidRequest
from engine.runner.stepper import StepModes


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """`steps` steps of the rows in `slots`, in that order. `page_tables_BP` int32 has every page that
    they may touch, `window_tables_BP` those of windowed layers where they are others; `prefixes` are rows of it
    that share their first pages. `adapters` are the rows' slots in the adapters' pool, none where nobody has
    one; `states` the live slots of their recurrent states and the slots where those on the grid are kept."""

    slots: list[int]
    steps: int
    modes: StepModes
    page_tables_BP: np.ndarray
    prefixes: list[SharedPrefix]
    adapters: list[int] = field(default_factory=list)
    window_tables_BP: np.ndarray | None = None
    states: tuple[list[int], list[int]] = ([], [])

    def encode(self) -> bytes:
        windows = b"" if self.window_tables_BP is None else _bytes(self.window_tables_BP)
        pages = _bytes(self.page_tables_BP)
        wire = _Wire(self.slots, self.steps, self.modes, pages, self.prefixes, self.adapters, windows, self.states)
        return msgspec.msgpack.encode(wire)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        """Raises `InvalidRequest` for anything that `encode` cannot have made."""
        try:
            wire = msgspec.msgpack.decode(data, type=_Wire)
        except msgspec.DecodeError as error:
            raise InvalidRequest(field="step plan", expected="an encoded plan", actual=error) from error
        rows = len(wire.slots)
        pages, windows = (np.frombuffer(part[: len(part) // 4 * 4], "<i4") for part in (wire.pages, wire.windows))
        fits = rows > 0 and len(wire.pages) % (4 * rows) == 0 and len(pages) > 0 and wire.steps > 0
        fits = fits and len(wire.windows) in (0, len(wire.pages))
        fits = fits and all(len(part) in (0, rows) and min(part, default=1) > 0 for part in wire.states)
        fits = fits and len(wire.states[0]) == len(wire.states[1])
        adapted = not wire.adapters or (len(wire.adapters) == rows and min(wire.adapters) >= 0)
        if not fits or not adapted or not all(0 <= p.start < p.end <= rows for p in wire.prefixes):
            raise InvalidRequest(
                field="step plan",
                expected="steps, rows, as many rows of pages, adapters and states, prefixes of those",
                actual=f"{wire.steps} steps of {rows} rows, {len(wire.pages)} bytes of pages, {len(wire.windows)} of "
                f"window pages, {wire.prefixes}, adapters {wire.adapters}, states {wire.states}",
            )
        tables_BP, windows_BP = pages.reshape(rows, -1), windows.reshape(rows, -1) if len(windows) else None
        return StepPlan(
            wire.slots, wire.steps, wire.modes, tables_BP, wire.prefixes, wire.adapters, windows_BP, wire.states
        )


def _bytes(tables_BP: np.ndarray) -> bytes:
    return np.ascontiguousarray(tables_BP, dtype="<i4").tobytes()


class _Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    slots: list[int]
    steps: int
    modes: StepModes
    pages: bytes
    prefixes: list[SharedPrefix]
    adapters: list[int]
    windows: bytes
    states: tuple[list[int], list[int]]
