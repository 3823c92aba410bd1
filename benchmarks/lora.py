"""Milliseconds per decode step with LoRA policies, by batch and number of adapters.

Owns the measurement that targets are stated for: random weights of a named shape, rank 16 on all linear
modules, 256 tokens in and 128 out, every row a prompt of its own. Steps are timed from when all rows
decode. Variants of one batch take turns, so that a drifting clock meets all of them. Ignores what the
policies say.

    python -m benchmarks.lora --shape qwen3-8b --batch 1,32,128 [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import typer

from benchmarks.gpu_timing import BANDWIDTH
from benchmarks.report import Row, at_most, report
from benchmarks.shapes import random_engine
from engine import CacheConfig, Engine, EngineConfig, GroupRequest, SamplingParams, SchedulerConfig
from engine.collector import Collector
from engine.types import AdapterRef
from lora.config import AdapterConfig
from lora.geometry import Geometry, Kind

INPUT, OUTPUT, RANK, MOST = 256, 128, 16, 64
TIMED = 96
"""Steps of a timing; the rest of OUTPUT is for rows to begin."""
PROFILED = 16
OURS = ("lora_", "adapted_")


@dataclass(frozen=True, slots=True)
class Variant:
    """`resident` adapters on the device, `active` of them used by the rows, evenly or as 1, 1/2, 1/3, ..."""

    name: str
    resident: int
    active: int
    skewed: bool = False

    def names(self, batch: int) -> list[str | None]:
        """Each row's policy."""
        if not self.active:
            return [None] * batch
        if not self.skewed:
            return [f"policy-{row % self.active}" for row in range(batch)]
        weights = 1 / np.arange(1, self.active + 1)
        ends = np.cumsum(weights) / weights.sum()
        return [f"policy-{int(np.searchsorted(ends, (row + 0.5) / batch))}" for row in range(batch)]


def variants(batch: int) -> list[Variant]:
    found = [Variant("none", 0, 0)]
    found += [Variant(f"{count} adapters", count, count) for count in (1, 4, 16, MOST) if count <= batch]
    if batch > 1:
        found.append(Variant(f"{min(MOST, batch)} skewed", MOST, min(MOST, batch), True))
    if batch >= MOST:
        found += [Variant(f"{MOST} idle", MOST, 0), Variant(f"4 of {MOST} adapters", MOST, 4)]
    return found


def random_adapter(sites: Geometry, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Factors of every linear module under peft's names, small enough to change tokens little."""
    source, found = torch.Generator().manual_seed(0), {}
    for module in sites.places:
        if sites.kind(module) is not Kind.LINEAR:
            continue
        inputs, outputs = sites.module_shape(module)
        for name, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            factor = torch.randn(*shape, generator=source) * (0.1 / shape[1] ** 0.5)
            found[f"base_model.model.{module}.lora_{name}.weight"] = factor.to(dtype)
    return found


class Policies:
    """Registers as many policies as a variant wants; all have the same factors, each its own copy."""

    def __init__(self, engine: Engine) -> None:
        self._adapters = engine.adapters
        tensors = random_adapter(engine._parts.model.adapter_sites, engine._parts.model.dtype)
        self._prepared = self._adapters.prepare({"r": RANK, "lora_alpha": 2 * RANK}, tensors)
        self.num_bytes = self._prepared.packed.num_bytes
        self._count = 0

    def reside(self, count: int) -> None:
        for number in range(self._count, count):
            staged = self._adapters.stage(f"policy-{number}", self._prepared)
            self._adapters.publish(staged.name, staged.rev)
        for number in range(count, self._count):
            self._adapters.retire(f"policy-{number}")
        self._count = count


def start(engine: Engine, names: list[str | None], seed: int) -> None:
    """Queue a row for each name and step until all decode."""
    engine.flush("all")
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=1.0, max_new=OUTPUT, ignore_eos=True, seed=seed)
    for row, name in enumerate(names):
        prompt = rng.integers(0, engine.limits.vocab_size, INPUT).astype(np.uint32)
        adapter = None if name is None else AdapterRef(name=name)
        request = GroupRequest(group_id=f"{seed}-{row}", prompt_ids=prompt, sampling=sampling, adapter=adapter)
        engine.add_group(request, Collector())
    while engine.gauges().waiting or engine.gauges().prefilling or engine.gauges().running < len(names):
        engine.step()
    engine.step()
    torch.cuda.synchronize()


