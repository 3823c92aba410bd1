"""What an attention backend is.

Owns the protocol and the refusal of layers a backend cannot compute. Ignores which backend runs
(`engine.attention.registry`).

Shapes: T tokens, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.batch import ForwardBatch
from engine.errors import Unsupported
from engine.memory.kv_pool import KVPool
from engine.models.spec import ModelSpec


class AttentionBackend(Protocol):
    """`plan` once per step, then `run` once per layer, layers in order.

    `run` writes the step's keys and values to `batch.write_slots_T` and returns out_TNH; it scales
    scores by H ** -0.5. `sink_N` (one learned logit per head) and `bias_TNE` (bias by distance,
    E = the layer's extent) are given where the layer's spec asks for them.
    """

    name: str

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None: ...

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class PrefillPart(Protocol):
    """Computes the rows behind the decode rows of a step for a backend that leaves them to it.

    `plan` returns False where it would rather not, and the backend does them after all. `attend`
    writes out_TNH for those rows' queries; their keys and values are in the pool already.
    """

    name: str

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> bool: ...

    def attend(self, q_TNH: torch.Tensor, kv_pool: KVPool, layer: int, out_TNH: torch.Tensor) -> None: ...


def refuse_special_layers(spec: ModelSpec, backend: str) -> None:
    """For backends that compute plain causal attention only."""
    for index, layer in enumerate(spec.layers):
        for field, value in (
            ("window", layer.window),
            ("sink", layer.sink or None),
            ("softcap", layer.softcap),
            ("bias", layer.bias),
        ):
            if value is not None:
                raise Unsupported(
                    field=f"layers[{index}].{field}", expected=f"none with the {backend} attention", actual=value
                )
