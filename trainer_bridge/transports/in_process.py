"""Tensors to an engine in this process: no body, no file, no bytes; a GPU's tensors stay on it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.engine import Engine
from engine.errors import Unsupported
from engine.types import AdapterUpdate, AdapterUpdateReport, NamedTensor, UpdateBegin, UpdateProgress, UpdateReport
from trainer_bridge.control import LiveControl, UpdateControl


@dataclass(frozen=True, slots=True)
class EngineVersions:
    policy_version: int
    drafter_version: int = 0


class InProcessControl:
    """The control protocol over an `Engine`, to be used by the engine's owner between its steps:
    an engine is not thread-safe, and the owner waits for every call."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        return self._engine.update_begin(begin)

    def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._engine.update_stage(txn, tensors)

    def update_live(self, txn: str, tensors: Mapping[str, Tensor]) -> UpdateProgress:
        return self._engine.update_stage_live(txn, tensors)

    def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        return self._engine.update_stage_folder(txn, Path(uri))

    def update_commit(self, txn: str) -> UpdateReport:
        return self._engine.update_commit(txn)

    def update_rollback(self, txn: str) -> None:
        self._engine.update_rollback(txn)

    def update_adapter(
        self,
        name: str,
        *,
        config: dict[str, Any] | None = None,
        tensors: Sequence[NamedTensor] = (),
        uri: str | None = None,
        rev: int | None = None,
        txn: str | None = None,
    ) -> AdapterUpdateReport:
        adapters = self._engine.adapters
        if uri is not None:
            prepared = adapters.prepare_folder(uri)
        else:
            prepared = adapters.prepare_update(
                AdapterUpdate(name=name, config=config or {}, tensors=list(tensors), rev=rev)
            )
        began = time.perf_counter()
        if txn is not None:
            report = self._engine.update_stage_adapter(txn, name, prepared, rev)
        else:
            report = adapters.publish(name, adapters.stage(name, prepared, rev).rev)
        return AdapterUpdateReport(adapter=report, pause_ms=(time.perf_counter() - began) * 1e3)

    def version(self) -> EngineVersions:
        return EngineVersions(self._engine.policy.version, self._engine.drafter_version)


@dataclass(frozen=True, slots=True)
class InProcessTransport:
    """A few tensors at a time, so that a call does not outlive its bound."""

    name: str = "in_process"
    digests: bool = False
    per_call: int = 32

    def stage(
        self, control: UpdateControl, txn: str, new_version: int, tensors: Mapping[str, Tensor]
    ) -> UpdateProgress:
        if not isinstance(control, LiveControl):
            raise Unsupported(field="transport", expected="an engine in this process", actual=type(control).__name__)
        progress = UpdateProgress(txn=txn, staged=0, announced=len(tensors), staged_bytes=0)
        items = iter(tensors.items())
        while some := dict(itertools.islice(items, self.per_call)):
            progress = control.update_live(txn, some)
        return progress

    def release(self, txn: str) -> None:
        """Nothing outlives a call."""
