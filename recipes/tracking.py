"""Where a run's metrics go.

Owns a tracker that never ends or delays the run it watches: every record is written to a local
file at once, and a thread hands it to the slower sinks through a bounded queue. A sink that
fails or falls behind loses records there, which is counted and warned of once. Every producer
has a step axis of its own, so that a rollout's step 3 may follow a trainer's step 10.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.errors import InvalidRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """`group` is the W&B group of the run (None: none). `queue_size` records wait at most;
    `close_timeout_s` bounds the wait for them at the end. With `curves` a picture of them is drawn then."""

    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "sparkroll"
    group: str | None = None
    curves: bool = True
    queue_size: int = 1024
    close_timeout_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Record:
    """Values at one step of one axis."""

    axis: str
    step: int
    values: dict[str, float]


class Sink(Protocol):
    """Called from the tracker's thread alone; may raise and may block."""

    def open(self) -> None: ...

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """`sent` counts records logged, `lost` those a sink did not take (by sink position)."""

    def __init__(self, folder: Path, sinks: Sequence[Sink], config: TrackingConfig) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._axes: dict[str, str] = {}
        self._config = config
        self.sent = 0
        self._workers = [_Worker(sink, config.queue_size) for sink in sinks]

    @property
    def lost(self) -> int:
        return sum(worker.lost for worker in self._workers)

    def log(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Record values; repeated and lower steps are kept. Raises `InvalidRequest` for a metric
        that was logged under another axis: it would have two x-coordinates."""
        for name in values:
            known = self._axes.setdefault(name, axis)
            if known != axis:
                raise InvalidRequest(field=name, expected=f"the axis {known!r}", actual=axis)
        record = Record(axis, int(step), {name: float(value) for name, value in values.items()})
        finite = {name: value if math.isfinite(value) else None for name, value in record.values.items()}
        line = {"axis": axis, "step": record.step, "time": round(time.time(), 3), "values": finite}
        self._file.write(json.dumps(line) + "\n")
        self.sent += 1
        for worker in self._workers:
            worker.put(record)

    def close(self) -> None:
        """Waits for the sinks, within the bound; what they have not taken by then is lost."""
        deadline = time.monotonic() + self._config.close_timeout_s
        for worker in self._workers:
            worker.close(max(0.0, deadline - time.monotonic()))
        if not self._file.closed:
            self._file.close()


class _Worker:
    """One sink and its thread. The thread is a daemon: a sink that blocks for ever cannot keep
    the process alive."""

    def __init__(self, sink: Sink, size: int) -> None:
        self._sink = sink
        self._queue: queue.Queue[Record | None] = queue.Queue(maxsize=size)
        self._taken = 0
        self._stored = 0
        self._failed = 0
        self._refused = 0
        self._closed = False
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Refused or failed; once closed, everything that was not stored."""
        return self._refused + (self._taken - self._stored if self._closed else self._failed)

    def put(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
            self._taken += 1
        except queue.Full:
            self._refused += 1
            self._warn("its queue is full")

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._warn("it did not finish in time")
        self._closed = True

    def _run(self) -> None:
        opened = False
        while (record := self._queue.get()) is not None:
            try:
                if not opened:
                    self._sink.open()
                    opened = True
                self._sink.log(record)
                self._stored += 1
            except Exception as error:  # a sink's failure is never the run's
                self._failed += 1
                self._warn(repr(error))
        try:
            if opened:
                self._sink.close()
        except Exception as error:
            self._warn(repr(error))

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("metrics are being lost in %s: %s", type(self._sink).__name__, why)


def wandb_sinks(
    folder: Path, run_id: str, config: TrackingConfig, settings: Sequence[str], say: Callable[[str], None]
) -> list[Sink]:
    """The W&B sink where W&B is wanted and installed; `settings` are `key = value` lines."""
    if config.wandb == "disabled":
        return []
    if importlib.util.find_spec("wandb") is None:
        say("wandb is not installed: metrics go to metrics.jsonl alone")
        return []
    return [WandbSink(folder, run_id, config, dict(line.split(" = ", 1) for line in settings))]


class WandbSink:
    """One W&B run. W&B is imported and started in the tracker's thread, on the first record."""

    def __init__(self, folder: Path, run_id: str, config: TrackingConfig, settings: Mapping[str, Any]) -> None:
        self._folder = folder
        self._run_id = run_id
        self._config = config
        self._settings = dict(settings)
        self._defined: set[str] = set()
        self._run: Any = None

    def open(self) -> None:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._config.project,
            id=self._run_id,
            name=self._run_id,
            group=self._config.group,
            resume="allow",
            reinit="create_new",
            mode=self._config.wandb,
            dir=str(self._folder),
            config=self._settings,
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def log(self, record: Record) -> None:
        """The step travels as a metric of its own: W&B drops records whose built-in step falls."""
        for name in (record.axis, *record.values):
            if name not in self._defined:
                self._defined.add(name)
                if name == record.axis:
                    self._run.define_metric(name, hidden=True)
                else:
                    self._run.define_metric(name, step_metric=record.axis)
        self._run.log({**record.values, record.axis: record.step})

    def close(self) -> None:
        self._run.finish()
