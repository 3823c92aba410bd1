"""One engine in this process that several threads ask at once.

Owns taking turns: whoever waits for answers advances everybody's, so that the rows of all policies share
steps. A service needs nothing of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.collector import Collector
from engine.types import AdapterUpdateReport, GroupOutput, GroupRequest
from recipes.grpo.config import RolloutConfig
from recipes.grpo.serving import ColocatedServing, Serving, serving


class TakingTurns(ColocatedServing):
    """`adapters` may be updated by any thread too; everything else is for one at a time."""

    def __init__(self, single: ColocatedServing) -> None:
        super().__init__(single.engine, single.parts, ())
        self._lock = threading.Lock()
        self._control = self.control
        self.adapters = self

    def generate(self, requests: list[GroupRequest]) -> list[GroupOutput]:
        sinks = [Collector() for _ in requests]
        with self._lock:
            for request, sink in zip(requests, sinks, strict=True):
                self.engine.add_group(request, sink)
        while True:
            with self._lock:
                if all(sink.ended for sink in sinks):
                    return [sink.result() for sink in sinks]
                self.engine.step()

    def update_adapter(self, name: str, **revision: Any) -> AdapterUpdateReport:
        with self._lock:
            return self._control.update_adapter(name, **revision)


@contextmanager
def shared_serving(
    folder: Path, config: RolloutConfig, device: torch.device, say: Callable[[str], None]
) -> Iterator[Serving]:
    """`serving` for several threads."""
    with serving(folder, config, device, say) as served:
        yield TakingTurns(served) if isinstance(served, ColocatedServing) else served
