"""Updates under load, from tensors of this process: how long decoding waits.

Owns one update of every parameter of a named shape while rows decode, staged a few tensors at a time
between steps, and revisions of a LoRA policy of rank 16 on all linear modules while rows decode with it,
prepared in a thread of their own. Ignores transports between processes.

    python -m benchmarks.weight_update --shape qwen3-8b [--rows 64] [--json FILE]
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
import typer

from benchmarks.group_rollout import group_requests
from benchmarks.lora import RANK, random_adapter
from benchmarks.report import Row, at_most, report
from benchmarks.shapes import SHAPES, random_engine
from engine import CacheConfig, Engine, EngineConfig, SchedulerConfig
from engine.collector import Collector
from engine.models.registry import build_model
from engine.types import AdapterRef, TensorSpec, UpdateBegin
from engine.weights.layout import Layout

PAUSE_MS = {"qwen3-8b": 50.0}
ADAPTER_PAUSE_MS = 5.0
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


def adapter_rows(shape: str, engine: Engine, rows: int, repeats: int) -> list[Row]:
    """Revisions of one policy that all rows decode with: each runs on with what it has, or goes over."""
    factors = random_adapter(engine._parts.model.adapter_sites, engine._parts.model.dtype)
    config = {"r": RANK, "lora_alpha": 2 * RANK}
    engine.adapters.register("policy", config, factors)
    size = engine.adapters.reports()[0].num_bytes / 2**20
    found = []
    for choice in ("finish", "keep_kv"):
        engine.abort()
        ref = AdapterRef(name="policy", on_publish=choice)
        for request in group_requests(engine, 1, rows, 256, 3000, 1):
            engine.add_group(msgspec.structs.replace(request, adapter=ref), Collector())
        for _ in range(16):
            engine.step()
        figures = [revision(engine, config, factors) for _ in range(repeats + 1)][1:]
        middle = {name: sorted(figure[name] for figure in figures)[repeats // 2] for name in figures[0]}
        case = f"{shape}, adapter of {size:.0f} MiB, {rows} rows that {'run on' if choice == 'finish' else 'switch'}"
        found += [
            at_most(case, "pause", middle["pause"], "ms", ADAPTER_PAUSE_MS),
            Row(case, "longest step while preparing", middle["longest"], "ms"),
            Row(case, "step after publishing", middle["after"], "ms"),
            Row(case, "ordinary step (a burst)", middle["ordinary"], "ms"),
            Row(case, "prepare to publish", middle["whole"], "ms"),
        ]
    engine.abort()
    return found


def revision(engine: Engine, config: dict, factors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Milliseconds, as of `update`: the pause is what runs between two steps."""
    ordinary = [step_ms(engine) for _ in range(8)]
    began, stepping = time.perf_counter(), []
    with ThreadPoolExecutor(1) as thread:
        preparing = thread.submit(engine.adapters.prepare, config, factors)
        while not preparing.done():
            stepping.append(step_ms(engine))
    between = time.perf_counter()
    staged = engine.adapters.stage("policy", preparing.result())
    engine.adapters.publish("policy", staged.rev)
    pause = (time.perf_counter() - between) * 1e3
    after = step_ms(engine)
    whole = (time.perf_counter() - began) * 1e3
    ordinary.sort()
    return {"pause": pause, "longest": max(stepping), "after": after, "ordinary": ordinary[4], "whole": whole}


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
    rows_out += adapter_rows(shape, engine, rows, repeats)
    report("weight_update", rows_out, json)


if __name__ == "__main__":
    typer.run(main)
