"""A policy update under load, from tensors of this process: how long decoding waits.

Owns one update of every parameter of a named shape while rows decode, staged a few tensors at a time
between steps. Ignores transports between processes.

    python -m benchmarks.weight_update --shape qwen3-8b [--rows 64] [--json FILE]
"""

from __future__ import annotations

import time

import torch
import typer

from benchmarks.group_rollout import group_requests
from benchmarks.report import Row, at_most, report
from benchmarks.shapes import SHAPES, random_engine
from engine import CacheConfig, Engine, EngineConfig, SchedulerConfig
from engine.collector import Collector
from engine.models.registry import build_model
from engine.types import TensorSpec, UpdateBegin
from engine.weights.layout import Layout

PAUSE_MS = {"qwen3-8b": 50.0}
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


def checkpoint(shape: str, device: str) -> dict[str, torch.Tensor]:
    """Random bfloat16 tensors for every checkpoint name of a shape."""
    layout = Layout(build_model(SHAPES[shape], torch.bfloat16, torch.device("meta")))
    scale = SHAPES[shape].hidden ** -0.5
    return {
        name: torch.randn(target.shape, dtype=torch.bfloat16, device=device) * scale
        for name, target in layout.targets.items()
    }


def update(engine: Engine, tensors: dict[str, torch.Tensor], version: int, per_step: int) -> dict[str, float]:
    """Milliseconds: of the pause, of the longest step with staging in it, of an ordinary step, of all."""
    manifest = [
        TensorSpec(name=name, dtype=DTYPE_NAMES[value.dtype], shape=list(value.shape))
        for name, value in tensors.items()
    ]
    ordinary = [step_ms(engine) for _ in range(8)]
    began = time.perf_counter()
    txn = f"update-{version}"
    engine.update_begin(
        UpdateBegin(txn=txn, base_version=version - 1, new_version=version, manifest=manifest, kv_policy="keep")
    )
    names, staging = list(tensors), []
    for start in range(0, len(names), per_step):
        part = time.perf_counter()
        engine.update_stage_live(txn, {name: tensors[name] for name in names[start : start + per_step]})
        staging.append((time.perf_counter() - part) * 1e3 + step_ms(engine))
    pause = engine.update_commit(txn).pause_ms
    whole = (time.perf_counter() - began) * 1e3
    return {"pause": pause, "longest": max(staging), "ordinary": sorted(ordinary)[4], "whole": whole}


def step_ms(engine: Engine) -> float:
    began = time.perf_counter()
    assert engine.step(), "nothing left to decode"
    return (time.perf_counter() - began) * 1e3


def main(
    shape: str = "qwen3-8b", rows: int = 64, per_step: int = 16, repeats: int = 3, json: str | None = None
) -> None:
    """Measure and report."""
    config = EngineConfig(
        cache=CacheConfig(kv_tokens=rows * 4096), scheduler=SchedulerConfig(max_running=rows, prefill_tokens=8192)
    )
    engine = random_engine(shape, config)
    for request in group_requests(engine, 1, rows, 256, 3000, 1):
        engine.add_group(request, Collector())
    for _ in range(16):
        engine.step()
    tensors = checkpoint(shape, engine.config.device)
    update(engine, tensors, 1, per_step)
    figures = [update(engine, tensors, 2 + repeat, per_step) for repeat in range(repeats)]
    best = {name: sorted(figure[name] for figure in figures)[repeats // 2] for name in figures[0]}
    gib = sum(value.nbytes for value in tensors.values()) / 2**30
    case, bound = f"{shape}, {gib:.1f} GiB, {rows} rows decoding", PAUSE_MS.get(shape)
    pause = Row(case, "pause", best["pause"], "ms")
    rows_out = [pause if bound is None else at_most(case, "pause", best["pause"], "ms", bound)]
    rows_out.append(Row(case, "longest step while staging", best["longest"], "ms"))
    rows_out.append(Row(case, "ordinary step (a burst)", best["ordinary"], "ms"))
    rows_out.append(Row(case, "begin to commit", best["whole"], "ms"))
    report("weight_update", rows_out, json)


if __name__ == "__main__":
    typer.run(main)
