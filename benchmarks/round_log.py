"""What planners of speculation decide and what comes of it, launch by launch: where a run's time went.

    python -m benchmarks.round_log LOG.jsonl.gz benchmarks.dspark --model smollm2-135m ...   # run a module under it
    python -m benchmarks.round_log LOG.jsonl.gz                                               # print what it holds

Owns hooks around planners, rounds, bursts and prompts of all engines of a process, and the log's lines. Garbage
collections are in it too, as they stop what launches. Times are milliseconds: `t` since the log began, `host` of the
call, `device` of a round and `idle` of the device before the first of them. Ignores what is run.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from engine.dspark.planner import Planner
from engine.kernels.round_commit import HEAD
from engine.scheduler.loop import SerialLoop
from engine.scheduler.overlapped import OverlappedLoop
from engine.scheduler.rounds import DeviceRounds


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Engines write what they decide and do to `path`, until the block ends."""
    with gzip.open(path, "wt") as file:
        log = _Log(file)
        hooks = [
            (Planner, "choose", log.choose),
            (OverlappedLoop, "_run", log.launch),
            (SerialLoop, "prefill", log.prefill),
            (DeviceRounds, "commit", log.commit),
        ]
        before = [(kind, name, getattr(kind, name)) for kind, name, _ in hooks]
        gc.callbacks.append(log.garbage)
        try:
            for (kind, name, hook), (*_, own) in zip(hooks, before, strict=True):
                setattr(kind, name, _around(own, hook))
            yield
        finally:
            gc.callbacks.remove(log.garbage)
            for kind, name, own in before:
                setattr(kind, name, own)


def _around(own: Callable, hook: Callable) -> Callable:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return hook(lambda: own(self, *given, **named), self, *given, **named)

    return method


class _Log:
    """One line an event."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._began = file, time.perf_counter()
        self._collecting = self._began

    def _put(self, event: str, since: float, **facts: Any) -> None:
        now = time.perf_counter()
        times = {"t": _ms(now - self._began), "host": _ms(now - since)}
        self._file.write(json.dumps({"event": event, **times, **facts}) + "\n")

    def garbage(self, phase: str, told: dict[str, int]) -> None:
        """Those of all generations: the others are many and short."""
        if phase == "start":
            self._collecting = time.perf_counter()
        elif told["generation"] == 2:
            self._put("garbage", self._collecting, collected=told["collected"])

    def choose(self, call: Callable, planner: Planner, outlook: Any, allowed: bool = True) -> Any:
        began, choice = time.perf_counter(), call()
        facts = {"tokens": round(choice.tokens, 1), "predicted": _ms(choice.seconds), "price": round(choice.price, 3)}
        graph = {"budget": choice.budget, "verify": choice.tier, "slots": choice.slots, "window": choice.window}
        said = {"drafting": choice.drafting, "probe": choice.probe, "allowed": bool(allowed)}
        self._put(
            "plan", began, rows=len(outlook.most_B), may=int((outlook.most_B > 0).sum()), **said, **graph, **facts
        )
        return choice

    def launch(
        self, call: Callable, loop: OverlappedLoop, rows: Any, steps: int, planned: Any, *_: Any, **__: Any
    ) -> Any:
        began, made = time.perf_counter(), loop._counters.graph_captures
        burst = call()
        kind = "burst" if planned is None else "rounds"
        self._put(kind, began, rows=len(rows), steps=steps, captures=loop._counters.graph_captures - made)
        return burst

    def prefill(self, call: Callable, *_: Any, **__: Any) -> Any:
        began, worked = time.perf_counter(), call()
        if worked:
            self._put("prefill", began)
        return worked

    def commit(self, call: Callable, rounds: DeviceRounds, planned: Any, result: Any, *_: Any, **__: Any) -> Any:
        clock, tokens = planned.result.seconds_behind(planned.before), rounds._counters.decode_rows
        began, outcome = time.perf_counter(), call()
        head_RBF = np.stack(result[1])[:, :, :HEAD]
        live_RB, count = head_RBF[:, :, 0] >= 0, len(head_RBF)
        facts = {"live": live_RB.sum() / count, "verified": np.where(live_RB, head_RBF[:, :, 1], 0).sum() / count}
        facts["tokens"] = (rounds._counters.decode_rows - tokens) / count
        if clock is not None:
            facts |= {"idle": _ms(clock[0]), "device": _ms(clock[1] / count)}
        ran = planned.result
        graph = {"rows": ran.padded, "verify": ran.verify, "slots": ran.slots, "window": ran.window}
        self._put(
            "came", began, steps=count, **graph, **{name: round(float(value), 3) for name, value in facts.items()}
        )
        return outcome


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def lines(events: list[dict[str, Any]]) -> Iterator[str]:
    """The events as text, and what they come to."""
    for event in events:
        rest = "  ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "t"))
        yield f"{event['t']:12.1f}  {event['event']:<8}{rest}"
    for kind in dict.fromkeys(event["event"] for event in events):
        own = [event for event in events if event["event"] == kind]
        sums = [f"host {sum(event['host'] for event in own):,.1f} ms"]
        for name in ("idle", "captures"):
            if any(name in event for event in own):
                sums.append(f"{name} {sum(event.get(name, 0) for event in own):,.1f}")
        if kind == "came":
            sums.append(f"device {sum(event.get('device', 0) * event['steps'] for event in own):,.1f} ms")
        yield f"{kind}: {len(own)}, " + ", ".join(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("module", nargs="?", help="what to run; its own arguments follow")
    args, rest = parser.parse_known_args()
    if args.module is None:
        print("\n".join(lines(read(args.log))))
        return
    sys.argv = [args.module, *rest]
    with logged(args.log):
        runpy.run_module(args.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
