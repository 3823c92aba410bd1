"""Runs bursts of decode steps over device-resident rows.

Owns one decode step in terms of the device table: gather, forward, draw, advance; and the copy of
a burst's results to the host. `EagerStepper` does it operation by operation on any device and is
the reference; `engine.runner.graph_stepper` replays captured graphs. Ignores who runs and what
results mean.

Shapes: B rows of the burst, S slots, W ring width, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from engine.memory.device_table import BAD, RUNNING, STOPPED, DeviceTable
from engine.request import Sample
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import Sampler
from engine.scheduler.batching import BatchBuilder


class HostResult:
    """A burst's results on the host: totals and the ring rows of its slots."""

    def __init__(self, new: np.ndarray, finished: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        self.new = new
        self.finished = finished
        self._ids = ids
        self._logprobs = logprobs

    def tokens(self, row: int, start: int, end: int) -> tuple[list[int], list[float]]:
        """New tokens [start, end) of a row and their log-probabilities."""
        columns = np.arange(start, end) % self._ids.shape[1]
        return self._ids[row, columns].tolist(), self._logprobs[row, columns].tolist()


class BurstResult(Protocol):
    def wait(self) -> HostResult: ...


class Stepper(Protocol):
    def run(self, samples: list[Sample], slots: list[int], steps: int) -> BurstResult:
        """Enqueue `steps` decode steps of the rows in `slots`, in that order. Pages are reserved."""
        ...

    def forget(self) -> None:
        """Weights or pools have moved: drop whatever remembers their addresses."""
        ...


class HostCopy:
    """Results copied to pinned memory behind a burst; `wait` blocks until they are there."""

    def __init__(self, table: DeviceTable, slots_B: torch.Tensor) -> None:
        parts = (table.new_S, table.finished_S, table.ring_ids_SW, table.ring_logprobs_SW)
        self._host = []
        for part in parts:
            rows = part.index_select(0, slots_B)
            if rows.device.type == "cuda":
                target = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                target.copy_(rows, non_blocking=True)
                rows = target
            self._host.append(rows)
        self._event = torch.cuda.Event() if table.device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> HostResult:
        if self._event is not None:
            self._event.synchronize()
        return HostResult(*(part.numpy() for part in self._host))


class EagerStepper:
    """One operation after another; the host looks at lengths between steps."""

    def __init__(self, table: DeviceTable, builder: BatchBuilder, runner: ModelRunner, sampler: Sampler) -> None:
        self._table = table
        self._builder = builder
        self._runner = runner
        self._sampler = sampler

    def run(self, samples: list[Sample], slots: list[int], steps: int) -> BurstResult:
        table = self._table
        slots_B = torch.tensor(slots, dtype=torch.int64, device=table.device)
        for _ in range(steps):
            active = (table.finished_S[slots_B] == RUNNING).tolist()
            rows = [row for row, is_active in enumerate(active) if is_active]
            if not rows:
                break
            self._step([samples[row] for row in rows], slots_B[rows])
        return HostCopy(table, slots_B)

    def forget(self) -> None:
        """Nothing is remembered between bursts."""

    def _step(self, samples: list[Sample], slots_B: torch.Tensor) -> None:
        table = self._table
        computed_B = table.computed_S[slots_B]
        batch = self._builder.build_decode(samples, table.last_token_S[slots_B].tolist(), computed_B.tolist())
        logits_BV = self._runner.logits(self._runner.hidden(batch))
        positions = (computed_B + 1).tolist()
        result = self._sampler.sample(logits_BV, [s.row for s in samples], positions)
        advance(table, slots_B, result.ids.to(torch.int64), result.logprobs, result.bad)


def advance(
    table: DeviceTable,
    slots_B: torch.Tensor,
    ids_B: torch.Tensor,
    logprobs_B: torch.Tensor,
    bad_B: torch.Tensor,
) -> None:
    """Take one drawn token per running row into the table: ring, counters, stops.

    A bad row finishes without its token. The reference of the kernel in `engine.kernels.decode_step`.
    """
    table.finished_S[slots_B[bad_B]] = BAD
    slots_B, ids_B, logprobs_B = slots_B[~bad_B], ids_B[~bad_B], logprobs_B[~bad_B]
    new_B = table.new_S[slots_B]
    column_B = (new_B % table.ring).to(torch.int64)
    table.ring_ids_SW[slots_B, column_B] = ids_B.to(torch.int32)
    table.ring_logprobs_SW[slots_B, column_B] = logprobs_B
    table.last_token_S[slots_B] = ids_B
    table.computed_S[slots_B] += 1
    table.new_S[slots_B] = new_B + 1
    stopped_B = (table.stop_ids_SK[slots_B] == ids_B[:, None]).any(1) | (new_B + 1 >= table.max_new_S[slots_B])
    table.finished_S[slots_B] = torch.where(stopped_B, STOPPED, RUNNING).to(torch.int32)
