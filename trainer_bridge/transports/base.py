"""The seam between publisher and transport."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.types import UpdateProgress
from trainer_bridge.control import UpdateControl


class Transport(Protocol):
    """Moves every tensor into the staging area of the open transaction `txn`.

    `stage` returns the progress after the last tensor. It never commits; `release` is called once
    the transaction has ended either way, and drops what the transport still holds for it.
    """

    @property
    def name(self) -> str: ...

    @property
    def digests(self) -> bool:
        """Whether bytes leave the process, so that each tensor is announced with its SHA-256."""
        ...

    def stage(
        self, control: UpdateControl, txn: str, new_version: int, tensors: Mapping[str, Tensor]
    ) -> UpdateProgress: ...

    def release(self, txn: str) -> None: ...
