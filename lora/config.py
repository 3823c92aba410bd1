"""How much an engine sets aside for adapters.

Owns the settings and their meaning. Ignores what an adapter is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BUCKETS = (8, 16, 32, 64, 128, 256)
"""Padded ranks. Kernels rely on multiples of the first."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`max_rank` bounds any module's rank; `device_mib` and `host_mib` what adapters may hold on the device and
    on the host, `max_resident` how many are on the device at once. "auto" is a sixteenth of the device memory
    left after the weights, at most what `max_resident` of the widest take, and 1024 on the CPU. Nothing is
    taken before the first adapter is registered, but other memory is sized to leave it.

    On a GPU each product of a dense model has room behind its weight for the first factors of the adapters at
    work, `stacked_ranks` for each module: 128 are eight adapters of rank 16, or two of 64. Steps of more adapters,
    or without room, take more launches."""

    max_rank: int = 64
    max_resident: int = 64
    device_mib: int | Literal["auto"] = "auto"
    host_mib: int = 8192
    stacked_ranks: int = 128


LIMITS = {"max_rank": BUCKETS[-1], "max_resident": 4096, "device_mib": 1 << 20, "host_mib": 1 << 22}
"""The most each setting may be; the least is 1."""
MOST_STACKED = 512
"""Of `stacked_ranks`, which may be 0: eight adapters of the widest that ride along."""
