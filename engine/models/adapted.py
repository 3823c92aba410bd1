"""A decoder's layers for rows with adapters, in few launches.

Owns the order of launches where the adapters' products ride along with what lies between the model's own: one
launch more a layer than without adapters, or none where first products stand behind the model's (`lora.stack`).
Ignores the model's products and attention, which are given, and steps whose adapters do not fit those kernels
(`engine.models.fused` adds to each product there).

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from engine.kernels.adapted_gate import adapted_gate
from engine.kernels.adapted_rope import Rotation, adapted_rope
from engine.kernels.adapted_sum import Adapted, Stream, adapted_sum
from engine.kernels.adapted_tile import choice
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape
from engine.memory.kv_pool import KVPool
from engine.models.decoder import DecoderLayer, DenseDecoderLM
from lora.kernel_step import KernelStep

SPLIT_INPUTS = 256
"""That a piece of the one first product that is a launch of its own sums at least."""


class Product(Protocol):
    def __call__(
        self, x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = ..., /
    ) -> torch.Tensor: ...


class AdaptedLayers:
    def __init__(
        self,
        model: DenseDecoderLM,
        layers: list[DecoderLayer],
        kv_pool: KVPool,
        shape: QKVShape,
        norms: list[QKNorm | None],
        product: Product,
    ) -> None:
        self._model = model
        self._layers = layers
        self._pool = kv_pool
        self._shape = shape
        self._norms = norms
        self._product = product
        self._eps = model.spec.rms_eps
        self._stream: torch.cuda.Stream | None = None

    def hidden(
        self,
        step: KernelStep,
        residual_TD: torch.Tensor,
        positions_T: torch.Tensor,
        slots: list[torch.Tensor],
        attend: Callable[[torch.Tensor, int], torch.Tensor],
        capture: dict[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Final hidden states, normed, from embeddings, which are overwritten. `slots` are each layer's write
        slots."""
        rotary = self._model.rotary
        first = self._layers[0]
        site = self._following(step, first.self_attn.qkv_proj.site)
        stream = adapted_sum(step, None, None, residual_TD, first.input_layernorm.weight, site)
        for index, layer in enumerate(self._layers):
            rotation = Rotation(rotary.cos_CE, rotary.sin_CE, positions_T, slots[index], self._pool.tokens(index))
            q_TNH = self._queries(step, layer, stream, self._norms[index], rotation)
            out_TE = attend(q_TNH, index).reshape(len(residual_TD), -1)
            stream = self._after_attention(step, layer, out_TE, residual_TD)
            y_TD, down = self._block(step, layer, stream)
            following = self._layers[index + 1] if index + 1 < len(self._layers) else None
            norm = self._model.model.norm if following is None else following.input_layernorm
            site = None if following is None else self._following(step, following.self_attn.qkv_proj.site)
            stream = adapted_sum(step, y_TD, down, residual_TD, norm.weight, site)
            if capture is not None and index in capture:
                capture[index] = residual_TD.clone()
        return rms_norm(residual_TD, self._model.model.norm.weight, self._eps)

    def _queries(
        self, step: KernelStep, layer: DecoderLayer, stream: Stream, norm: QKNorm | None, rotation: Rotation
    ) -> torch.Tensor:
        qkv = layer.self_attn.qkv_proj
        qkv_TE = self._product(stream.x_TD, step.weight(qkv.site, qkv.weight))
        adapted = stream.adapted or Adapted(qkv.site)
        scale = stream.squares_TP, stream.x_TD.shape[1], self._eps
        return adapted_rope(step, adapted, qkv_TE, qkv.bias, *scale, self._shape, norm, rotation)

    def _after_attention(
        self, step: KernelStep, layer: DecoderLayer, out_TE: torch.Tensor, residual_TD: torch.Tensor
    ) -> Stream:
        output, site = layer.self_attn.o_proj, self._following(step, layer.mlp.gate_up_proj.site)
        weight_D = layer.post_attention_layernorm.weight
        if step.stack is not None:
            y_TE = self._product(out_TE, step.weight(output.site, output.weight))
            return adapted_sum(step, y_TE, Adapted(output.site), residual_TD, weight_D, site)
        best = choice(step)
        splits = max(1, min(best.splits, out_TE.shape[1] // SPLIT_INPUTS))
        with self._beside(best.beside and out_TE.is_cuda) as join:
            adapted = Adapted(output.site, step.shrunk(output.site, out_TE, splits, best.shrink_warps))
        y_TD = self._product(out_TE, output.weight, output.bias)
        join()
        return adapted_sum(step, y_TD, adapted, residual_TD, weight_D, site)

    @contextmanager
    def _beside(self, apart: bool) -> Iterator[Callable[[], None]]:
        """Launches on a stream of their own if `apart`; whoever reads what they write calls what is given first."""
        if not apart:
            yield lambda: None
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._pool.device)
        side, main = self._stream, torch.cuda.current_stream(self._pool.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            yield lambda: main.wait_stream(side)

    def _block(self, step: KernelStep, layer: DecoderLayer, stream: Stream) -> tuple[torch.Tensor, Adapted]:
        gates, down = layer.mlp.gate_up_proj, layer.mlp.down_proj
        gate_up_TE = self._product(stream.x_TD, step.weight(gates.site, gates.weight))
        scale, site = (stream.squares_TP, stream.x_TD.shape[1], self._eps), self._following(step, down.site)
        adapted = stream.adapted or Adapted(gates.site)
        inner_TI, adapted = adapted_gate(step, adapted, gate_up_TE, *scale, next_site=site)
        y_TE = self._product(inner_TI, step.weight(down.site, down.weight), down.bias)
        return y_TE, adapted or Adapted(down.site)

    @staticmethod
    def _following(step: KernelStep, site: int) -> int | None:
        """The site whose first product a kernel computes along the way: none where products bring it themselves."""
        return site if step.stack is None else None