def steps(engine: Engine, count: int) -> float:
    """Milliseconds a step, of at least `count`."""
    before, began = engine.counters.steps, time.perf_counter()
    while engine.counters.steps - before < count:
        engine.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (engine.counters.steps - before) * 1e3


def shares(engine: Engine) -> tuple[float, list[tuple[str, float]]]:
    """The adapters' kernels' part of the time of all kernels, and microseconds a step of the longest ones."""
    before = engine.counters.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps(engine, PROFILED)
    count, times = engine.counters.steps - before, Counter[str]()
    for event in profile.events() or ():
        times[event.name] += event.device_time_total
    ours = sum(spent for name, spent in times.items() if name.startswith(OURS))
    return ours / max(1e-9, times.total()), [(name, spent / count) for name, spent in times.most_common(16)]


def measure(engine: Engine, policies: Policies, batch: int, repeats: int) -> dict[Variant, float]:
    """Median milliseconds a step."""
    times: dict[Variant, list[float]] = {variant: [] for variant in variants(batch)}
    for repeat in range(repeats + 1):
        for variant, found in times.items():
            policies.reside(variant.resident)
            start(engine, variant.names(batch), repeat)
            spent = steps(engine, TIMED)
            engine.abort()
            print(f"{batch} rows, {variant.name}, turn {repeat}: {spent:.3f} ms", file=sys.stderr, flush=True)
            if repeat:  # the first captures graphs
                found.append(spent)
    return {variant: statistics.median(found) for variant, found in times.items()}


def rows_of(shape: str, batch: int, times: dict[Variant, float], num_bytes: int) -> list[Row]:
    """The figures, with bounds where there are any: targets are stated for 128 rows of 8B."""
    by_name, bounded = {variant.name: spent for variant, spent in times.items()}, batch == 128 and shape == "qwen3-8b"
    none, rows = by_name["none"], []
    reading = MOST * num_bytes / BANDWIDTH * 1e3
    bounds = {
        "1 adapters": (1.05, none),
        "4 adapters": (1.015, by_name.get("1 adapters", none)),
        f"4 of {MOST} adapters": (1.005, by_name.get("4 adapters", none)),
        f"{MOST} idle": (1.005, none),
        f"{MOST} adapters": ((none + 1.3 * reading) / none, none),
    }
    for name, spent in by_name.items():
        case = f"{shape} batch {batch}, {name}"
        rows.append(Row(case, "decode step", spent, "ms"))
        rows.append(Row(case, "over none", 100 * (spent / none - 1), "%"))
        if bounded and name in bounds:
            factor, base = bounds[name]
            rows.append(at_most(case, "share of its bound", spent / (factor * base), "", 1.0))
    return rows


def profiled(engine: Engine, policies: Policies, shape: str, batch: int) -> list[Row]:
    rows = []
    for active in (1, min(MOST, batch)):
        policies.reside(active)
        start(engine, Variant("", active, active).names(batch), 100 + active)
        share, longest = shares(engine)
        engine.abort()
        case = f"{shape} batch {batch}, {active} adapters"
        rows.append(Row(case, "kernels' share of the step", 100 * share, "%"))
        rows += [Row(case, f"kernel {name[:60]}", spent, "us/step") for name, spent in longest]
    return rows


def main(
    shape: str = "qwen3-8b", batch: str = "1,32,128", repeats: int = 3, profile: bool = True, json: str | None = None
) -> None:
    """Measure and report."""
    batches = [int(item) for item in batch.split(",")]
    config = EngineConfig(
        cache=CacheConfig(kv_tokens=max(batches) * (INPUT + OUTPUT + 64) + 8192),
        scheduler=SchedulerConfig(max_running=max(batches), prefill_tokens=8192),
        adapters=AdapterConfig(max_rank=RANK, max_resident=MOST, device_mib=5632),
    )
    engine = random_engine(shape, config)
    policies, rows = Policies(engine), []
    for size in batches:
        rows += rows_of(shape, size, measure(engine, policies, size, repeats), policies.num_bytes)
    if profile:
        rows += profiled(engine, policies, shape, max(batches))
    rows.append(Row(shape, "graphs captured", engine.counters.graph_captures, ""))
    rows.append(Row(shape, "steps that were not captured", engine.counters.graph_eager_steps, ""))
    report("lora", rows, json)


if __name__ == "__main__":
    typer.run(main)
