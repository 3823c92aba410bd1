"""The decoder that architectures share: embedding, layers of a mixer and a block, head.

Owns the forward pass and the parameters' names. Architectures are specs: what differs is a switch or
a kind of layer, never a copy of this file. Ignores which tokens run (`engine.batch`).

Shapes: T tokens, D hidden, N query heads, K key/value heads, H head size, I intermediate,
R rows of logits, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.layers.experts import ClampedExperts, RoutedExperts
from engine.layers.gated_delta import GatedDelta
from engine.layers.linear import ColumnParallelLinear, Embedding, RowParallelLinear
from engine.layers.mamba2 import Mamba2
from engine.layers.mixer import Mixer, StateStep
from engine.layers.mla import LatentAttention
from engine.layers.norm import RMSNorm, UnitRMSNorm
from engine.layers.pointwise import sigmoid
from engine.layers.rotary import Rotary
from engine.layers.short_conv import ShortConv
from engine.memory.kv_pool import KVPool
from engine.models.adapter_sites import dense_geometry
from engine.models.mamba2 import Mamba2Spec
from engine.models.mixers import GatedDeltaSpec, ShortConvSpec
from engine.models.shape import Activation, ModelSpec
from engine.parallel import TensorParallel
from engine.weights.mapping import WeightMap
from lora.geometry import Geometry
from lora.step import AdapterStep

MIXERS: dict[type, type[Mixer]] = {ShortConvSpec: ShortConv, GatedDeltaSpec: GatedDelta, Mamba2Spec: Mamba2}
"""How each kind of mixer computes."""


class CausalLM(Protocol):
    """What the runner needs of a model of any architecture."""

    spec: ModelSpec
    parallel: TensorParallel
    weight_map: WeightMap
    adapter_sites: Geometry

    @property
    def mixers(self) -> list[Mixer]: ...

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        kv_pool: KVPool,
        capture: dict[int, torch.Tensor] | None = None,
        states: StateStep | None = None,
    ) -> torch.Tensor: ...

    def logits(
        self, hidden_RD: torch.Tensor, part: slice = ..., adapters: AdapterStep | None = None
    ) -> torch.Tensor: ...

    def base_weight(self, module: str) -> torch.Tensor | None: ...


def make_norm(spec: ModelSpec, width: int, dtype: torch.dtype, device: torch.device) -> RMSNorm:
    return (UnitRMSNorm if spec.unit_norms else RMSNorm)(width, spec.rms_eps, dtype, device)


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


class Attention(nn.Module):
    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> None:
        super().__init__()
        self.layer = sum(other.attends for other in spec.layers[:layer])
        """Counted among the layers that attend."""
        self.head_dim = spec.head_dim
        self.num_heads = parallel.share(spec.num_heads, "num_attention_heads")
        self.num_kv_heads = parallel.share(spec.num_kv_heads, "num_key_value_heads")
        self.split = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.gated = spec.attention_gate
        widths = q_width * (1 + self.gated), kv_width, kv_width
        self.qkv_proj = ColumnParallelLinear(spec.hidden, widths, spec.attention_bias, dtype, device, parallel)
        self.o_proj = RowParallelLinear(q_width, spec.hidden, spec.attention_bias, dtype, device, parallel)
        self.q_norm = make_norm(spec, spec.head_dim, dtype, device) if spec.qk_norm else None
        self.k_norm = make_norm(spec, spec.head_dim, dtype, device) if spec.qk_norm else None
        self.sinks_N = None
        if spec.layers[layer].sink:
            sinks_N = torch.empty(self.num_heads, dtype=dtype, device=device)
            self.sinks_N = nn.Parameter(sinks_N, requires_grad=False)
        self.query_factor = 1.0 if spec.query_scale is None else spec.query_scale * spec.head_dim**0.5
        """On top of the backend's scale of head_dim ** -0.5."""
        self.scales = spec.scales

    def forward(
        self,
        x_TD: torch.Tensor,
        rotary: Rotary,
        cos_T1H: torch.Tensor,
        sin_T1H: torch.Tensor,
        backend: AttentionBackend,
        adapters: AdapterStep | None = None,
    ) -> torch.Tensor:
        tokens, heads, rotated = x_TD.shape[0], self.num_heads, self.num_heads + self.num_kv_heads
        x_TD = scaled(x_TD, self.scales.attention_in)
        qkv_TO, gate_TNH = self.qkv_proj(x_TD, adapters), None
        if self.gated:
            both, rest = qkv_TO.split((2 * heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim), dim=1)
            q_TNH, gate_TNH = both.view(tokens, heads, 2 * self.head_dim).chunk(2, dim=-1)
            qkv_TO = torch.cat((q_TNH.flatten(1), rest), dim=1)
        qkv_THE = qkv_TO.view(tokens, rotated + self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv_THE[:, :heads] = self.q_norm(qkv_THE[:, :heads])
            qkv_THE[:, heads:rotated] = self.k_norm(qkv_THE[:, heads:rotated])
        rotary.rotate_(qkv_THE[:, :rotated], cos_T1H, sin_T1H)
        if self.query_factor != 1.0:
            qkv_THE[:, :heads] *= self.query_factor
        q_TNH, k_TKH, v_TKH = qkv_THE.split(self.split, dim=1)
        out_TNH = backend.run(q_TNH, k_TKH, v_TKH, self.layer, self.sinks_N)
        if gate_TNH is not None:
            out_TNH = out_TNH * sigmoid(gate_TNH)
        out_TD = self.o_proj(out_TNH.reshape(tokens, heads * self.head_dim), adapters)
        return scaled(out_TD, self.scales.attention_out)

    __call__ = forward  # no hooks: a layer is called hundreds of times a token


class GatedMLP(nn.Module):
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> None:
        super().__init__()
        width = spec.intermediate
        self.activation: Activation = spec.activation
        self.scales = spec.scales
        self.width = parallel.share(width, "intermediate_size")
        self.gate_up_proj = ColumnParallelLinear(spec.hidden, (width, width), spec.mlp_bias, dtype, device, parallel)
        self.down_proj = RowParallelLinear(width, spec.hidden, spec.mlp_bias, dtype, device, parallel)

    def forward(self, x_TD: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        inner_TI = self._inner(self.gate_up_proj(x_TD, adapters))
        return scaled(self.down_proj(inner_TI, adapters), self.scales.block_out)

    def _inner(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        if gate_up_TI.is_cuda and self.activation == "silu" and self.scales.gate == 1.0:
            from engine.kernels.swiglu import silu_and_mul

            return silu_and_mul(gate_up_TI)
        gate_TI = activated(scaled(gate_up_TI[:, : self.width], self.scales.gate), self.activation)
        return gate_TI.mul_(gate_up_TI[:, self.width :])

    __call__ = forward


class PlainMLP(nn.Module):
    """A block without a gate."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> None:
        super().__init__()
        self.activation: Activation = spec.activation
        width, bias = spec.intermediate, spec.mlp_bias
        self.up_proj = ColumnParallelLinear(spec.hidden, (width,), bias, dtype, device, parallel)
        self.down_proj = RowParallelLinear(width, spec.hidden, bias, dtype, device, parallel)

    def forward(self, x_TD: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        return self.down_proj(activated(self.up_proj(x_TD, adapters), self.activation), adapters)

    __call__ = forward


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "relu2":
        return F.relu(x).square_()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


class DecoderLayer(nn.Module):
    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> None:
        super().__init__()
        kind, attends, block = spec.layers[layer].mixer, spec.layers[layer].attends, spec.layers[layer].block
        self.mixer: Mixer | None = None
        self.self_attn: Any = None
        self.mlp: Any = None
        self.mixer_out = spec.scales.mixer_out
        if attends or kind is not None:
            self.input_layernorm = make_norm(spec, spec.hidden, dtype, device)
        if kind is not None:
            self.mixer = MIXERS[type(kind)](kind, spec.hidden, layer, dtype, device, parallel)
        if attends:
            attention = Attention if spec.latent is None else LatentAttention
            self.self_attn = attention(spec, layer, dtype, device, parallel)
        if block:
            self.post_attention_layernorm = make_norm(spec, spec.hidden, dtype, device)
            make_block: Any = GatedMLP if spec.gated else PlainMLP
            if spec.experts is not None and not spec.layers[layer].dense:
                make_block = ClampedExperts if spec.experts.gate is None else RoutedExperts
            self.mlp = make_block(spec, dtype, device, parallel)
        self.mixed_norm = make_norm(spec, spec.hidden, dtype, device) if spec.output_norms else None
        self.added_norm = make_norm(spec, spec.hidden, dtype, device) if spec.output_norms else None

    def forward(
        self,
        x_TD: torch.Tensor,
        rotary: Rotary,
        cos_T1H: torch.Tensor,
        sin_T1H: torch.Tensor,
        backend: AttentionBackend,
        adapters: AdapterStep | None = None,
        states: StateStep | None = None,
    ) -> torch.Tensor:
        """Adds to `x_TD` in place and returns it."""
        mixer, attention, mixed_TD = self.mixer, self.self_attn, None
        if mixer is not None or attention is not None:
            normed_TD = self.input_layernorm(x_TD)
            if attention is not None:
                mixed_TD = attention(normed_TD, rotary, cos_T1H, sin_T1H, backend, adapters)
            if mixer is not None:
                assert states is not None, "a recurrent layer needs its states"
                added_TD = scaled(mixer(normed_TD, states, adapters), self.mixer_out)
                mixed_TD = added_TD if mixed_TD is None else mixed_TD + added_TD
        if mixed_TD is not None:
            x_TD += mixed_TD if self.mixed_norm is None else self.mixed_norm(mixed_TD)
        if self.mlp is not None:
            added_TD = self.mlp(self.post_attention_layernorm(x_TD), adapters)
            x_TD += added_TD if self.added_norm is None else self.added_norm(added_TD)
        return x_TD

    __call__ = forward


class Decoder(nn.Module):
    """The part of the model below the head."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype, device, parallel) for i in range(spec.num_layers))
        self.norm = make_norm(spec, spec.hidden, dtype, device)


class DenseDecoderLM(nn.Module):
    """A causal language model with uninitialised parameters, ready to be loaded.

    `weight_map` names every checkpoint tensor it takes. `rotary` is that of the model's rope; layers
    may have their own.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weight_map: WeightMap,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.parallel = parallel
        self.weight_map = weight_map
        ropes = [layer.rope or spec.rope for layer in spec.layers]
        kinds = list(dict.fromkeys([spec.rope, *ropes]))
        self._rotaries = [Rotary(kind, spec.head_dim, spec.context_len, dtype, device) for kind in kinds]
        self._rope_of = [kinds.index(rope) for rope in ropes]
        self.rotary = self._rotaries[0]
        scale = spec.embed_scale
        self._embed_scale = None if scale is None else torch.tensor(scale, dtype=dtype, device=device)
        self.model = Decoder(spec, dtype, device, parallel)
        self.lm_head = None if spec.tied else Embedding(spec.vocab_size, spec.hidden, dtype, device)
        self.adapter_sites = dense_geometry(spec, parallel)
        self._number_sites()

    @property
    def mixers(self) -> list[Mixer]:
        """Of the layers with a recurrent state."""
        layers = [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]
        return [layer.mixer for layer in layers if layer.mixer is not None]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    def forward(
        self,
        batch: ForwardBatch,
        backend: AttentionBackend,
        kv_pool: KVPool,
        capture: dict[int, torch.Tensor] | None = None,
        states: StateStep | None = None,
    ) -> torch.Tensor:
        """Final hidden states hidden_TD, normed.

        `capture` names layers by its keys and receives the states after each of them. `states` says where
        those of recurrent layers are.
        """
        backend.plan(batch, kv_pool)
        return self.hidden(batch.input_ids_T, batch.positions_T, backend, capture, states, batch.adapters)

    def hidden(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        backend: AttentionBackend,
        capture: dict[int, torch.Tensor] | None = None,
        states: StateStep | None = None,
        adapters: AdapterStep | None = None,
    ) -> torch.Tensor:
        """As `forward`, where attention has been planned."""
        x_TD = self.model.embed_tokens(ids_T)
        if adapters is not None:
            adapters.add_embedding_(0, ids_T, x_TD)
        if self._embed_scale is not None:
            x_TD *= self._embed_scale
        angles = [rotary.at(positions_T) for rotary in self._rotaries]
        for index, (layer, rope) in enumerate(zip(self.model.layers, self._rope_of, strict=True)):
            x_TD = layer(x_TD, self._rotaries[rope], *angles[rope], backend, adapters, states)
            if capture is not None and index in capture:
                capture[index] = x_TD.clone()
        return self.model.norm(x_TD)

    def logits(
        self, hidden_RD: torch.Tensor, part: slice = slice(None), adapters: AdapterStep | None = None
    ) -> torch.Tensor:
        """logits_RV in fp32, or those of a part of the vocabulary. `adapters` are the rows' own."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits_RV = head.project(hidden_RD, part).float()
        if adapters is not None:
            adapters.add_(len(self.adapter_sites.sites) - 1, hidden_RD, logits_RV, part)
        if self.spec.scales.logits != 1.0:
            logits_RV *= self.spec.scales.logits
        cap = self.spec.logit_softcap
        return logits_RV if cap is None else logits_RV.div_(cap).tanh_().mul_(cap)

    def base_weight(self, module: str) -> torch.Tensor | None:
        """The weight of a module that peft saves whole beside its factors."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        embedding = f"model.{self.spec.names.embedding}"
        return {embedding: self.model.embed_tokens.weight, "lm_head": head.weight}.get(module)

    def _number_sites(self) -> None:
        """As `dense_geometry` counts: the embedding, each layer's products, the head."""
        site = 1
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            mixer, mlp = layer.mixer, layer.mlp
            products = [] if mixer is None else [mixer.in_proj, mixer.out_proj]
            if isinstance(layer.self_attn, LatentAttention):
                products += layer.self_attn.products()
            elif layer.self_attn is not None:
                products += [layer.self_attn.qkv_proj, layer.self_attn.o_proj]
            if isinstance(mlp, (GatedMLP, RoutedExperts)):
                products += [mlp.gate_up_proj, mlp.down_proj]
            elif isinstance(mlp, PlainMLP):
                products += [mlp.up_proj, mlp.down_proj]
            for product in products:
                product.site = site
                site += 1
        assert site == len(self.adapter_sites.sites) - 1, f"{site} sites, expected {len(self.adapter_sites.sites) - 1}"
