"""One revision of one adapter policy, which never changes.

Owns identity, state and the count of requests. Ignores names as aliases (`lora.registry`) and device
memory (`lora.residency`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from lora.packing import Packed


class State(enum.Enum):
    """staged -> live -> retiring -> freed; a staged one may be freed at once.

    Every state but the last has a validated host copy. Whether a copy is on the device too is a matter
    of residency, and changes back and forth.
    """

    STAGED = "staged"
    """Checked, copied to the host's pool, maybe on the device; no name leads to it yet."""
    LIVE = "live"
    RETIRING = "retiring"
    """Serves the requests it has and takes no more."""
    FREED = "freed"


@dataclass(slots=True, eq=False)
class AdapterVersion:
    """`rev` rises with every revision of a name and is never given twice."""

    name: str
    rev: int
    digest: str
    packed: Packed | None
    state: State = State.STAGED
    references: int = 0
    """Requests that were admitted with it and have not ended."""
    slot: int | None = None
    """Where the device has it."""
    last_used: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.rev

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes if self.packed else 0

    def __repr__(self) -> str:
        return f"{self.name}@{self.rev} ({self.state.value}, {self.references} requests, slot {self.slot})"
