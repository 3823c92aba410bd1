"""Graphs that share a stream, and so their memory.

Owns capture with all that goes before it, what to do where it fails, and the memory that graphs hold.
Ignores what the launches compute and when they are replayed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from engine.metrics import EngineCounters
from engine.runner.capture import anchored_pool, capture
from engine.runner.compile_ahead import compile_ahead

logger = logging.getLogger(__name__)
_WARM = 2
"""Captures behind a run, before looking ahead alone will do: by then libraries have met the stream."""
_SECONDS = 0.5
"""Of a capture, before there was any."""


class GraphPool:
    """On a device without graphs (`exists` is false) nothing is captured."""

    def __init__(self, device: torch.device, counters: EngineCounters) -> None:
        self._device = device
        self._counters = counters
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_bytes = 0
        """Device memory taken by captures, graphs' own and their pool's."""
        self.seconds = _SECONDS
        """What a capture takes at best, as far as is known, with nothing to compile."""
        self._captures = 0
        self.forget()

    @property
    def exists(self) -> bool:
        return self._stream is not None

    def forget(self) -> None:
        """Let the pool go: its owner has dropped all graphs."""
        self.num_bytes = 0
        if self._stream is not None:
            self._memory, self._anchor = anchored_pool(self._stream)

    @torch.inference_mode()
    def record(self, launches: Callable[[], object], what: str) -> Callable[[], None] | None:
        """The replay of `launches`; None where there are no graphs or the capture fails, and they then run
        one by one. Their inputs are padding meanwhile, so that nothing is touched: the run before the
        first captures loads kernels and warms libraries up."""
        if self._stream is None:
            return None
        began, stream = time.perf_counter(), self._stream
        free = torch.cuda.mem_get_info(self._device)[0]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        _, graph = compile_ahead(launches, stream, self._memory)
        if graph is not None:
            self.seconds = min(self.seconds, time.perf_counter() - began)
        if graph is None or self._captures < _WARM:
            graph = self._after_a_run(launches, what)
        if graph is None:
            return None
        self._captures += 1
        self.num_bytes += max(1, free - torch.cuda.mem_get_info(self._device)[0])
        self._counters.graph_capture_seconds += time.perf_counter() - began
        return graph.replay

    def _after_a_run(self, launches: Callable[[], object], what: str) -> torch.cuda.CUDAGraph | None:
        stream = self._stream
        assert stream is not None
        with torch.cuda.stream(stream):
            launches()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        try:
            try:
                graph = capture(launches, stream, self._memory)
                self.seconds = min(self.seconds, time.perf_counter() - began)
                return graph
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # which torch cannot do by itself during a capture
                return capture(launches, stream, self._memory)
        except RuntimeError as error:  # memory is short, or a library refuses to be captured
            logger.warning("%s could not be captured and run uncaptured: %s", what, error)
            return None
