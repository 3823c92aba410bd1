"""The tensor-parallel group, as a value that is passed to whatever is split over it.

Owns the collectives layers need. Ignores how processes are started and how a group is formed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.errors import Unsupported


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`; `group` is torch's process group where `size` exceeds 1."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} outside a group of {self.size}"
        assert self.size == 1 or self.group is not None, "a group of several ranks needs its process group"

    def share(self, total: int, field: str) -> int:
        """This rank's part of `total` things that must split evenly."""
        if total % self.size:
            raise Unsupported(field=field, expected=f"a multiple of the tensor-parallel size {self.size}", actual=total)
        return total // self.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=dim)


SINGLE = TensorParallel()
