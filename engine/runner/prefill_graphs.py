"""Chunks of prompts as replays of captured graphs, where launching costs more than computing.

Owns the tiers of token counts, capture on the second use of a tier, and the copy of a batch into a
graph's buffers. Ignores batches with decode rows, which run launch by launch. States of inner layers
are there for the layers that were named when the graphs were made.

A forward pass is some ten launches a layer, each of them some work of the host: for a small model, or a
few hundred tokens of a larger one, the device waits for them. Tokens beyond a batch's are padding:
ids of -1, computed from zeros and written nowhere, and no tile of attention covers them.

Shapes: T tokens of a tier, N query heads, H head size, D hidden.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.attention.prefill_plan import PrefillPlan
from engine.attention.triton import TritonAttention
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.metrics import EngineCounters
from engine.models.fused import FusedForward
from engine.models.spec import ModelSpec
from engine.runner.graph_pool import GraphPool
from lora.kernel_step import KernelStep, Variant

LAYER_LAUNCH_SECONDS = 2e-4
FLOPS = 5e14
"""Estimates of what launching a layer takes a host, and of what products reach on a large GPU: together
they say up to how many tokens a graph pays. Neither is critical: around that number both ways take the same time."""

MAX_ROWS = 128
USES_BEFORE_CAPTURE = 1


def worthwhile_tokens(spec: ModelSpec, most: int) -> int:
    """Tokens up to which launching takes longer than computing, at most `most`."""
    attention = spec.hidden * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    weights = spec.num_layers * (attention + 3 * spec.hidden * spec.intermediate)
    return min(most, int(spec.num_layers * LAYER_LAUNCH_SECONDS * FLOPS / (2 * weights)))


def token_tiers(most: int) -> list[int]:
    """Powers of two and what lies halfway, from 32 to `most`."""
    tiers, size = [], 32
    while size <= most:
        tiers += [size, size + size // 2]
        size *= 2
    return [tier for tier in tiers if tier < most] + ([most] if most >= 32 else [])


@dataclass(slots=True)
class CapturedChunk:
    """A graph knows addresses only: every buffer it touches lives as long as it does."""

    replay: Callable[[], None]
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    write_slots_T: torch.Tensor
    window_slots_T: torch.Tensor | None
    plan: PrefillPlan
    hidden_TD: torch.Tensor
    adapters: KernelStep | None
    scratch: torch.Tensor
    features: dict[int, torch.Tensor]


class PrefillGraphs:
    def __init__(
        self,
        spec: ModelSpec,
        forward: FusedForward,
        backend: TritonAttention,
        kv_pool: KVPool,
        max_tokens: int,
        max_pages: int,
        counters: EngineCounters,
        layers: tuple[int, ...] = (),
    ) -> None:
        self._layers = layers
        self._spec = spec
        self._forward = forward
        self._backend = backend
        self._pool = kv_pool
        self._max_pages = max_pages
        self._counters = counters
        self._tiers = token_tiers(worthwhile_tokens(spec, max_tokens))
        self._captured: dict[tuple[int, Variant | None], CapturedChunk | None] = {}
        self._uses: Counter[tuple[int, Variant | None]] = Counter()
        self._graphs = GraphPool(kv_pool.device, counters)

    @property
    def graph_bytes(self) -> int:
        return self._graphs.num_bytes

    def forget(self) -> None:
        """Drop all graphs and give their memory up. They are captured anew when needed."""
        self._captured.clear()
        self._graphs.forget()

    def hidden(self, batch: ForwardBatch, capture: dict[int, torch.Tensor] | None = None) -> torch.Tensor | None:
        """Final hidden states of the batch's tokens, and in `capture` those after the layers it names, good
        until the next call; None where the batch should run launch by launch."""
        tokens = batch.num_tokens
        if any(layer not in self._layers for layer in capture or ()):
            return None
        if batch.num_decode or batch.num_rows > MAX_ROWS or not self._tiers or tokens > self._tiers[-1]:
            return None
        if self._pool.window_pages is not None and batch.window is None:
            return None
        if not self._backend.prefills_in_one_piece(batch, self._pool):
            return None
        adapters = batch.adapters if isinstance(batch.adapters, KernelStep) else None
        captured = self._of(self._tiers[bisect.bisect_left(self._tiers, tokens)], adapters)
        if captured is None:
            return None
        inputs = [
            (captured.ids_T, batch.input_ids_T, -1),
            (captured.positions_T, batch.positions_T, 0),
            (captured.write_slots_T, batch.write_slots_T, -1),
        ]
        if captured.window_slots_T is not None and batch.window is not None:
            inputs.append((captured.window_slots_T, batch.window.write_slots_T, -1))
        for buffer, values, padding in inputs:
            buffer[:tokens].copy_(values)
            buffer[tokens:].fill_(padding)
        self._backend.fill_prefill(captured.plan, batch)
        captured.replay()
        if capture is not None:
            capture.update((layer, captured.features[layer][:tokens]) for layer in capture)
        return captured.hidden_TD[:tokens]

    def _of(self, tier: int, adapters: KernelStep | None) -> CapturedChunk | None:
        """The tier's chunk, with the step's adapters in it."""
        padded = None if adapters is None else adapters.padded(tier)
        key = tier, None if padded is None else padded.variant
        if key not in self._captured:
            self._uses[key] += 1
            if self._uses[key] <= USES_BEFORE_CAPTURE:
                return None
            self._captured[key] = self._capture(tier, padded)
        captured = self._captured[key]
        if captured is not None and captured.adapters is not None and padded is not None:
            captured.adapters.fill(padded.slots_T)
        return captured

    @torch.inference_mode()
    def _capture(self, tier: int, adapters: KernelStep | None) -> CapturedChunk | None:
        """None where it cannot be captured."""
        device, spec = self._pool.device, self._spec
        if adapters is not None:
            assert adapters.tiles.num_tiles == adapters.variant.tiles, "tables are filled before the capture"

        def padding(value: int) -> torch.Tensor:
            return torch.full((tier,), value, dtype=torch.int64, device=device)

        ids_T, positions_T, write_slots_T = padding(-1), padding(0), padding(-1)
        window_slots_T = None if self._pool.window_pages is None else padding(-1)
        plan = self._backend.plan_prefill_buffers(tier, MAX_ROWS, self._max_pages, self._pool)
        out_TNH = torch.zeros(tier, self._backend.num_heads, spec.head_dim, dtype=self._pool.dtype, device=device)
        hidden_TD = torch.empty(tier, spec.hidden, dtype=self._pool.dtype, device=device)

        def attend(q_TNH: torch.Tensor, layer: int) -> torch.Tensor:
            self._backend.run_prefill(q_TNH, self._pool.tokens(layer), plan, out_TNH, layer)
            return out_TNH

        features = {layer: torch.empty_like(hidden_TD) for layer in self._layers}

        def chunk() -> None:
            states = dict(features)
            inputs = ids_T, positions_T, write_slots_T
            hidden_TD.copy_(self._forward.hidden(*inputs, attend, states or None, adapters, window_slots_T))
            for layer, buffer_TD in features.items():
                buffer_TD.copy_(states[layer])

        replay = self._graphs.record(chunk, f"chunks of {tier} tokens")
        if replay is None and self._graphs.exists:
            return None
        if replay is not None:
            self._counters.graph_captures += 1
        buffers = (ids_T, positions_T, write_slots_T, window_slots_T, plan, hidden_TD, adapters, out_TNH, features)
        return CapturedChunk(replay or chunk, *buffers)
