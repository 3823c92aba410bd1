"""Launches as one graph.

Owns how a sequence of launches is captured. Ignores what it computes and when it is replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def anchored_pool(stream: torch.cuda.Stream) -> tuple[Any, torch.cuda.CUDAGraph]:
    """A pool for graphs captured on `stream`, and a graph that must be kept as long as it: a pool dies
    with the last of its graphs, and capturing into it again is an error."""
    nothing = torch.zeros(1, device=stream.device)
    pool = torch.cuda.graph_pool_handle()
    return pool, capture(nothing.zero_, stream, pool)


def capture(
    launches: Callable[[], object], stream: torch.cuda.Stream, pool: Any = None, relaxed: bool = False
) -> torch.cuda.CUDAGraph:
    """A graph of `launches`, captured on `stream`. Graphs that share a pool share its memory only if
    they share the stream. Raises RuntimeError where something cannot be captured; `relaxed` lets
    libraries and modules be set up meanwhile.

    Unlike `torch.cuda.graph` it leaves torch's unused blocks where they are, pinned ones too, and the
    collector waits, so that nothing is destroyed in the middle of a capture.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(stream.device)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="relaxed" if relaxed else "thread_local")
            try:
                launches()
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph
