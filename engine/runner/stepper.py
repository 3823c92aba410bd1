"""Runs bursts of decode steps over device-resident rows.

Owns one decode step in terms of the device table: gather, forward, draw, advance; and the copy of
a burst's results to the host. `EagerStepper` does it operation by operation on any device and is
the reference; `engine.runner.graph_stepper` replays captured graphs. Ignores who runs and what
results mean.

Shapes: B rows of the burst, S slots, W ring width, V vocabulary, C columns, K alternatives, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.dspark.speculation import Speculation
from engine.memory.device_columns import COLUMNS
from engine.memory.device_table import BAD, RUNNING, STOPPED, DeviceTable
from engine.request import Columns, Sample
from engine.runner.model_runner import ModelRunner
from engine.sampling.columns import SampleResult
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.scheduler.batching import BatchBuilder
from engine.types import Want


@dataclass(slots=True, frozen=True)
class StepModes:
    """What a step computes beyond drawing plain rows: truncation, edits of logits, the ring columns of
    every definition and of entropy, alternatives. Rows that need none of it pay nothing for others."""

    truncated: bool = False
    edits: bool = False
    columns: bool = False
    top: bool = False

    @property
    def extra(self) -> bool:
        """Whether buffers are involved that are made, and grow, when rows ask."""
        return self.edits or self.columns or self.top

    @staticmethod
    def of(samples: Sequence[Sample]) -> StepModes:
        """The least that serves these samples for a burst that begins now."""
        truncated = edits = columns = top = False
        for sample in samples:
            row = sample.row
            truncated = truncated or row.truncates
            edits = edits or (row.may_edit and row.edits_at(sample.length))
            if not row.bare:
                columns = columns or bool(row.want.extra_logprobs) or row.want.entropy
                top = top or row.want.top_logprobs > 0
        return StepModes(truncated, edits, columns, top)


Run = tuple[list[int], list[float], Columns | None]
"""Tokens of a row, their log-probabilities, and the other columns where it wants any."""


class HostResult:
    """A burst's results on the host: totals and the ring rows of its slots.

    `values_CBW` and the alternatives [rows with any, W, K] are there where the burst had them;
    `top_rows` says which of the latter belongs to a row.
    """

    def __init__(self, parts: dict[str, np.ndarray], top_rows: dict[int, int]) -> None:
        self.new = parts["new"]
        self.finished = parts["finished"]
        self._parts = parts
        self._top_rows = top_rows

    def runs(self, rows_M: np.ndarray, starts_M: np.ndarray, ends_M: np.ndarray, wants: Sequence[Want]) -> list[Run]:
        """New tokens [start, end) of each of these rows, at most a ring."""
        counts_M = np.maximum(ends_M - starts_M, 0)
        stops_M = np.cumsum(counts_M)
        firsts_M = stops_M - counts_M
        rows_T = np.repeat(rows_M, counts_M)
        places_T = (np.arange(len(rows_T)) + np.repeat(starts_M - firsts_M, counts_M)) % self._parts["ids"].shape[1]
        ids, logprobs = (self._parts[name][rows_T, places_T].tolist() for name in ("ids", "logprobs"))
        runs = []
        for row, first, stop, want in zip(rows_M.tolist(), firsts_M.tolist(), stops_M.tolist(), wants, strict=True):
            more = None
            if want.extra_logprobs or want.entropy or row in self._top_rows:
                more = Columns()
                self._add_columns(more, row, places_T[first:stop], want)
            runs.append((ids[first:stop], logprobs[first:stop], more))
        return runs

    def _add_columns(self, columns: Columns, row: int, places: np.ndarray, want: Want) -> None:
        for name in want.extra_logprobs:
            columns.extra[name] = self._parts["values"][COLUMNS.index(name), row, places].tolist()
        if want.entropy:
            columns.entropy = self._parts["values"][COLUMNS.index("entropy"), row, places].tolist()
        if want.top_logprobs:
            self._add_alternatives(columns, self._top_rows[row], places, want.top_logprobs)

    def _add_alternatives(self, columns: Columns, top_row: int, places: np.ndarray, count: int) -> None:
        """In descending order, ties by the lower id."""
        ids_TK = self._parts["top_ids"][top_row, places, :count]
        values_TK = self._parts["top_logprobs"][top_row, places, :count]
        order_TK = np.lexsort((ids_TK, -values_TK), axis=-1)
        columns.top_ids = np.take_along_axis(ids_TK, order_TK, -1).tolist()
        columns.top_logprobs = np.take_along_axis(values_TK, order_TK, -1).tolist()


class BurstResult(Protocol):
    def wait(self) -> HostResult: ...


class Stepper(Protocol):
    def run(self, samples: list[Sample], slots: list[int], steps: int) -> BurstResult:
        """Enqueue `steps` decode steps of the rows in `slots`, in that order. Pages are reserved."""
        ...


class HostCopy:
    """Results copied to pinned memory behind a burst; `wait` blocks until they are there."""

    def __init__(self, table: DeviceTable, slots_B: torch.Tensor, samples: Sequence[Sample], modes: StepModes) -> None:
        columns = table.columns
        parts = {
            "new": table.new_S.index_select(0, slots_B),
            "finished": table.finished_S.index_select(0, slots_B),
            "ids": table.ring_ids_SW.index_select(0, slots_B),
            "logprobs": table.ring_logprobs_SW.index_select(0, slots_B),
        }
        if modes.columns:
            parts["values"] = columns.values_CSW.index_select(1, slots_B)
        self._top_rows: dict[int, int] = {}
        if modes.top:
            rows = []
            for row, sample in enumerate(samples):
                if sample.row.want.top_logprobs and sample.sequence is not None:
                    self._top_rows[row] = len(rows)
                    rows.append(columns.top_row(sample.sequence.slot))
            rows_R = torch.tensor(rows, dtype=torch.int64, device=slots_B.device)
            parts["top_ids"] = columns.top_ids_RWK.index_select(0, rows_R)
            parts["top_logprobs"] = columns.top_logprobs_RWK.index_select(0, rows_R)
        self._parts = {name: to_host(part) for name, part in parts.items()}
        self._event = torch.cuda.Event() if table.device.type == "cuda" else None
        if self._event is not None:
            self._event.record()

    def wait(self) -> HostResult:
        if self._event is not None:
            self._event.synchronize()
        return HostResult({name: part.numpy() for name, part in self._parts.items()}, self._top_rows)


def to_host(part: torch.Tensor) -> torch.Tensor:
    """Under way to pinned memory where it comes from a GPU."""
    if part.device.type != "cuda":
        return part
    target = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
    target.copy_(part, non_blocking=True)
    return target


class EagerStepper:
    """One operation after another; the host looks at lengths between steps. A `speculation` is given every
    token, so that its drafter may go on from here."""

    def __init__(
        self,
        table: DeviceTable,
        builder: BatchBuilder,
        runner: ModelRunner,
        sampler: Sampler,
        speculation: Speculation | None = None,
    ) -> None:
        self._speculation = speculation
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
        return HostCopy(table, slots_B, samples, StepModes.of(samples))

    def _step(self, samples: list[Sample], slots_B: torch.Tensor) -> None:
        table = self._table
        computed_B = table.computed_S[slots_B]
        batch = self._builder.build_decode(samples, table.last_token_S[slots_B].tolist(), computed_B.tolist())
        layers = () if self._speculation is None else self._speculation.captured_layers
        features = dict.fromkeys(layers, torch.empty(0))
        logits_BV = self._runner.logits(self._runner.hidden(batch, features or None), batch.logit_adapters)
        if self._speculation is not None and layers:
            self._speculation.absorb(batch.input_ids_T, batch.positions_T, batch.write_slots_T, features)
        positions = (computed_B + 1).tolist()
        rows = [self._row(sample, slot) for sample, slot in zip(samples, slots_B.tolist(), strict=True)]
        advance(table, slots_B, self._sampler.sample(logits_BV, rows, positions))

    def _row(self, sample: Sample, slot: int) -> RowSampling:
        """The sample's state with its tokens that nobody has committed yet."""
        if not sample.row.penalises:
            return sample.row
        table = self._table
        places = np.arange(len(sample.ids), int(table.new_S[slot])) % table.ring
        return sample.row.ahead(table.ring_ids_SW[slot, torch.from_numpy(places)].tolist())


