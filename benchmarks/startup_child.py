"""One start of an engine, in a process of its own.

Owns the marks of a start (imports, engine, first token, steady throughput) and the compilers'
share of it. Ignores which caches it finds and what the marks should be (`benchmarks.startup`).

    python -m benchmarks.startup_child SHAPE BATCH NEW BEGAN

BEGAN is when the process was started, in seconds since the epoch. The last line is JSON.
"""

from __future__ import annotations

import bisect
import json
import sys
import time
from typing import Any

import numpy as np

INPUT = 512
WINDOW_S = 0.5
"""Throughput is what was committed in this long a window."""


class Discard:
    """A sink for replies nobody reads; errors end the process."""

    wants_deltas = False

    def on_delta(self, deltas: Any) -> None: ...

    def on_sample(self, sample: Any) -> None: ...

    def on_group(self, group: Any) -> None: ...

    def on_error(self, error: Exception) -> None:
        raise SystemExit(f"the request failed: {error}")


def listen() -> list[tuple[str, float]]:
    """(kernel, seconds) of every compilation from now on, triton's disk cache not counted."""
    compiled: list[tuple[str, float]] = []
    try:
        from triton import knobs
    except ImportError:  # on a CPU there is nothing to compile
        return compiled

    def note(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append((src.name, times.total / 1e6))

    knobs.compilation.listener = note
    return compiled


def serve(engine: Any, batch: int, new: int, began: float) -> list[tuple[float, int]]:
    """(seconds since `began`, tokens committed) after every step of a batch of distinct prompts."""
    from engine import GroupRequest, SamplingParams

    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=1.0, max_new=new, ignore_eos=True, seed=0)
    for row in range(batch):
        ids = rng.integers(0, engine.limits.vocab_size, INPUT).astype(np.uint32)
        engine.add_group(GroupRequest(group_id=f"row-{row}", prompt_ids=ids, sampling=sampling), Discard())
    marks = []
    while engine.has_work:
        engine.step()
        marks.append((time.time() - began, engine.counters.generated_tokens))
    return marks


def steady_from(marks: list[tuple[float, int]], batch: int) -> tuple[float, float]:
    """Steady tokens per second, and when nine tenths of it were first reached over a window.

    Steady is the median rate of windows from half of all tokens on.
    """
    times = [when for when, _ in marks]

    def rate(number: int) -> float:
        start = max(0, bisect.bisect_right(times, times[number] - WINDOW_S) - 1)
        seconds = times[number] - times[start]
        return (marks[number][1] - marks[start][1]) / seconds if seconds > 0 else 0.0

    total = marks[-1][1]
    late = [rate(number) for number, (_, tokens) in enumerate(marks) if total / 2 <= tokens <= total - batch]
    steady = float(np.median(late)) if late else rate(len(marks) - 1)
    first = next(number for number in range(len(marks)) if rate(number) >= 0.9 * steady)
    return steady, times[first]


def main(shape: str, batch: int, new: int, began: float) -> None:
    compiled = listen()
    import torch

    from benchmarks.shapes import random_engine
    from engine import EngineConfig

    imported = time.time() - began
    engine = random_engine(shape, EngineConfig())
    if engine.config.device != "cpu":
        torch.cuda.synchronize()
    ready = time.time() - began
    marks = serve(engine, batch, new, began)
    steady, reached = steady_from(marks, batch)
    counters = engine.counters
    result = {
        "imported_s": imported,
        "ready_s": ready,
        "first_token_s": next(when for when, tokens in marks if tokens),
        "steady_90_s": reached,
        "steady_tok_s": steady,
        "captures": counters.graph_captures,
        "capture_s": counters.graph_capture_seconds,
        "padding": counters.graph_padded_rows / max(1, counters.graph_rows) - 1,
        "compiled": len(compiled),
        "compile_s": sum(seconds for _, seconds in compiled),
        "slowest": sorted(compiled, key=lambda item: -item[1])[:8],
        "kv_tokens": engine.config.cache.kv_tokens,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
