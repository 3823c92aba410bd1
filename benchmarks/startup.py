"""Seconds from starting a process to the first token, and to nine tenths of steady throughput.

Owns the two kinds of start that targets are stated for: cold, with nothing compiled, and cached,
with the kernels of an earlier start. Each start is a fresh process with the default configuration
and random weights of a named shape. Ignores what happens inside (`benchmarks.startup_child`).

    python -m benchmarks.startup --shape qwen3-8b [--batch 256] [--new 384] [--json FILE]
"""

from __future__ import annotations

import json as codec
import os
import subprocess
import sys
import tempfile
import time

import typer

from benchmarks.report import Row, at_most, report

TARGETS = {"cold": 60.0, "cached": 15.0}
CACHES = ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH")
"""Where compilers and the engine keep what they made."""


def start(shape: str, batch: int, new: int, caches: str) -> dict:
    """One start with its caches in the folder `caches`; raises RuntimeError with its last words."""
    environment = os.environ | {name: os.path.join(caches, name.lower()) for name in CACHES}
    command = [sys.executable, "-m", "benchmarks.startup_child", shape, str(batch), str(new), str(time.time())]
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise RuntimeError(f"the start failed ({child.returncode}): {child.stdout[-2000:]}")
    return codec.loads(child.stdout.strip().splitlines()[-1])


def rows_of(case: str, target: float, result: dict) -> list[Row]:
    return [
        Row(case, "imported", result["imported_s"], "s"),
        Row(case, "engine ready", result["ready_s"], "s"),
        at_most(case, "first token", result["first_token_s"], "s", target),
        at_most(case, "90 % of steady throughput", result["steady_90_s"], "s", target),
        Row(case, "steady throughput", result["steady_tok_s"], "tok/s"),
        Row(case, "kernels compiled", result["compiled"], ""),
        Row(case, "compilation", result["compile_s"], "s"),
        Row(case, "graphs captured", result["captures"], ""),
        Row(case, "first runs and captures", result["capture_s"], "s"),
    ]


def main(shape: str = "qwen3-8b", batch: int = 256, new: int = 384, json: str | None = None) -> None:
    """Measure and report."""
    rows = []
    with tempfile.TemporaryDirectory() as caches:
        for kind, target in TARGETS.items():
            result = start(shape, batch, new, caches)
            rows += rows_of(f"{shape} batch {batch}, {kind}", target, result)
            print(f"{kind}: slowest compilations {result['slowest']}", file=sys.stderr)
    report("startup", rows, json)


if __name__ == "__main__":
    typer.run(main)
