"""Prefill steps made up to be timed.

Owns their tensors and the clock. Ignores which backends run them and what follows from it
(`engine.attention.choice`).

Shapes: T tokens, B rows, P page-table columns, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.models.spec import ModelSpec

Clock = Callable[[Callable[[], object], torch.device], float]
"""Seconds that a step takes on a device."""

BUDGET_S = 0.25


@dataclass(frozen=True, slots=True)
class Workload:
    """The rows of one prefill step."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def prefill_workloads(prefill_tokens: int, context_len: int) -> list[Workload]:
    """A step of whole prompts, and a chunk of one behind a longer cached part of it."""
    tokens = min(prefill_tokens, context_len)
    row = min(tokens, 1024)
    whole = (row,) * (tokens // row)
    workloads = [Workload(f"{len(whole)} x {row} tokens", whole, whole)]
    cached = min(3 * max(tokens, 1024), context_len - tokens)
    if cached > 0:
        workloads.append(Workload(f"{tokens} tokens behind {cached}", (tokens,), (cached + tokens,)))
    return workloads


def wall_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a step, launches included, after two that compile and warm up."""

    def once() -> float:
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(2):
        once()
    times = [once()]
    while len(times) < 3 or (sum(times) < BUDGET_S and len(times) < 15):
        times.append(once())
    return statistics.median(times)


class Scene:
    """A workload's tensors. Pages are dealt out in random order, as a used pool would."""

    def __init__(
        self, workload: Workload, spec: ModelSpec, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        noise = torch.Generator().manual_seed(0)
        used = [-(-length // page_size) for length in workload.seq_lens]
        self.name = workload.name
        self.pool = KVPool(spec, sum(used) + 1, page_size, dtype, device)
        for layer in range(spec.num_layers):
            self.pool.tokens(layer).normal_()
        pages = (torch.randperm(sum(used), generator=noise) + 1).split(used)
        tables_BP = torch.zeros(len(used), max(used), dtype=torch.int32)
        slots = []
        for row, (count, length) in enumerate(zip(workload.query_lens, workload.seq_lens, strict=True)):
            tables_BP[row, : used[row]] = pages[row]
            position = torch.arange(length - count, length)
            slots.append(pages[row][position // page_size] * page_size + position % page_size)
        slots_T = torch.cat(slots).to(device)
        heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv = torch.randn(len(slots_T), heads, spec.head_dim, generator=noise).to(device=device, dtype=dtype)
        self.q, self.k, self.v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        self.sinks = [torch.zeros(spec.num_heads, device=device) if layer.sink else None for layer in spec.layers]
        self.batch = ForwardBatch(
            input_ids_T=torch.zeros_like(slots_T),
            positions_T=torch.zeros_like(slots_T),
            write_slots_T=slots_T,
            query_lens=list(workload.query_lens),
            seq_lens=list(workload.seq_lens),
            page_tables_BP=tables_BP.to(device),
            row_keys=list(range(len(used))),
            num_decode=0,
            logit_rows_R=slots_T[:0],
        )

    def run(self, backend: AttentionBackend, times: Sequence[int]) -> list[torch.Tensor]:
        """One step; the last output of every kind of layer."""
        outputs = []
        backend.plan(self.batch, self.pool)
        for layer, count in enumerate(times):
            for _ in range(count):
                out_TNH = backend.run(self.q, self.k, self.v, layer, self.sinks[layer])
            outputs.append(out_TNH)
        return outputs
