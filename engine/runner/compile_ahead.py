"""Kernels compiled side by side.

Owns finding out what a sequence of launches has to compile, and compiling all of it at once:
launches by themselves compile one kernel after another, each when it is reached. Ignores what the
launches compute.

Nothing is launched to find out. The sequence runs under a graph capture, in which triton's cache hook reports
each missing kernel and skips it; where none was missing the graph is whole, and worth keeping.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs

from engine.runner.capture import capture

logger = logging.getLogger(__name__)

Missing = dict[tuple[str, str], Any]
"""(kernel's name, specialisation as triton serialises it) -> the kernel."""


def compile_ahead(
    launches: Callable[[], object], stream: torch.cuda.Stream, pool: Any
) -> tuple[int, torch.cuda.CUDAGraph | None]:
    """Compile whatever `launches` lacks; how many kernels that were, and the graph that was looked at, which is
    whole where it was none. `launches` must be fit for graph capture, which here takes its memory from a kept
    graph pool. Where looking ahead fails, nothing is compiled and launches go on to do it themselves."""
    # Libraries set themselves up outside of captures.
    filled = torch.ones(16, 16, dtype=torch.bfloat16, device=stream.device)
    torch.mm(filled, filled)
    try:
        with missing_kernels() as missing, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # where everything was skipped
            graph = capture(launches, stream, pool, relaxed=True)
        compile_all(missing, stream.device)
    except RuntimeError as error:
        logger.warning("kernels are compiled one by one, looking ahead failed: %s", error)
        return 0, None
    return len(missing), None if missing else graph


@contextmanager
def missing_kernels() -> Iterator[Missing]:
    """Launches of this thread that would have to compile are listed and skipped; others go through."""
    missing: Missing = {}
    hooks: Any = knobs.runtime
    thread, before = threading.get_ident(), hooks.jit_cache_hook

    def note(*, fn: Any, compile: dict[str, Any], **rest: Any) -> bool | None:
        if threading.get_ident() != thread:
            return None if before is None else before(fn=fn, compile=compile, **rest)
        missing[fn.name, compile["specialization_data"]] = fn.jit_function
        return True

    hooks.jit_cache_hook = note
    try:
        yield missing
    finally:
        hooks.jit_cache_hook = before


def compile_all(missing: Missing, device: torch.device | None = None) -> None:
    """Into triton's caches, in memory and on disk. Most of a compilation holds no lock of Python's."""

    def build(item: tuple[tuple[str, str], Any]) -> None:
        if device is not None and device.index is not None:
            torch.cuda.set_device(device)
        (_, specialisation), kernel = item
        kernel.preload(specialisation)

    if missing:
        workers = min(len(missing), len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(workers, thread_name_prefix="compile") as pool:
            list(pool.map(build, missing.items()))
