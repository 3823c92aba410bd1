"""A dense decoder's forward pass in fused kernels.

Owns the order of launches on a GPU, for eager prefill and captured decode alike. Computes what
`engine.models.decoder` computes, from the same parameters. Ignores attention (`attend` is given)
and which tokens run.

Shapes: T tokens, D hidden, N query heads, H head size, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import cast

import torch

from engine.errors import Unsupported
from engine.kernels.adapted_gate import adapted_gate
from engine.kernels.adapted_sum import Adapted
from engine.kernels.early import is_early
from engine.kernels.embedding_gather import embedding_gather
from engine.kernels.embedding_norm import embedding_norm
from engine.kernels.gemv import InputNorm, gemv
from engine.kernels.invariant_matmul import Partials, invariant_gated_matmul, invariant_matmul
from engine.kernels.invariant_tiles import segments_of
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.skinny_matmul import UnscaledRows, skinny_matmul, skinny_matmul_then_norm
from engine.kernels.swiglu import silu_and_mul
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.matmul import linear
from engine.layers.norm import RMSNorm
from engine.memory.kv_pool import KVPool
from engine.models.adapted import AdaptedLayers
from engine.models.decoder import Attention, DecoderLayer, DenseDecoderLM
from lora.kernel_step import MANY_ROWS, MAX_RANK, KernelStep

Attend = Callable[[torch.Tensor, int], torch.Tensor]
"""(q_TNH, layer) -> out_TNH, with this step's keys and values already in the pool."""
Mix = Callable[[torch.Tensor], torch.Tensor]
"""qkv_TE -> out_TE of one layer."""

FEW_ROWS, FEW_NARROW_ROWS = 64, 256
FEW_WIDE_ROWS = 32
"""Rows up to which own products are faster than cuBLAS where the hidden width is no longer small."""
SMALL, NARROW = 2048, 1024
"""Hidden width below which launches cost more than reading the weights: measured at 1,024 and 4,096. Narrow are those
where that goes for more rows: at 576, but not at 1,024."""


class Rows(Enum):
    """How a step is computed: one row by matrix-vector products, few rows of a small model by products
    that fuse what stands between them, anything else by products and kernels in between. Where each
    begins was measured (docs/performance.md)."""

    ONE = "one"
    FEW = "few"
    MANY = "many"


