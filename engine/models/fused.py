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
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.skinny_matmul import InputNorm, skinny_matmul
from engine.kernels.swiglu import silu_and_mul
from engine.layers.norm import RMSNorm
from engine.memory.kv_pool import KVPool
from engine.models.decoder import Attention, DecoderLayer, DenseDecoderLM

Attend = Callable[[torch.Tensor, int], torch.Tensor]
"""(q_TNH, layer) -> out_TNH, with this step's keys and values already in the pool."""
Mix = Callable[[torch.Tensor], torch.Tensor]
"""qkv_TE -> out_TE of one layer."""

FEW_ROWS = 64


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
        decoder, layers = self._model.model, self._layers
        residual_TD = embedding_gather(ids_T, decoder.embed_tokens.weight)
        few = self._are_few(residual_TD)
        x_TD = residual_TD if few else rms_norm(residual_TD, layers[0].input_layernorm.weight, self._eps)
        for index, layer in enumerate(layers):

            def attention(qkv_TE: torch.Tensor, index: int = index) -> torch.Tensor:
                q_TNH = self._rotated(qkv_TE, index, positions_T, write_slots_T)
                return attend(q_TNH, index).reshape(qkv_TE.shape[0], -1)

            if few:
                self._few_rows(layer, residual_TD, attention)
            else:
                following = layers[index + 1].input_layernorm if index + 1 < len(layers) else decoder.norm
                x_TD = self._many_rows(layer, x_TD, residual_TD, attention, following)
            if capture is not None and index in capture:
                capture[index] = residual_TD.clone()
        return rms_norm(residual_TD, decoder.norm.weight, self._eps) if few else x_TD

    def _few_rows(self, layer: DecoderLayer, residual_TD: torch.Tensor, attention: Mix) -> None:
        """A layer whose every launch reads a weight once; norms, gate and sums ride along."""
        before, between = self._norm(layer.input_layernorm), self._norm(layer.post_attention_layernorm)
        projection, mlp = layer.self_attn.qkv_proj, layer.mlp
        out_TE = attention(skinny_matmul(residual_TD, projection.weight, projection.bias, before))
        output = layer.self_attn.o_proj
        skinny_matmul(out_TE, output.weight, output.bias, residual_MN=residual_TD, out=residual_TD)
        inner_TI = skinny_matmul(residual_TD, mlp.gate_up_proj.weight, norm=between, gated=True)
        skinny_matmul(inner_TI, mlp.down_proj.weight, mlp.down_proj.bias, residual_MN=residual_TD, out=residual_TD)

    def _many_rows(
        self,
        layer: DecoderLayer,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        attention: Mix,
        following: RMSNorm,
    ) -> torch.Tensor:
        """A layer from normed inputs; returns them for the layer that comes next."""
        x_TD = layer.self_attn.o_proj(attention(layer.self_attn.qkv_proj(x_TD)))
        x_TD, residual_TD = add_rms_norm(x_TD, residual_TD, layer.post_attention_layernorm.weight, self._eps)
        x_TD = layer.mlp.down_proj(silu_and_mul(layer.mlp.gate_up_proj(x_TD)))
        return add_rms_norm(x_TD, residual_TD, following.weight, self._eps)[0]

    def _rotated(
        self, qkv_TE: torch.Tensor, index: int, positions_T: torch.Tensor, write_slots_T: torch.Tensor
    ) -> torch.Tensor:
        """Query heads; the layer's keys and values are in the pool afterwards."""
        rotary = self._model.rotary
        return rope_kv_write(
            qkv_TE,
            self._shape,
            self._norms[index],
            rotary.cos_CE,
            rotary.sin_CE,
            positions_T,
            write_slots_T,
            self._pool.tokens(index),
        )

    def _norm(self, norm: RMSNorm) -> InputNorm:
        return InputNorm(norm.weight, self._eps)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV in the weights' dtype."""
        model = self._model
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        return skinny_matmul(hidden_RD, head.weight) if self._are_few(hidden_RD) else head.project(hidden_RD)

    def _are_few(self, x_TD: torch.Tensor) -> bool:
        """Whether products are bound by reading weights and launching, which plain kernels that fuse
        what stands between products do faster than cuBLAS."""
        return (
            x_TD.shape[0] <= FEW_ROWS
            and x_TD.dtype == torch.bfloat16
            and self._model.parallel.size == 1
            and all(layer.mlp.gate_up_proj.bias is None for layer in self._layers)
        )


def _qk_norm(attention: Attention, eps: float) -> QKNorm | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return QKNorm(attention.q_norm.weight, attention.k_norm.weight, eps)
