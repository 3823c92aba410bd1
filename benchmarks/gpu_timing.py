"""Checking and timing one GPU operation at a time.

Owns the case, the random inputs, the timing inside a CUDA graph, and the line a case prints.
Ignores which operations there are (`benchmarks.gpu_ops`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.report import Row

BANDWIDTH = 4.26e12
"""Bytes a second that a device-to-device copy moves on one H200."""
CACHE_BYTES = 192 << 20
BF16 = torch.bfloat16


@dataclass(slots=True)
class Case:
    """One operation at one shape. `variants` and `torch` run input set i; `error` checks the variant
    that ran last on set 0 (poisoned before) and returns a relative error below `tolerance`."""

    name: str
    bytes: int
    sets: int
    variants: dict[str, Callable[[int], object]]
    torch: Callable[[int], object]
    poison: Callable[[], object]
    error: Callable[[], float]
    tolerance: float = 8e-3
    times: dict[str, float] = field(default_factory=dict)


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda", dtype=dtype if dtype.is_floating_point else None) * scale).to(dtype)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float("inf") if bool(difference.isnan()) else float(difference)


def microseconds(run: Callable[[int], object], sets: int) -> float:
    """Median time of one launch inside a graph of many."""
    run(0)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run(0)
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end), 2e-3)
    repeats = max(sets, min(60, int(4.0 / once))) if once < 4.0 else 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            run(i % sets)
    times = []
    for _ in range(6):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / repeats)
    del graph
    return sorted(times[1:])[2]


def rotating(size: int, most: int = 48) -> int:
    """How many copies of `size` bytes exceed the cache."""
    return max(1, min(most, -(-CACHE_BYTES // size)))


def measure(case: Case, deadline: float) -> tuple[list[Row], int]:
    """Check and time every variant; rows of the figures, and how many variants had no time left."""
    rows, left = [], 0
    for name, run in case.variants.items():
        if time.monotonic() > deadline:
            left += 1
            continue
        case.poison()
        run(0)
        error = case.error()
        if not error <= case.tolerance:
            rows.append(Row(case.name, f"error {name}", error, "", case.tolerance, False))
            continue
        case.times[name] = microseconds(run, case.sets)
    if case.times:
        best = min(case.times, key=case.times.__getitem__)
        floor = case.bytes / BANDWIDTH * 1e6
        baseline = microseconds(case.torch, case.sets)
        others = " ".join(f"{name}={value:.1f}" for name, value in case.times.items() if name != best)
        print(
            f"{case.name:34} {case.times[best]:8.1f} us {floor / case.times[best]:5.0%} of floor  torch {baseline:8.1f}"
            f"  best {best}  {others}",
            flush=True,
        )
        rows += [Row(case.name, f"us {name}", value, "us") for name, value in case.times.items()]
        rows.append(Row(case.name, "share of floor", floor / case.times[best], ""))
        rows.append(Row(case.name, "us torch", baseline, "us"))
    return rows, left
