"""Brings a trainer's weights to engines as one transaction.

Owns the order of the calls, the digests, the rise of versions and what happens when any call
fails: roll back, leave the old policy serving, say why. Ignores how tensors travel
(`transports`) and how an engine applies them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.errors import Conflict, SparkrollError
from engine.types import KvPolicy, UpdateBegin, UpdateProgress, UpdateReport
from trainer_bridge.control import BoundedControl, UpdateControl
from trainer_bridge.names import Weights, checkpoint_tensors
from trainer_bridge.tensors import announce
from trainer_bridge.transports.base import Transport
from trainer_bridge.versions import VersionCount


@dataclass(slots=True)
class PublisherStats:
    """Counts since the publisher was made; `seconds` is wall time of successful publishes."""

    published: int = 0
    failed: int = 0
    refused: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


class Publisher:
    """Publishes policy versions through one transport.

    A new publisher starts from the version the engines are at, so that a restart can never count
    back. `timeout_s` bounds every call, and the silence the engine accepts between two calls.
    """

    def __init__(
        self,
        control: UpdateControl,
        transport: Transport,
        *,
        timeout_s: float = 60.0,
        kv_policy: KvPolicy = "invalidate",
        module: Literal["policy", "drafter"] = "policy",
    ) -> None:
        self._control = BoundedControl(control, timeout_s)
        self._transport = transport
        self._kv_policy: KvPolicy = kv_policy
        self._module: Literal["policy", "drafter"] = module
        self._versions: VersionCount | None = None
        self.stats = PublisherStats()

    @property
    def next_version(self) -> int:
        return self._count().current + 1

    def publish(self, weights: Weights, new_version: int | None = None) -> UpdateReport:
        """Stage, commit and report; `new_version` None takes the next one.

        Raises `Conflict` for a version that is not above every earlier one (nothing is sent), and
        whatever the engine or transport raised otherwise, after rolling back.
        """
        count = self._count()
        serving = self._serving()
        count.observe(serving)
        version = count.current + 1 if new_version is None else new_version
        try:
            count.check(version)
        except Conflict:
            self.stats.refused += 1
            raise
        started = time.monotonic()
        tensors = checkpoint_tensors(weights)
        begin = UpdateBegin(
            txn=f"v{version}-{uuid.uuid4().hex[:12]}",
            base_version=serving,
            new_version=version,
            manifest=[announce(name, tensor, self._transport.digests) for name, tensor in tensors.items()],
            module=self._module,
            kv_policy=self._kv_policy,
            timeout_s=self._control.timeout_s,
        )
        try:
            report = self._transact(begin, tensors)
        except BaseException:
            self.stats.failed += 1
            raise
        count.observe(version)
        self.stats.published += 1
        self.stats.bytes_sent += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.stats.seconds += time.monotonic() - started
        return report

    def _transact(self, begin: UpdateBegin, tensors: Mapping[str, Tensor]) -> UpdateReport:
        try:
            self._control.update_begin(begin)
            progress = self._transport.stage(self._control, begin.txn, begin.new_version, tensors)
            _require_complete(progress)
            return self._control.update_commit(begin.txn)
        except BaseException as error:
            self._roll_back(begin.txn, error)
            raise
        finally:
            self._transport.release(begin.txn)

    def _roll_back(self, txn: str, cause: BaseException) -> None:
        try:
            self._control.update_rollback(txn)
        except SparkrollError as error:
            cause.add_note(f"rolling back {txn} failed too: {error.message}")

    def _serving(self) -> int:
        versions = self._control.version()
        return versions.policy_version if self._module == "policy" else versions.drafter_version

    def _count(self) -> VersionCount:
        if self._versions is None:
            self._versions = VersionCount(self._serving())
        return self._versions


def _require_complete(progress: UpdateProgress) -> None:
    if progress.staged != progress.announced:
        raise Conflict(
            field=f"update {progress.txn}",
            expected=f"{progress.announced} tensors staged",
            actual=progress.staged,
        )
