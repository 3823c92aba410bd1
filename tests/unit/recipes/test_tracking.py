"""The tracker: a run is never ended or delayed by it. Cases L1, L2."""

from __future__ import annotations

import json
import logging
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.errors import InvalidRequest
from recipes.tracking import Record, Tracker, TrackingConfig, WandbSink


class FailingSink:
    """Raises at the calls in `at` (None: at every call), or blocks on `gate`."""

    def __init__(self, at: set[int] | None = frozenset(), gate: threading.Event | None = None) -> None:
        self.at = at
        self.gate = gate
        self.calls = 0
        self.stored: list[Record] = []

    def open(self) -> None: ...

    def log(self, record: Record) -> None:
        self.calls += 1
        if self.gate is not None:
            self.gate.wait(30)
        if self.at is None or self.calls in self.at:
            raise ConnectionError("the server went away")
        self.stored.append(record)

    def close(self) -> None: ...


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Records of a W&B run file: a log of 32 KiB blocks after 7 bytes of file header, in which a
    record is one piece (kind 1) or a first, middles and a last (2, 3, 4)."""
    block, header = 32768, 7
    place, record = header, b""
    while place + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + header : place + header + length]
        place += header + length
        if kind in (1, 4):
            yield record
            record = b""


def read_run(data: bytes, messages) -> tuple[list[tuple[str, int]], dict[str, str], set[str]]:
    """Steps by axis, each metric's axis, and the run's groups, of a W&B file that may still grow."""
    stored, axes, groups = [], {}, set()
    for encoded in wandb_records(data):
        record = messages.Record.FromString(encoded)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            stored += [(axis, items[f"{axis}_step"]) for axis in ("train", "rollout") if f"{axis}/value" in items]
        elif record.HasField("metric") and record.metric.step_metric:
            axes[record.metric.name] = record.metric.step_metric
        elif record.HasField("run") and record.run.run_group:
            groups.add(record.run.run_group)
    return stored, axes, groups


def lines(tracker: Tracker) -> list[dict]:
    return [json.loads(line) for line in tracker.path.read_text().splitlines()]


@pytest.mark.parametrize(("at", "lost"), [({3}, 1), (None, 20), (set(), 0)])
def test_case_l1_a_failing_sink_costs_its_records_and_nothing_else(tmp_path: Path, caplog, at, lost: int) -> None:
    sink = FailingSink(at)
    tracker = Tracker(tmp_path, [sink], TrackingConfig())
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            tracker.log("rollout_step", step, {"reward": step / 20})
        tracker.close()
    assert [line["step"] for line in lines(tracker)] == list(range(20))
    assert tracker.lost == lost and len(sink.stored) == 20 - lost
    assert len([r for r in caplog.records if "being lost" in r.message]) == (1 if lost else 0)


def test_case_l1_a_blocking_sink_delays_nothing_and_what_it_misses_is_counted(tmp_path: Path, caplog) -> None:
    gate = threading.Event()
    sink = FailingSink(gate=gate)
    tracker = Tracker(tmp_path, [sink], TrackingConfig(queue_size=4, close_timeout_s=0.3))
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for step in range(20):
            tracker.log("rollout_step", step, {"reward": 0.0})
        assert time.monotonic() - started < 2
        tracker.close()
    assert time.monotonic() - started < 5
    assert len(lines(tracker)) == 20 and tracker.lost == 20
    assert len([r for r in caplog.records if "being lost" in r.message]) == 1
    gate.set()


def test_case_l1_a_sink_that_cannot_open_is_tried_again(tmp_path: Path) -> None:
    class Shy(FailingSink):
        opened = 0

        def open(self) -> None:
            self.opened += 1
            if self.opened < 3:
                raise RuntimeError("not yet")

    sink = Shy()
    tracker = Tracker(tmp_path, [sink], TrackingConfig())
    for step in range(5):
        tracker.log("s", step, {"x": 1.0})
    tracker.close()
    assert [r.step for r in sink.stored] == [2, 3, 4] and tracker.lost == 2


def test_case_l2_interleaved_axes_and_repeated_steps_are_all_kept(tmp_path: Path) -> None:
    sink = FailingSink()
    tracker = Tracker(tmp_path, [sink], TrackingConfig())
    sent = [("train", 10), ("rollout", 3), ("train", 11), ("rollout", 4), ("train", 10)]
    for axis, step in sent:
        tracker.log(axis, step, {f"{axis}/value": float(step)})
    tracker.close()
    assert [(r.axis, r.step) for r in sink.stored] == sent
    assert [(line["axis"], line["step"]) for line in lines(tracker)] == sent
    assert tracker.sent == len(sink.stored) == 5


def test_case_l2_a_metric_under_two_axes_is_refused_loudly(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, [], TrackingConfig())
    tracker.log("train", 1, {"loss": 1.0})
    with pytest.raises(InvalidRequest, match="loss: expected the axis 'train'"):
        tracker.log("rollout", 1, {"loss": 1.0})
    tracker.log("train", 2, {"loss": float("nan")})
    tracker.close()
    assert [line["values"]["loss"] for line in lines(tracker)] == [1.0, None]


def test_case_l2_wandb_keeps_every_record_under_its_own_axis(tmp_path: Path) -> None:
    """An offline run is read back from its own file."""
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    config = TrackingConfig(close_timeout_s=150, group="family")
    sink = WandbSink(tmp_path, "abcd1234", config, {"lr": 1})
    tracker = Tracker(tmp_path, [sink], config)
    sent = [("train", 10), ("rollout", 3), ("train", 11), ("rollout", 4), ("train", 10)]
    for axis, step in sent:
        tracker.log(f"{axis}_step", step, {f"{axis}/value": step / 2})
    tracker.close()
    assert tracker.lost == 0 and wandb.run is None
    (file,) = tmp_path.glob("wandb/offline-run-*/run-abcd1234.wandb")
    # W&B's own process may write the last of it a moment after the run has finished.
    deadline = time.monotonic() + 30
    stored, axes, groups = read_run(file.read_bytes(), wandb_internal_pb2)
    while len(stored) < len(sent) and time.monotonic() < deadline:
        time.sleep(0.05)
        stored, axes, groups = read_run(file.read_bytes(), wandb_internal_pb2)
    assert stored == sent
    assert axes["train/value"] == "train_step" and axes["rollout/value"] == "rollout_step"
    assert groups == {"family"}
