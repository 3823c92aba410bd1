"""Updates under load, from tensors of this process: how long decoding waits.

Owns one update of every parameter of a named shape while rows decode, staged a few tensors at a time
between steps, and revisions of a LoRA policy of rank 16 on all linear modules while rows decode with it,
prepared in a thread of their own. The pause is what publishing adds to the time in which rows say so many tokens:
steps that were launched before go on meanwhile. Ignores transports between processes.

    python -m benchmarks.weight_update --shape qwen3-8b [--rows 64] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
WINDOW = 64
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
    """Milliseconds: of the pause, of what ran nothing, of the longest step with staging in it, of an ordinary step, of
    all."""
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
    whole, stopped = (time.perf_counter() - began) * 1e3, []
    pause = added_ms(engine, lambda: stopped.append(engine.update_commit(txn).pause_ms))
    figures = {"longest": max(staging), "ordinary": sorted(ordinary)[4], "whole": whole}
    return {"pause": pause, "stopped": stopped[0]} | figures


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
        for request in group_requests(engine, 1, rows, 256, 3600, 1):
            engine.add_group(msgspec.structs.replace(request, adapter=ref), Collector())
        for _ in range(16):
            engine.step()
        figures = [revision(engine, config, factors) for _ in range(repeats + 1)][1:]
        middle = {name: sorted(figure[name] for figure in figures)[repeats // 2] for name in figures[0]}
        case = f"{shape}, adapter of {size:.0f} MiB, {rows} rows that {'run on' if choice == 'finish' else 'switch'}"
        found += [
            at_most(case, "pause", middle["pause"], "ms", ADAPTER_PAUSE_MS),
            Row(case, "longest step while preparing", middle["longest"], "ms"),
            Row(case, "ordinary step (a burst)", middle["ordinary"], "ms"),
            Row(case, "prepare to publish", middle["whole"], "ms"),
        ]
    engine.abort()
    return found


def revision(engine: Engine, config: dict, factors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Milliseconds, as of `update`."""
    ordinary = [step_ms(engine) for _ in range(8)]
    began, stepping = time.perf_counter(), []
    with ThreadPoolExecutor(1) as thread:
        preparing = thread.submit(engine.adapters.prepare, config, factors)
        while not preparing.done():
            stepping.append(step_ms(engine))
    whole = (time.perf_counter() - began) * 1e3

    def publish() -> None:
        staged = engine.adapters.stage("policy", preparing.result())
        engine.adapters.publish("policy", staged.rev)

    pause = added_ms(engine, publish)
    return {"pause": pause, "longest": max(stepping), "ordinary": sorted(ordinary)[4], "whole": whole}


def added_ms(engine: Engine, publish: Callable[[], None]) -> float:
    """How much longer the rows take for so many tokens with `publish` in the middle."""
    plain = sorted(window_ms(engine, lambda: None) for _ in range(3))[1]
    return window_ms(engine, publish) - plain


def window_ms(engine: Engine, act: Callable[[], None]) -> float:
    """`WINDOW` tokens of every row, with `act` after half of them."""
    counters, rows = engine.counters, len(engine._scheduler.running)

    def run(tokens: int) -> None:
        end = counters.generated_tokens + tokens * rows
        while counters.generated_tokens < end:
            engine.step()

    run(1)  # from the end of a burst on
    began = time.perf_counter()
    run(WINDOW // 2)
    act()
    run(WINDOW // 2)
    return (time.perf_counter() - began) * 1e3


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
    for request in group_requests(engine, 1, rows, 256, 3600, 1):
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
    rows_out.append(Row(case, "nothing ran", best["stopped"], "ms"))
    rows_out.append(Row(case, "longest step while staging", best["longest"], "ms"))
    rows_out.append(Row(case, "ordinary step (a burst)", best["ordinary"], "ms"))
    rows_out.append(Row(case, "begin to commit", best["whole"], "ms"))
    rows_out += adapter_rows(shape, engine, rows, repeats)
    report("weight_update", rows_out, json)


if __name__ == "__main__":
    typer.run(main)