def advance(table: DeviceTable, slots_B: torch.Tensor, result: SampleResult) -> None:
    """Take one drawn token per running row into the table: rings, counters, stops.

    A bad row finishes without its token. The reference of the kernel in `engine.kernels.decode_step`.
    """
    table.finished_S[slots_B[result.bad]] = BAD
    good_B = ~result.bad
    slots_B, ids_B = slots_B[good_B], result.ids[good_B].to(torch.int64)
    new_B = table.new_S[slots_B]
    place_B = (new_B % table.ring).to(torch.int64)
    table.ring_ids_SW[slots_B, place_B] = ids_B.to(torch.int32)
    table.ring_logprobs_SW[slots_B, place_B] = result.logprobs[good_B]
    values_CSW = table.columns.values_CSW
    for name, column_B in (*result.extra_logprobs.items(), ("entropy", result.entropy)):
        if column_B is not None:
            values_CSW[COLUMNS.index(name), slots_B, place_B] = column_B[good_B]
    if result.top_ids is not None and result.top_logprobs is not None:
        _advance_top(table, slots_B, place_B, result.top_ids[good_B], result.top_logprobs[good_B])
    table.last_token_S[slots_B] = ids_B
    table.computed_S[slots_B] += 1
    table.new_S[slots_B] = new_B + 1
    stopped_B = (table.stop_ids_SK[slots_B] == ids_B[:, None]).any(1) | (new_B + 1 >= table.max_new_S[slots_B])
    table.finished_S[slots_B] = torch.where(stopped_B, STOPPED, RUNNING).to(torch.int32)


def _advance_top(
    table: DeviceTable, slots_B: torch.Tensor, place_B: torch.Tensor, ids_BK: torch.Tensor, logprobs_BK: torch.Tensor
) -> None:
    columns, count = table.columns, ids_BK.shape[1]
    asked_B = columns.top_count_S[slots_B] > 0
    rows_B, place_B = columns.top_row_S[slots_B[asked_B]].to(torch.int64), place_B[asked_B]
    columns.top_ids_RWK[rows_B, place_B, :count] = ids_BK[asked_B].to(torch.int32)
    columns.top_logprobs_RWK[rows_B, place_B, :count] = logprobs_BK[asked_B]
