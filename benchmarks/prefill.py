"""Prompt tokens per second, and what prefill costs those who are decoding meanwhile.

Owns three shapes of prompts (many short, some long, one very long), each computed from an empty cache
for one output token, and the longest wait between two tokens of a sample that decodes while prompts
arrive. Ignores how prompts are cut into chunks.

    python -m benchmarks.prefill --shape qwen3-8b [--attention triton] [--json FILE]
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import typer

from benchmarks.report import Row, at_least, report
from benchmarks.shapes import SHAPES, random_engine
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig

PROMPTS = ((256, 512), (32, 4096), (1, 32_768))
TARGETS = {("qwen3-8b", 256, 512): 45_000.0}


def prompts(engine: Engine, count: int, length: int, max_new: int, seed: int) -> list[GroupRequest]:
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=1.0, max_new=max_new, ignore_eos=True, seed=seed)
    return [
        GroupRequest(
            group_id=f"prompt-{seed}-{number}",
            prompt_ids=rng.integers(0, engine.limits.vocab_size, length).astype(np.uint32),
            sampling=sampling,
        )
        for number in range(count)
    ]


def prefill_seconds(engine: Engine, count: int, length: int, repeats: int) -> float:
    """Median seconds from an empty cache to every prompt's first token."""
    seconds = []
    for repeat in range(repeats + 1):
        engine.flush("all")
        work = prompts(engine, count, length, 1, repeat)
        began = time.perf_counter()
        engine.generate(work)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


class Waits:
    """Notes when tokens arrive."""

    wants_deltas = True

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_delta(self, deltas: Any) -> None:
        self.times.append(time.perf_counter())

    def on_sample(self, sample: Any) -> None:
        pass

    def on_group(self, group: Any) -> None:
        pass

    def on_error(self, error: Exception) -> None:
        raise error

    def longest_ms(self, after: float) -> float:
        times = [when for when in self.times if when >= after]
        return max(b - a for a, b in itertools.pairwise(times)) * 1e3


def longest_wait_ms(engine: Engine, others: int = 64, length: int = 1024) -> float:
    """The longest wait of one decoding sample while `others` prompts arrive at once."""
    engine.flush("all")
    watched, crowd = Waits(), Waits()

    def step() -> None:
        assert engine.step(), "nothing left to do"
        engine.flush_deltas()

    engine.add_group(prompts(engine, 1, 512, 512, 90)[0], watched)
    while len(watched.times) < 3:
        step()
    began = time.perf_counter()
    for request in prompts(engine, others, length, 1, 91):
        engine.add_group(request, crowd)
    while len(crowd.times) < others:
        step()
    for _ in range(4):
        step()
    engine.abort()
    return watched.longest_ms(began)


def main(shape: str = "qwen3-8b", attention: str = "auto", repeats: int = 3, json: str | None = None) -> None:
    """Measure and report."""
    cases = [(count, length) for count, length in PROMPTS if length < SHAPES[shape].context_len]
    most = max(count * (length + 64) for count, length in cases)
    config = EngineConfig(
        attention=attention,
        cache=CacheConfig(kv_tokens=most + 65_536),
        scheduler=SchedulerConfig(max_running=256),
    )
    engine = random_engine(shape, config)
    rows = []
    for count, length in cases:
        rate = count * length / prefill_seconds(engine, count, length, repeats)
        case, bound = f"{shape} {count} x {length}", TARGETS.get((shape, count, length))
        plain = Row(case, "prefill", rate, "tok/s")
        rows.append(plain if bound is None else at_least(case, "prefill", rate, "tok/s", bound))
    longest_wait_ms(engine)
    rows.append(Row(f"{shape} 64 x 1024 arriving", "longest wait between tokens", longest_wait_ms(engine), "ms"))
    report("prefill", rows, json)


if __name__ == "__main__":
    typer.run(main)
