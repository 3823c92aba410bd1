"""One process of several, or the only one.

Owns joining the others (as `torchrun` starts them), who does what only one may do, and decisions that all
must take alike. Ignores gradients.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, cpu: bool) -> Ranks:
        """The group `torchrun` describes, each rank with a GPU of its own, or one process by itself. Ranks wait
        long for the first, which answers and scores for all of them."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        on_gpus = torch.cuda.is_available() and not cpu
        if on_gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(hours=12))
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def any(self, value: bool, device: torch.device) -> bool:
        """Whether any rank says so; all get the same answer."""
        if self.size == 1:
            return value
        flag = torch.tensor(float(value), device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


class Clock:
    """The time this process may still take."""

    def __init__(self, seconds: float | None) -> None:
        self._started, self._seconds = time.monotonic(), seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self._seconds is not None and self.elapsed >= self._seconds
