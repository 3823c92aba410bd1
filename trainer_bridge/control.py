"""What a publisher needs from whatever takes its weights.

Owns the control protocol of a weight update: begin, stage, commit or roll back, ask for the
version. The rollout client implements it over HTTP, `transports.in_process` over an engine in
this process. Ignores how tensors travel (`transports`) and when they are sent (`publisher`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from engine.errors import DeadlineExceeded, Unsupported
from engine.types import AdapterUpdateReport, NamedTensor, UpdateBegin, UpdateProgress, UpdateReport

R = TypeVar("R")


class Versions(Protocol):
    """The part of a version reply that a publisher reads."""

    @property
    def policy_version(self) -> int: ...

    @property
    def drafter_version(self) -> int: ...


class UpdateControl(Protocol):
    """Blocking calls of one update transaction; each may raise a `SparkrollError`."""

    def update_begin(self, begin: UpdateBegin) -> UpdateProgress: ...

    def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress: ...

    def update_disk(self, txn: str, uri: str) -> UpdateProgress: ...

    def update_commit(self, txn: str) -> UpdateReport: ...

    def update_rollback(self, txn: str) -> None: ...

    def version(self) -> Any:
        """An object with `policy_version` and `drafter_version` (see `Versions`)."""
        ...


@runtime_checkable
class LiveControl(Protocol):
    """Beside the calls above, where the engine is in this process."""

    def update_live(self, txn: str, tensors: Mapping[str, Tensor]) -> UpdateProgress: ...


class AdapterControl(Protocol):
    """Takes revisions of LoRA policies: the rollout client over HTTP, `InProcessControl` over an engine."""

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
        """Either `config` and `tensors`, or a folder `uri`. With `txn` that open update's commit publishes it."""
        ...


class BoundedControl:
    """A control whose every call ends within `timeout_s`, whether the other side answers or not.

    A call that outlives its bound goes on in a daemon thread that nobody waits for: the far side
    bounds its own silence (`UpdateBegin.timeout_s`), so the transaction dies there too.
    """

    def __init__(self, control: UpdateControl, timeout_s: float) -> None:
        self._control = control
        self.timeout_s = timeout_s

    def update_begin(self, begin: UpdateBegin) -> UpdateProgress:
        return self._call("update_begin", lambda: self._control.update_begin(begin))

    def update_tensors(self, txn: str, tensors: list[NamedTensor]) -> UpdateProgress:
        return self._call("update_tensors", lambda: self._control.update_tensors(txn, tensors))

    def update_live(self, txn: str, tensors: Mapping[str, Tensor]) -> UpdateProgress:
        control = self._control
        if not isinstance(control, LiveControl):
            raise Unsupported(field="transport", expected="an engine in this process", actual=type(control).__name__)
        return self._call("update_live", lambda: control.update_live(txn, tensors))

    def update_disk(self, txn: str, uri: str) -> UpdateProgress:
        return self._call("update_disk", lambda: self._control.update_disk(txn, uri))

    def update_commit(self, txn: str) -> UpdateReport:
        return self._call("update_commit", lambda: self._control.update_commit(txn))

    def update_rollback(self, txn: str) -> None:
        return self._call("update_rollback", lambda: self._control.update_rollback(txn))

    def version(self) -> Versions:
        return self._call("version", self._control.version)

    def _call(self, name: str, call: Callable[[], R]) -> R:
        return bounded(name, self.timeout_s, call)


def bounded(name: str, timeout_s: float, call: Callable[[], R]) -> R:
    """The result of `call`, or `DeadlineExceeded` where it takes longer: it then goes on unobserved."""
    results: list[R] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller below
            failures.append(error)

    thread = threading.Thread(target=run, name=f"update-{name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failures:
        raise failures[0]
    if not results:
        raise DeadlineExceeded(field=name, expected=f"an answer within {timeout_s} s", actual="silence")
    return results[0]
