"""Milliseconds per decode step, by batch, at 512 input and 128 output tokens.

Owns the measurement that targets are stated for: random weights of a named shape, temperature 1,
end ids ignored, prefix cache flushed between rows. A step is timed while every row decodes, from soon after
the last prompt is in until the first row ends: what a whole run takes beyond its prefill is another 5 to 10 %
off from run to run, by how prefill and first steps interleave. Ignores how the engine decodes.

    python -m benchmarks.decode --shape qwen3-8b --batch 1,32,128,256 [--json FILE]
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import typer

from benchmarks.report import Row, at_most, report
from benchmarks.shapes import random_engine
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig
from engine.collector import Collector

INPUT, OUTPUT = 512, 128
SETTLE = 8
"""Steps after the last prompt before timing begins."""

TARGETS = {
    "qwen3-8b": {1: 4.7, 32: 5.6, 128: 8.7, 256: 14.0},
    "smollm2-135m": {1: 0.7, 32: 0.9, 256: 2.0},
    "qwen3-0.6b": {1: 0.8, 32: 1.4, 256: 5.6},
}


def requests(batch: int, vocab_size: int, max_new: int, seed: int, prompt: int = INPUT) -> list[GroupRequest]:
    """Distinct prompts, so that nothing is shared."""
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=1.0, max_new=max_new, ignore_eos=True, seed=seed)
    return [
        GroupRequest(
            group_id=f"row-{row}",
            prompt_ids=rng.integers(0, vocab_size, prompt).astype(np.uint32),
            sampling=sampling,
        )
        for row in range(batch)
    ]


def timed(engine: Engine, batch: int, max_new: int, seed: int, prompt: int = INPUT) -> float:
    """Seconds from the first request to the last reply, cold cache."""
    engine.flush("all")
    work = requests(batch, engine.limits.vocab_size, max_new, seed, prompt)
    began = time.perf_counter()
    engine.generate(work)
    return time.perf_counter() - began


def steady_ms(engine: Engine, batch: int, seed: int, prompt: int = INPUT) -> float:
    """Milliseconds per step while all of `batch` rows decode, cold cache."""
    engine.flush("all")
    counters = engine.counters
    prompted = counters.computed_tokens + batch * prompt
    finished = counters.samples_finished
    sinks = [Collector() for _ in range(batch)]
    work = requests(batch, engine.limits.vocab_size, OUTPUT + 1, seed, prompt)
    for request, sink in zip(work, sinks, strict=True):
        engine.add_group(request, sink)
    marks: list[tuple[float, int]] = []
    while not all(sink.ended for sink in sinks):
        engine.step()
        if counters.computed_tokens >= prompted and counters.samples_finished == finished:
            marks.append((time.perf_counter(), counters.generated_tokens))
    begun = next(mark for mark in marks if mark[1] >= marks[0][1] + SETTLE * batch)
    seconds, tokens = marks[-1][0] - begun[0], marks[-1][1] - begun[1]
    return seconds / (tokens / batch) * 1e3


def step_ms(engine: Engine, batch: int, repeats: int) -> tuple[float, float]:
    """Median milliseconds per decode step, and of the prefill."""
    for max_new in (OUTPUT + 1, 1, OUTPUT + 1):
        timed(engine, batch, max_new, 0)  # Kernels compile and graphs are captured, some on their second use.
    steps = [steady_ms(engine, batch, repeat + 1) for repeat in range(repeats)]
    prefills = [timed(engine, batch, 1, repeat + 1) * 1e3 for repeat in range(repeats)]
    return statistics.median(steps), statistics.median(prefills)


def main(
    shape: str = "qwen3-8b",
    batch: str = "1,32,128,256",
    repeats: int = 3,
    json: str | None = None,
) -> None:
    """Measure and report."""
    batches = [int(item) for item in batch.split(",")]
    config = EngineConfig(
        cache=CacheConfig(kv_tokens=max(batches) * (INPUT + OUTPUT + 64) + 8192),
        scheduler=SchedulerConfig(max_running=max(batches), prefill_tokens=8192),
    )
    engine = random_engine(shape, config)
    rows = []
    for size in batches:
        step, prefill = step_ms(engine, size, repeats)
        case = f"{shape} batch {size}"
        bound = TARGETS.get(shape, {}).get(size)
        row = Row(case, "decode step", step, "ms")
        rows.append(row if bound is None else at_most(case, "decode step", step, "ms", bound))
        rows.append(Row(case, "prefill", size * INPUT / prefill * 1e3, "tok/s"))
    report("decode", rows, json)


if __name__ == "__main__":
    typer.run(main)
