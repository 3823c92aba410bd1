"""The ranks that share a step's tokens, as a value that is passed to whatever is split over them.

Owns the collectives: rows gathered back into the tokens' order, pages from the rank that owns them, and agreement.
Token i of a step is rank i mod `size`'s. Ignores how processes are started, and what rows and pages hold
(`engine.memory.layer_split`).

Pages and rows travel in groups of their own, so that rows never wait behind the next layer's pages.

Shapes: M tokens of one rank, the same number on each, X numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.errors import Unsupported


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Rank `rank` of `size`; the groups are torch's where `size` exceeds 1."""

    rank: int = 0
    size: int = 1
    rows: dist.ProcessGroup | None = None
    pages: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} outside a group of {self.size}"
        assert self.size == 1 or (self.rows and self.pages), "several ranks need their process groups"

    @staticmethod
    def of_world() -> ContextParallel:
        """All ranks of torch's default group, which exists: every one of them makes this call."""
        if not dist.is_initialized():
            raise Unsupported(field="ranks", expected="torch.distributed's default group", actual="none")
        rows, pages = dist.new_group(), dist.new_group()
        assert isinstance(rows, dist.ProcessGroup) and isinstance(pages, dist.ProcessGroup)
        return ContextParallel(dist.get_rank(), dist.get_world_size(), rows, pages)

    def gather(self, rows_MX: torch.Tensor) -> torch.Tensor:
        """rows [size * M, X] in the tokens' order."""
        if self.size == 1:
            return rows_MX
        parts = rows_MX.new_empty(self.size, *rows_MX.shape)
        dist.all_gather(list(parts.unbind()), rows_MX.contiguous(), group=self.rows)
        return parts.transpose(0, 1).flatten(0, 1)

    def gather_to(self, rows_MX: torch.Tensor, owner: int) -> torch.Tensor | None:
        """As `gather`, for one rank alone."""
        parts = rows_MX.new_empty(self.size, *rows_MX.shape) if owner == self.rank else None
        targets = None if parts is None else list(parts.unbind())
        dist.gather(rows_MX.contiguous(), targets, group=self.rows, group_dst=owner)
        return None if parts is None else parts.transpose(0, 1).flatten(0, 1)

    def scatter(self, rows_TX: torch.Tensor | None, target_MX: torch.Tensor, owner: int) -> None:
        """Give every rank its share of the owner's rows, which are in the tokens' order."""
        parts = None
        if rows_TX is not None:
            parts = list(rows_TX.unflatten(0, (-1, self.size)).transpose(0, 1).contiguous().unbind())
        dist.scatter(target_MX, parts, group=self.rows, group_src=owner)

    def send(self, pages: torch.Tensor, owner: int) -> dist.Work | None:
        """Begin to fill everybody's `pages`, which are contiguous, with the owner's; wait for the work before they are
        read or written."""
        return dist.broadcast(pages, group_src=owner, group=self.pages, async_op=True) if self.size > 1 else None

    def gather_numbers(self, number: int, device: torch.device) -> list[int]:
        """Every rank's number of at most 63 bits, by rank."""
        if self.size == 1:
            return [number]
        return self.gather(torch.tensor([number], dtype=torch.int64, device=device)).tolist()


ALONE = ContextParallel()
