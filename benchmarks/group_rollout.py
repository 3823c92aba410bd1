"""Output tokens per second of a group rollout, prefill included, log-probabilities on.

Owns the shape that reinforcement learning runs: groups of samples of one prompt. Ignores how
shared prefixes are read.

    python -m benchmarks.group_rollout --shape qwen3-8b --groups 32 --samples 16 [--json FILE]
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import typer

from benchmarks.report import Row, at_least, report
from benchmarks.shapes import random_engine
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig

TARGETS = {
    ("qwen3-8b", 32, 16, 1024, 256): 22000.0,
    ("smollm2-135m", 32, 16, 1024, 256): 150000.0,
    ("qwen3-0.6b", 32, 16, 1024, 256): 80000.0,
    ("qwen3-8b", 8, 64, 4096, 256): 20000.0,
}


def group_requests(engine: Engine, groups: int, samples: int, prompt: int, new: int, seed: int) -> list[GroupRequest]:
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=1.0, max_new=new, ignore_eos=True, seed=seed)
    return [
        GroupRequest(
            group_id=f"group-{number}",
            prompt_ids=rng.integers(0, engine.limits.vocab_size, prompt).astype(np.uint32),
            n=samples,
            sampling=sampling,
        )
        for number in range(groups)
    ]


def rollout(engine: Engine, groups: int, samples: int, prompt: int, new: int, seed: int) -> float:
    """Seconds for all groups, from an empty cache."""
    engine.flush("all")
    work = group_requests(engine, groups, samples, prompt, new, seed)
    began = time.perf_counter()
    replies = engine.generate(work)
    seconds = time.perf_counter() - began
    assert all(len(sample.ids) == len(sample.logprobs) == new for reply in replies for sample in reply.samples)
    return seconds


def main(
    shape: str = "qwen3-8b",
    groups: int = 32,
    samples: int = 16,
    prompt: int = 1024,
    new: int = 256,
    repeats: int = 3,
    json: str | None = None,
) -> None:
    """Measure and report."""
    running = groups * samples
    config = EngineConfig(
        cache=CacheConfig(kv_tokens=groups * (prompt + 64) + running * (new + 96) + 8192),
        scheduler=SchedulerConfig(max_running=running, prefill_tokens=8192),
    )
    engine = random_engine(shape, config)
    rollout(engine, groups, samples, prompt, new, 0)
    seconds = statistics.median(rollout(engine, groups, samples, prompt, new, s + 1) for s in range(repeats))
    speed = running * new / seconds
    target = TARGETS.get((shape, groups, samples, prompt, new))
    case = f"{shape} {groups} x {samples}, {prompt} in, {new} out"
    row = Row(case, "output", speed, "tok/s")
    report("group_rollout", [row if target is None else at_least(case, "output", speed, "tok/s", target)], json)


if __name__ == "__main__":
    typer.run(main)