class FusedForward:
    """Ids of -1 are padding: their rows are computed from zeros and written nowhere. `deterministic`
    takes products whose rows do not depend on each other's number."""

    def __init__(self, model: DenseDecoderLM, kv_pool: KVPool, deterministic: bool = False) -> None:
        if deterministic and model.parallel.size > 1:
            raise Unsupported(field="deterministic", expected="one rank", actual=f"{model.parallel.size} ranks")
        if not model.spec.uniform:
            raise Unsupported(
                field="architecture", expected="a decoder of plain norms and one rope", actual=model.spec.architecture
            )
        self._deterministic = deterministic
        self._partials = Partials.empty(kv_pool.device)
        self._model = model
        self._pool = kv_pool
        self._eps = model.spec.rms_eps
        self._layers = cast(list[DecoderLayer], list(model.model.layers))
        attention = self._layers[0].self_attn
        self._gate_bias = any(layer.mlp.gate_up_proj.bias is not None for layer in self._layers)
        self._shape = QKVShape(attention.num_heads, attention.num_kv_heads, attention.head_dim)
        self._norms = [_qk_norm(layer.self_attn, self._eps) for layer in self._layers]
        self._adapted = AdaptedLayers(model, self._layers, kv_pool, self._shape, self._norms, self.product)

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
        """Final hidden states, normed. `capture` as in `DenseDecoderLM.forward`; `adapters` are the tokens'.
        `window_slots_T` are the write slots of windowed layers, where their pages are others."""
        slots = [write_slots_T] * len(self._layers)
        if window_slots_T is not None:
            slots = [window_slots_T if self._pool.windowed(i) else write_slots_T for i in range(len(slots))]
        decoder, layers = self._model.model, self._layers
        captured = {} if capture is None else capture
        norms = [self._norm(layer.input_layernorm) for layer in layers] + [self._norm(decoder.norm)]
        if adapters is None:
            residual_TD, x = self.embed(ids_T, norms[0])
            kind = self.kind(residual_TD)
        else:
            residual_TD = embedding_gather(ids_T, decoder.embed_tokens.weight)
            adapters.add_embedding_(0, ids_T, residual_TD)
            if self._rides_along(adapters, residual_TD):
                return self._adapted.hidden(adapters, residual_TD, positions_T, slots, attend, capture)
            kind, x = Rows.MANY, rms_norm(residual_TD, norms[0].weight_K, self._eps)
        for index, layer in enumerate(layers):

            def mix(qkv_TE: torch.Tensor, index: int = index) -> torch.Tensor:
                q_TNH = self._rotated(qkv_TE, index, positions_T, slots[index])
                return attend(q_TNH, index).reshape(qkv_TE.shape[0], -1)

            # What is captured stays as it is: the stream goes on elsewhere.
            onto_TD = torch.empty_like(residual_TD) if index - 1 in captured else residual_TD
            if kind is Rows.ONE:
                self._one_row(layer, residual_TD, onto_TD, mix)
            elif kind is Rows.FEW:
                x = self._few_rows(layer, x, residual_TD, onto_TD, mix, norms[index + 1])
            else:
                assert isinstance(x, torch.Tensor)
                x = self._many_rows(layer, x, residual_TD, onto_TD, mix, norms[index + 1], adapters)
            residual_TD = onto_TD
            if index in captured:
                captured[index] = residual_TD
        if kind is Rows.MANY:
            assert isinstance(x, torch.Tensor)
            return x
        return rms_norm(residual_TD, decoder.norm.weight, self._eps)

    def embed(self, ids_T: torch.Tensor, norm: InputNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the embedding [T, D], zeros for padding, and normed ones."""
        return embedding_norm(ids_T, self._model.model.embed_tokens.weight, norm.weight_K, norm.eps)

    def _one_row(self, layer: DecoderLayer, residual_1D: torch.Tensor, onto_1D: torch.Tensor, mix: Mix) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        x_1D, norm = self._row_and_norm(residual_1D, layer.input_layernorm)
        out_1E = mix(gemv(x_1D, attention.qkv_proj.weight, attention.qkv_proj.bias, norm))
        output = attention.o_proj
        gemv(out_1E, output.weight, output.bias, residual_1N=residual_1D, out=onto_1D)
        x_1D, norm = self._row_and_norm(onto_1D, layer.post_attention_layernorm)
        inner_1I = gemv(x_1D, mlp.gate_up_proj.weight, norm=norm, gated=True)
        gemv(inner_1I, mlp.down_proj.weight, mlp.down_proj.bias, residual_1N=onto_1D, out=onto_1D)

    def _row_and_norm(self, residual_1D: torch.Tensor, norm: RMSNorm) -> tuple[torch.Tensor, InputNorm | None]:
        """What a product takes for `norm` of a row. Every program of the product would norm the row:
        from some width on, a launch that does it once costs less."""
        if residual_1D.shape[1] < SMALL:
            return residual_1D, self._norm(norm)
        return rms_norm(residual_1D, norm.weight, self._eps), None

    def _few_rows(
        self,
        layer: DecoderLayer,
        x: torch.Tensor | UnscaledRows,
        residual_TD: torch.Tensor,
        onto_TD: torch.Tensor,
        mix: Mix,
        following: InputNorm,
    ) -> UnscaledRows:
        """A layer whose norms, gate and sums ride along with its four products. The stream is in `onto_TD`
        afterwards, which may be where it was."""
        attention, mlp = layer.self_attn, layer.mlp
        out_TE = mix(skinny_matmul(x, attention.qkv_proj.weight, attention.qkv_proj.bias))
        output, between = attention.o_proj, self._norm(layer.post_attention_layernorm)
        x = skinny_matmul_then_norm(out_TE, output.weight, output.bias, residual_TD, between, out=onto_TD)
        inner_TI = skinny_matmul(x, mlp.gate_up_proj.weight, gated=True)
        return skinny_matmul_then_norm(inner_TI, mlp.down_proj.weight, mlp.down_proj.bias, onto_TD, following)

    def _many_rows(
        self,
        layer: DecoderLayer,
        x_TD: torch.Tensor,
        residual_TD: torch.Tensor,
        onto_TD: torch.Tensor,
        mix: Mix,
        following: InputNorm,
        adapters: KernelStep | None = None,
    ) -> torch.Tensor:
        """A layer from normed inputs; returns them for the layer that comes next. The stream as in `_few_rows`."""
        attention, mlp = layer.self_attn, layer.mlp
        out_TE = mix(self._product(attention.qkv_proj, x_TD, adapters))
        x_TD = self._product(attention.o_proj, out_TE, adapters)
        between_D = layer.post_attention_layernorm.weight
        x_TD, _ = add_rms_norm(x_TD, residual_TD, between_D, self._eps, total=onto_TD)
        x_TD = self._product(mlp.down_proj, self._gated(mlp.gate_up_proj, x_TD, adapters), adapters)
        return add_rms_norm(x_TD, onto_TD, following.weight_K, self._eps)[0]

    def _rides_along(self, adapters: KernelStep, x_TD: torch.Tensor) -> bool:
        """Whether what adapters add fits the launches between products. With `deterministic` each launch keeps
        its own order of sums, so that rows without an adapter have the bits they have without any."""
        own = self._model.parallel.size == 1 and x_TD.dtype != torch.float16 and not self._gate_bias
        fits = adapters.variant.rank <= MAX_RANK and x_TD.shape[0] <= MANY_ROWS
        return own and fits and not self._deterministic

    def _product(
        self, layer: ColumnParallelLinear | RowParallelLinear, x_TD: torch.Tensor, adapters: KernelStep | None = None
    ) -> torch.Tensor:
        if not self._in_fixed_order(x_TD):
            return layer(x_TD, adapters)
        y_TO = invariant_matmul(x_TD, layer.weight, layer.bias, partials=self._partials)
        if adapters is not None:
            adapters.add_(layer.site, x_TD, y_TO)
        return y_TO

    def product(
        self, x_TD: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """A product of any number of rows, on one rank."""
        if x_TD.shape[0] == 1 and self._alone(x_TD):
            return gemv(x_TD, weight_OD, bias_O)
        if self._in_fixed_order(x_TD):
            return invariant_matmul(x_TD, weight_OD, bias_O, partials=self._partials)
        return linear(x_TD, weight_OD, bias_O)

    def _gated(
        self, layer: ColumnParallelLinear, x_TD: torch.Tensor, adapters: KernelStep | None = None
    ) -> torch.Tensor:
        if adapters is not None:
            if self._deterministic or adapters.variant.rank > MAX_RANK:
                return silu_and_mul(self._product(layer, x_TD, adapters))
            h_PGTR = adapters.shrunk(layer.site, x_TD)
            return adapted_gate(adapters, Adapted(layer.site, h_PGTR), self._product(layer, x_TD))[0]
        if self._in_fixed_order(x_TD):
            return invariant_gated_matmul(x_TD, layer.weight, layer.bias, self._partials)
        return silu_and_mul(layer(x_TD))

    def gated_product(self, x_TD: torch.Tensor, weight_OD: torch.Tensor) -> torch.Tensor:
        """silu(gates) * ups of a weight with all gates before all ups, on one rank."""
        if self._in_fixed_order(x_TD):
            return invariant_gated_matmul(x_TD, weight_OD, None, self._partials)
        return silu_and_mul(self.product(x_TD, weight_OD))

    def _in_fixed_order(self, x_TD: torch.Tensor) -> bool:
        """Whether products keep a row's order of sums. Where launches can overlap, those kernels do so with what
        comes before them, and take few rows of wide models too."""
        few = 1 < x_TD.shape[0] <= FEW_WIDE_ROWS and self._alone(x_TD) and is_early(x_TD)
        return few or self._deterministic

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

    def logits(
        self, hidden_RD: torch.Tensor, part: slice = slice(None), adapters: KernelStep | None = None
    ) -> torch.Tensor:
        """logits_RV in the weights' dtype, of a part of the vocabulary if so asked; in fp32 where the rows'
        `adapters` add to them."""
        logits_RV = self._logits(hidden_RD, part)
        if adapters is None or not adapters.variant.head:
            return logits_RV
        logits_RV = logits_RV.float()
        adapters.add_(len(self._model.adapter_sites.sites) - 1, hidden_RD, logits_RV, part)
        return logits_RV

    def _logits(self, hidden_RD: torch.Tensor, part: slice) -> torch.Tensor:
        model = self._model
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        if self.kind(hidden_RD) is Rows.ONE:
            return gemv(hidden_RD, head.weight[part])
        if self._deterministic:
            segments = segments_of(*head.weight.shape)
            return invariant_matmul(hidden_RD, head.weight[part], partials=self._partials, segments=segments)
        return head.project(hidden_RD, part)

    def kind(self, x_TD: torch.Tensor) -> Rows:
        if self._deterministic or self._gate_bias or not self._alone(x_TD):
            return Rows.MANY
        rows, width = x_TD.shape
        if rows == 1:
            return Rows.ONE
        most = FEW_NARROW_ROWS if width < NARROW else FEW_ROWS
        return Rows.FEW if rows <= most and width < SMALL else Rows.MANY

    def _alone(self, x_TD: torch.Tensor) -> bool:
        """Whether own products may stand for the layers': on one rank, with tensor cores."""
        return self._model.parallel.size == 1 and x_TD.dtype == torch.bfloat16


def _qk_norm(attention: Attention, eps: float) -> QKNorm | None:
    if attention.q_norm is None or attention.k_norm is None:
        return None
    return QKNorm(attention.q_norm.weight, attention.k_norm.weight, eps)
