"""Which version of a module the engine serves, and the one update of it that may be under way.

Owns version numbers, the open transaction with its silence limit, and the fence, of the policy and of
a drafter alike. Ignores what a new version does to running work and to the cache, which the engine
arranges around `commit`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from engine.errors import Conflict, Corrupt, DeadlineExceeded, InvalidRequest, NotFound, SparkrollError
from engine.types import NamedTensor, UpdateBegin, UpdateProgress
from engine.weights.layout import WeightedModel
from engine.weights.transaction import PreparedUpdate, UpdateTransaction

Module = Literal["policy", "drafter"]


class PolicyState:
    """`version` only ever rises. While `fenced` is set nothing may be served from the module."""

    def __init__(self, model: WeightedModel, module: Module = "policy", version: int = 0) -> None:
        self._model = model
        self.module = module
        self.version = version
        self.fenced: str | None = None
        self._open: UpdateTransaction | None = None
        self._last_call = 0.0
        self._ended: dict[str, SparkrollError] = {}

    @property
    def pending(self) -> str | None:
        """Name of the open transaction."""
        return self._open.begin.txn if self._open else None

    def begin(self, begin: UpdateBegin) -> UpdateProgress:
        self.expire()
        if self._open is not None:
            if self._open.begin == begin:
                return self._touch()
            raise Conflict(field="txn", expected=f"no open update beside {self.pending!r}", actual=begin.txn)
        if not 0 < begin.timeout_s < math.inf:
            raise InvalidRequest(field="timeout_s", expected="a finite positive number", actual=begin.timeout_s)
        assert begin.module == self.module, f"an update of {begin.module} for {self.module}"
        if begin.base_version != self.version:
            raise Conflict(field="base_version", expected=self.version, actual=begin.base_version)
        if begin.new_version <= self.version:
            raise Conflict(field="new_version", expected=f"more than {self.version}", actual=begin.new_version)
        self._open = UpdateTransaction(self._model, begin)
        self._ended.pop(begin.txn, None)
        return self._touch()

    def stage(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        self.require(txn).stage(tensors)
        return self._touch()

    def stage_live(self, txn: str, tensors: Mapping[str, torch.Tensor]) -> UpdateProgress:
        self.require(txn).stage_live(tensors)
        return self._touch()

    def stage_folder(self, txn: str, folder: Path) -> UpdateProgress:
        self.require(txn).stage_folder(folder)
        return self._touch()

    def touch(self, txn: str) -> None:
        """The sender of the open transaction, which must be `txn`, is not silent."""
        self.require(txn)
        self._touch()

    def prepare(self, txn: str) -> tuple[UpdateBegin, PreparedUpdate]:
        """Last checks before anything live changes. A failure ends the transaction."""
        transaction = self.require(txn)
        try:
            return transaction.begin, transaction.prepare()
        except SparkrollError as error:
            self._end(error)
            raise

    def commit(self, txn: str) -> None:
        """Swap the prepared weights in. A failure fences: live parameters may be mixed."""
        transaction = self.require(txn)
        try:
            transaction.apply()
        except Corrupt as error:
            self.fenced = error.message
            self._end(error)
            raise
        self.version = transaction.begin.new_version
        self.fenced = None
        self._open = None

    def rollback(self, txn: str) -> None:
        """End the transaction; the old policy stays. Repeating it does nothing."""
        if self._open is None and txn in self._ended:
            return
        self.require(txn)
        self._end(Conflict(field="txn", expected="an open update", actual=f"{txn} was rolled back"))

    def expire(self) -> None:
        """End a transaction whose sender has been silent for too long."""
        if self._open is None:
            return
        limit = self._open.begin.timeout_s
        if time.monotonic() - self._last_call > limit:
            self._end(DeadlineExceeded(f"update {self.pending!r} was rolled back after {limit} s of silence"))

    def knows(self, txn: str) -> bool:
        """Whether `txn` is the open transaction or one that has ended without effect."""
        return self.pending == txn or txn in self._ended

    def require(self, txn: str) -> UpdateTransaction:
        """The open transaction, which must be `txn`."""
        self.expire()
        if self._open is not None and self._open.begin.txn == txn:
            return self._open
        if txn in self._ended:
            raise self._ended[txn]
        raise NotFound(field="txn", expected=f"the open update ({self.pending!r})", actual=txn)

    def _touch(self) -> UpdateProgress:
        assert self._open is not None
        self._last_call = time.monotonic()
        return self._open.progress()

    def _end(self, reason: SparkrollError) -> None:
        assert self._open is not None
        self._open.discard()
        if len(self._ended) >= 64:
            del self._ended[next(iter(self._ended))]
        self._ended[self._open.begin.txn] = reason
        self._open = None
