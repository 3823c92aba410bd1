"""A decode step of any decoder, layer by layer, in launches that may be captured.

Owns how a model's own layers run over a step's fixed buffers where the fused path does not know them: keys and
values are written and read as a captured step says, recurrent states lie in the slots that it names. Ignores which
rows run. Idle rows have token and slots of -1: they compute with scratch.

Shapes: B rows of one token, D hidden, N query heads, K key/value heads, H head size, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.layers.experts import RoutedExperts
from engine.layers.mixer import StateStep
from engine.memory.kv_pool import KVPool, pack
from engine.memory.state_pool import StatePool
from engine.models.decoder import DecoderLayer, DenseDecoderLM
from lora.kernel_step import KernelStep


class Attend(Protocol):
    """out_BNH, with this step's keys and values already in the pool."""

    def __call__(self, q_BNH: torch.Tensor, layer: int, sink_N: torch.Tensor | None = None) -> torch.Tensor: ...


class StepAttention:
    """Attention of one captured step, as layers call it."""

    name = "step"

    def __init__(
        self, pool: KVPool, write_slots_B: torch.Tensor, window_slots_B: torch.Tensor | None, attend: Attend
    ) -> None:
        self._pool, self._attend = pool, attend
        self._write_slots_B = write_slots_B
        self._window_slots_B = write_slots_B if window_slots_B is None else window_slots_B

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        """Who captures the step has planned it."""

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slots_B = self._window_slots_B if self._pool.windowed(layer) else self._write_slots_B
        self._pool.write(layer, slots_B, pack(k_TKH, v_TKH))
        return self._attend(q_TNH.contiguous(), layer, sink_N)


class LayerwiseForward:
    """`hidden` and `logits` as `engine.models.fused.FusedForward`'s, for rows of one token without adapters.
    `live_B` are the slots of the rows' recurrent states, set before each step that is computed or captured."""

    def __init__(
        self, model: DenseDecoderLM, pool: KVPool, states: StatePool | None, latents: AttentionBackend | None = None
    ) -> None:
        """`latents` is the attention of models that have some, which the step's buffers plan for."""
        self._model, self._pool, self._states, self._latents = model, pool, states, latents
        self.live_B: torch.Tensor | None = None

    @staticmethod
    def serves(model: DenseDecoderLM, pool: KVPool) -> bool:
        """Whether a step of the model reads nothing on the host: some blocks of experts do."""
        blocks = [layer.mlp for layer in model.model.layers if isinstance(layer, DecoderLayer)]
        return not any(isinstance(block, RoutedExperts) and not block.grouped for block in blocks)

    def hidden(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        write_slots_T: torch.Tensor,
        attend: Attend,
        capture: dict[int, torch.Tensor] | None = None,
        adapters: KernelStep | None = None,
        window_slots_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert adapters is None, "steps of adapters go another way"
        step = None
        if self._states is not None:
            assert self.live_B is not None, "rows of a recurrent model have states"
            step = StateStep(self._states, self.live_B)
        window_slots_T = None if window_slots_T is None else window_slots_T.clamp(min=0)
        backend: AttentionBackend | None = self._latents
        if backend is None:
            backend = StepAttention(self._pool, write_slots_T.clamp(min=0), window_slots_T, attend)
        return self._model.hidden(ids_T.clamp(min=0), positions_T, backend, capture, step)

    def logits(
        self, hidden_RD: torch.Tensor, part: slice = slice(None), adapters: KernelStep | None = None
    ) -> torch.Tensor:
        assert adapters is None, "steps of adapters go another way"
        return self._model.logits(hidden_RD, part)
