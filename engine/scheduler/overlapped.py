"""Bursts of decode steps that the device runs on its own.

Owns the overlapped order of work: launch a burst, then commit the one before it while the device
is busy. Ignores how a burst runs (`engine.runner.stepper`) and what commits mean. Its results
equal `SerialLoop`'s token for token.

The host never waits for a token to launch the next one. Stops on ids, length and bad logits are
the device's; a finished row is a no-op until its slot is handed out again. What the host alone can
see (a stop string, an abort, one of more stop ids than the device looks for) ends a sample at
commit: tokens that the device went on to compute are dropped before anybody sees them, and pages it
still writes hold nothing that others can read, since everything later is ordered behind it in one
stream.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from engine.dspark.alternation import Alternation
from engine.dspark.speculation import Speculation
from engine.memory.device_table import BAD, DeviceTable
from engine.metrics import EngineCounters
from engine.request import Sample, SampleState
from engine.runner.stepper import BurstResult, Stepper
from engine.scheduler.commit import Committer
from engine.scheduler.handover import row_state
from engine.scheduler.loop import SerialLoop
from engine.scheduler.rows import RowColumns, Rows
from engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.runner.round_stepper import RoundResult
    from engine.scheduler.rounds import DeviceRounds, Planned


@dataclass(slots=True)
class Burst:
    """Steps or rounds in flight, and the keys that the rows' sequences had at launch. Unless it ends, a row
    gets at least a token a step, and at most `most` in all."""

    samples: list[Sample]
    keys: list[int]
    steps: int
    most: int
    result: BurstResult | RoundResult
    planned: Planned | None = None
    committed: bool = False


class OverlappedLoop:
    """`burst` bounds the steps launched at once; the ring holds two bursts. With a `speculation` bursts of plain
    steps run for as long as drafting would not pay. `rounds` are launched ahead like those;
    without it, rounds are steps of the serial loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        serial: SerialLoop,
        table: DeviceTable,
        stepper: Stepper,
        committer: Committer,
        counters: EngineCounters,
        burst: int,
        prefill_burst: int,
        speculation: Speculation | None = None,
        rounds: DeviceRounds | None = None,
    ) -> None:
        assert table.ring >= 2 * burst, f"a ring of {table.ring} cannot hold two bursts of {burst}"
        self._scheduler = scheduler
        self._serial = serial
        self._table = table
        self._stepper = stepper
        self._committer = committer
        self._counters = counters
        self._burst = burst
        self._prefill_burst = prefill_burst
        self._speculation = speculation
        self._rounds = rounds
        if speculation is not None:
            free = rounds is not None and not rounds.follows_host
            speculation.alternation = Alternation(speculation.config.probe_every, free)
        self._committed_at: float | None = None
        """When the last burst was committed, where nothing but bursts has run since."""
        self._flying: Burst | None = None
        num_slots = scheduler.pages.table.num_slots
        self._columns = RowColumns(num_slots)
        self._resident_S = np.zeros(num_slots, dtype=np.int64)
        """Key of the sequence whose state the device holds, 0 for none."""

    @property
    def in_flight(self) -> bool:
        return self._flying is not None

    def step(self) -> bool:
        """Prefill what may be prefilled, launch one burst and commit the one before. False if
        there was nothing to do."""
        began = time.perf_counter()
        scheduler = self._scheduler
        worked = False
        if self._asks():
            rounds = self._rounds
            if rounds is None:
                worked = self.settle()
                self._take_back()
                self._counters.serial_rounds += 1
                return self._serial.step() or worked
            if rounds.follows_host:
                worked = self._land()
        if scheduler.wants_prefill:
            worked = self.settle() or worked
            for _ in range(self._prefill_burst):
                if not (scheduler.wants_prefill and self._serial.prefill()):
                    break
                worked = True
            self._serial.settle()
        previous = self._flying
        # With prefill under way the host comes back at once: the batch is about to grow.
        self._flying = self._launch(previous, 1 if scheduler.prefills else self._burst)
        if previous is not None and previous is not self._flying and not previous.committed:
            self._commit(previous)
        worked = worked or previous is not None or self._flying is not None
        if worked:
            self._counters.step_seconds += time.perf_counter() - began
        return worked

    def _asks(self) -> bool:
        """Whether the next step is planned, and may be a round."""
        alternation = None if self._speculation is None else self._speculation.alternation
        return alternation is not None and alternation.asks and bool(self._scheduler.running)

    def settle(self) -> bool:
        """Commit everything in flight, so that the host's view is whole. Whether there was any."""
        worked = self._land()
        self._committed_at = None
        return worked

    def _land(self) -> bool:
        """Commit what is in flight. Whether there was anything."""
        burst, self._flying = self._flying, None
        if burst is not None:
            self._commit(burst)
        return burst is not None

    def _launch(self, previous: Burst | None, most: int) -> Burst | None:
        scheduler = self._scheduler
        rows = self._columns.rows(scheduler.running)
        flying_B = _in_flight(previous, rows)
        least, ahead = (0, 0) if previous is None else (previous.steps, previous.most)
        going_B = rows.remaining_B > least * flying_B
        if not going_B.all():
            rows, flying_B = rows.take(np.flatnonzero(going_B)), flying_B[going_B]
        if not len(rows):
            return None
        planned = self._plan(rows)
        if planned is not None and self._rounds is not None:
            if planned.rows is not rows:
                rows = planned.rows
                flying_B = _in_flight(previous, rows)
            ahead_B = ahead * flying_B
            steps = self._rounds.rounds(planned, most)
            reserved = scheduler.reserve_ahead(rows, ahead_B + 1)
            if reserved:
                self._rounds.reserve(rows, ahead_B + steps * self._rounds.window)
        else:
            steps = min(most, int((rows.remaining_B - least * flying_B).max()))
            reserved = scheduler.reserve_ahead(rows, ahead * flying_B + steps)
        if not reserved:
            # Somebody must give way, which needs the host's view to be whole.
            if previous is not None:
                self._commit(previous)
            scheduler.grow()
            rows, steps, planned = self._columns.rows(scheduler.running), 1, None
            if not len(rows):
                return None
        self._hand_over(rows)
        return self._run(rows, steps, planned, None if previous is None else previous.planned)

    def _plan(self, rows: Rows) -> Planned | None:
        if self._rounds is None or not self._asks():
            return None
        return self._rounds.plan(rows)

    def _run(self, rows: Rows, steps: int, planned: Planned | None, before: Planned | None) -> Burst:
        samples, keys, captures = rows.samples, rows.keys_B.tolist(), self._counters.graph_captures
        self._counters.steps += steps
        if planned is not None and self._rounds is not None:
            most, result = steps * self._rounds.window, self._rounds.launch(planned, steps, before)
        else:
            most, result = steps, self._stepper.run(samples, rows.slots_B.tolist(), steps)
        if self._speculation is not None:
            self._speculation.passed(steps - (planned is not None))
        if self._counters.graph_captures != captures:
            self._committed_at = None  # what is committed next waited for a capture
        return Burst(samples, keys, steps, most, result, planned)

    def _take_back(self) -> None:
        """The device knows of no row any more; the host's view is whole."""
        self._table.release(np.flatnonzero(self._resident_S).tolist())
        self._resident_S[:] = 0

    def _hand_over(self, rows: Rows) -> None:
        """Give the device the rows whose state it does not hold, and take back what those that have
        gone since the last such time still hold."""
        joining = np.flatnonzero(self._resident_S[rows.slots_B] != rows.keys_B).tolist()
        if not joining:
            return
        left_S = self._resident_S.copy()
        left_S[rows.slots_B] = 0
        self._table.release(np.flatnonzero(left_S).tolist())
        self._table.admit([row_state(rows.samples[b]) for b in joining])
        self._resident_S[:] = 0
        self._resident_S[rows.slots_B] = rows.keys_B

    def _commit(self, burst: Burst) -> None:
        burst.committed = True
        if burst.planned is not None and self._rounds is not None:
            outcome = cast("RoundResult", burst.result).wait()
            self._rounds.commit(burst.planned, outcome, self._seconds(burst.steps))
            return
        columns, tokens = cast(BurstResult, burst.result).wait(), [0] * len(burst.samples)
        rows = [
            row
            for row, (sample, key) in enumerate(zip(burst.samples, burst.keys, strict=True))
            if sample.state is SampleState.RUNNING and sample.sequence is not None and sample.sequence.key == key
        ]
        samples, rows_M = [burst.samples[row] for row in rows], np.array(rows, dtype=np.int64)
        starts_M = np.array([len(sample.ids) for sample in samples], dtype=np.int64)
        ends_M = np.minimum(columns.new[rows_M], starts_M + burst.steps)
        runs = columns.runs(rows_M, starts_M, ends_M, [sample.row.want for sample in samples])
        self._committer.commit_runs(samples, runs)
        for row, (ids, _, _) in zip(rows, runs, strict=True):
            tokens[row] = len(ids)
        self._counters.decode_rows += sum(tokens)
        for row in rows_M[columns.finished[rows_M] == BAD].tolist():
            sample = burst.samples[row]
            if sample.state is SampleState.RUNNING and len(sample.ids) == int(columns.new[row]):
                self._committer.fail_bad_logits(sample)
        if self._speculation is not None:
            self._speculation.burst(burst.samples, tokens, self._seconds(burst.steps))

    def _seconds(self, steps: int) -> float | None:
        """What each of the steps took whose results have just arrived, where nothing else ran since."""
        before, self._committed_at = self._committed_at, time.perf_counter()
        return None if before is None else (self._committed_at - before) / steps


def _in_flight(burst: Burst | None, rows: Rows) -> np.ndarray:
    """Whether each row takes part in the burst, bool [B]."""
    keys = set() if burst is None else set(burst.keys)
    return np.array([key in keys for key in rows.keys_B.tolist()], dtype=bool)
