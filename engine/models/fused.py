"""A dense decoder's forward pass in fused kernels.

Owns the order of launches on a GPU, for eager prefill and captured decode alike. Computes what
`engine.models.decoder` computes, from the same parameters. Ignores attention (`attend` is given)
and which tokens run.

Shapes: T tokens, D hidden, N query heads, H head size, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from engine.kernels.embedding_gather import embedding_gather
from engine.kernels.gemv import gemv
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.swiglu import silu_and_mul
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.memory.kv_pool import KVPool
from engine.models.decoder import Attention, DecoderLayer, DenseDecoderLM

Attend = Callable[[torch.Tensor, int], torch.Tensor]
"""(q_TNH, layer) -> out_TNH, with this step's keys and values already in the pool."""


class FusedForward:
    """Ids of -1 are padding: their rows are computed from zeros and written nowhere."""

    def __init__(self, model: DenseDecoderLM, kv_pool: KVPool) -> None:
        self._model = model
        self._pool = kv_pool
        self._eps = model.spec.rms_eps
        self._layers = cast(list[DecoderLayer], list(model.model.layers))
        attention = self._layers[0].self_attn
        self._shape = QKVShape(attention.num_heads, attention.num_kv_heads, attention.head_dim)
        self._norms = [_qk_norm(layer.self_attn, self._eps) for layer in self._layers]

    def hidden(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        write_slots_T: torch.Tensor,
        attend: Attend,
        capture: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Final hidden states, normed. `capture` as in `DenseDecoderLM.forward`."""
        decoder, layers, rotary = self._model.model, self._layers, self._model.rotary
        residual_TD = embedding_gather(ids_T, decoder.embed_tokens.weight)
        x_TD = rms_norm(residual_TD, layers[0].input_layernorm.weight, self._eps)
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            q_TNH = rope_kv_write(
                self._product(attention.qkv_proj, x_TD),
                self._shape,
                self._norms[index],
                rotary.cos_CE,
                rotary.sin_CE,
                positions_T,
                write_slots_T,
                self._pool.tokens(index),
            )
            out_TNH = attend(q_TNH, index)
            x_TD = self._product(attention.o_proj, out_TNH.reshape(x_TD.shape[0], -1))
            x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, layer.post_attention_layernorm.weight, self._eps)
            x_TD = self._product(layer.mlp.down_proj, self._gated(layer.mlp.gate_up_proj, x_TD))
            following = layers[index + 1].input_layernorm if index + 1 < len(layers) else decoder.norm
            x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, following.weight, self._eps)
            if capture is not None and index in capture:
                capture[index] = residual_TD.clone()
        return x_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV in the weights' dtype."""
        model = self._model
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        return gemv(hidden_RD, head.weight) if self._reads_weights(hidden_RD) else head.project(hidden_RD)

    def _product(self, layer: ColumnParallelLinear | RowParallelLinear, x_TD: torch.Tensor) -> torch.Tensor:
        return gemv(x_TD, layer.weight, layer.bias) if self._reads_weights(x_TD) else layer(x_TD)

    def _gated(self, layer: ColumnParallelLinear, x_TD: torch.Tensor) -> torch.Tensor:
        if layer.bias is None and self._reads_weights(x_TD):
            return gemv(x_TD, layer.weight, gated=True)
        return silu_and_mul(layer(x_TD))

    def _reads_weights(self, x_TD: torch.Tensor) -> bool:
        """One row is bound by reading the weights, which a plain kernel does faster than cuBLAS;
        from two rows on the two were measured even."""
        return x_TD.shape[0] == 1 and x_TD.dtype == torch.bfloat16 and self._model.parallel.size == 1


def _qk_norm(attention: Attention, eps: float) -> QKNorm | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return QKNorm(attention.q_norm.weight, attention.k_norm.weight, eps)
