"""What a model is: values that every layer, pool and backend reads.

Owns the records and nothing else. Reading them from a configuration is `engine.models.spec`'s, what
differs between architectures the files' beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from engine.models.mixers import MixerSpec, StateLayout

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "none"]
Activation = Literal["silu", "gelu_tanh", "relu2"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of a head's first `part`; the fields past `kind` are those of the kinds that use them.
    "none" turns nothing."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    part: float = 1.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: how it mixes tokens, by attention, by a `mixer` with a state, by both side by side or not at
    all, and whether a `block` follows. `window` counts the current token; `sink` adds one learned logit per
    head; `softcap` bounds scores by tanh; `bias` is the extent in tokens of a bias by distance, zero beyond it;
    `rope` is the layer's own where it differs from the model's; `index` says whether it attends to a choice of
    tokens, its own or that of the last layer which made one; `dense` layers have a gated block where the others
    have experts."""

    attends: bool = True
    mixer: MixerSpec | None = None
    block: bool = True
    window: int | None = None
    sink: bool = False
    softcap: float | None = None
    bias: int | None = None
    rope: RopeSpec | None = None
    index: Literal["none", "own", "shared"] = "none"
    dense: bool = False

    @property
    def plain(self) -> bool:
        """Whether its attention is causal softmax over everything before and nothing else."""
        return self.window is None and not self.sink and self.softcap is None and self.bias is None


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """Blocks of `count` experts, `per_token` of which each token uses. Without a `gate` they are biased, as wide
    as the spec's `intermediate`, and `alpha` and `limit` are those of their clamped gates."""

    count: int
    per_token: int
    alpha: float = 0.0
    limit: float = 0.0
    gate: GateSpec | None = None


@dataclass(frozen=True, slots=True)
class GateSpec:
    """Sigmoid scores that weigh, and those plus a learned correction that choose: first `top_groups` of `groups`
    by their two best, then experts of these. Weights are divided by their sum where `normed`, and times `scale`.
    An expert is `width` wide, and one of `shared` is every token's, times a sigmoid of its own where `weighed`.
    With `softmax` those scores weigh and choose, and there is no correction."""

    width: int
    shared: int
    groups: int = 1
    top_groups: int = 1
    normed: bool = True
    scale: float = 1.0
    softmax: bool = False
    weighed: bool = False


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Who chooses the `top_k` tokens that a query attends to: `heads` of `head_dim`, whose first dimensions are
    rotated, in pairs of neighbours where `interleaved` and of halves elsewhere."""

    heads: int
    head_dim: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Attention over latents: a token is stored as `rank` numbers, from which keys and values of all heads
    follow, and one rotated key of `rope_dim` that they share. Queries come from `query_rank` numbers, or from the
    input where that is None; a head's are `nope_dim` plain and `rope_dim` rotated ones, its values `value_dim`."""

    rank: int
    query_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True
    index: IndexSpec | None = None

    @property
    def row(self) -> int:
        """Numbers a token is stored as."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors on what goes into attention, what attention, mixer and block add, the block's gate and the logits."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mixer_out: float = 1.0
    gate: float = 1.0
    block_out: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class Names:
    """What checkpoints call the parts of a decoder; layers' parts without their prefix."""

    root: str = "model"
    """What checkpoints call the part below the head, which trainers call `model`."""
    embedding: str = "embed_tokens"
    input_norm: str = "input_layernorm"
    block_norm: str = "post_attention_layernorm"
    mixed_norm: str = ""
    """Of what the mixer adds, in models that norm it."""
    added_norm: str = ""
    """Of what the gated block adds."""
    final_norm: str = "model.norm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    """Of both halves where `up` is empty."""
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    sinks: str = "self_attn.sinks"
    expert_gate: str = "mlp.router"
    experts: str = "mlp.experts"
    shared_expert: str = "mlp.shared_experts"
    ignored: tuple[str, ...] = ()
    """How names begin of what checkpoints carry and the decoder has no use for."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape. `context_len` is the longest sequence it may hold.

    `unit_norms` multiply by 1 + weight and round once, after the weight. With `output_norms` what mixer
    and block add to the residual is normed first. `query_scale` is what scores are scaled by where that
    is not head_dim ** -0.5, `logit_softcap` bounds logits by tanh. With `experts` every block is one of those,
    but in `dense` layers. With `latent` all attention is over latents: one key/value head, `head_dim` is what
    rotates of it, and `query_scale` is set. `predictors` are layers behind the last, which predict further
    tokens: checkpoints have them and no model takes them. `beside` are further numbers of every token, which its pool
    keeps under the page ids of its keys and values.
    """

    architecture: str
    vocab_size: int
    context_len: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    tied: bool
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    rms_eps: float = 1e-6
    attention_bias: bool = False
    attention_gate: bool = False
    """Whether queries come with gates of what their heads put out."""
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeSpec = RopeSpec()
    unit_norms: bool = False
    output_norms: bool = False
    activation: Activation = "silu"
    gated: bool = True
    """Whether blocks have a gate beside what goes up."""
    scales: Scales = Scales()
    embed_scale: float | None = None
    query_scale: float | None = None
    logit_softcap: float | None = None
    experts: ExpertSpec | None = None
    latent: LatentSpec | None = None
    predictors: int = 0
    beside: int = 0
    names: Names = Names()

    @property
    def uniform(self) -> bool:
        """Whether it is the decoder that the fused path computes: one rope, plain norms, a silu gate."""
        switches = self.unit_norms, self.output_norms, self.embed_scale, self.query_scale, self.logit_softcap
        special = any(switches) or bool(self.experts or self.latent) or self.scales != Scales()
        special |= self.activation != "silu" or not self.gated or self.rope.kind == "none"
        special |= self.attention_gate or self.rope.part != 1.0
        plain = all(
            layer.attends and layer.block and layer.mixer is None and layer.rope is None and not layer.sink
            for layer in self.layers
        )
        return plain and not special

    @property
    def recurrent(self) -> bool:
        """Whether some layers carry states that are no pages."""
        return any(layer.mixer is not None for layer in self.layers)

    @property
    def attending(self) -> ModelSpec:
        """The layers that attend, as pools of keys and values and attention backends count them."""
        if all(layer.attends for layer in self.layers):
            return self
        layers = tuple(layer for layer in self.layers if layer.attends)
        return replace(self, layers=layers, num_layers=len(layers))

    @property
    def token_numbers(self) -> int:
        """Numbers that are stored of a token under page ids."""
        attending = sum(layer.attends for layer in self.layers)
        if self.latent is None:
            return attending * 2 * self.num_kv_heads * self.head_dim + self.beside
        owners = sum(layer.index == "own" for layer in self.layers)
        index = owners * (self.latent.index.head_dim if self.latent.index else 0)
        return attending * self.latent.row + index + self.beside

    def state_layout(self, dtype: torch.dtype | None = None) -> StateLayout:
        """What a slot of the model's recurrent states holds, where activations have `dtype` (None: the
        spec's): the one source of its shapes, bytes and grid."""
        mixers = {i: layer.mixer for i, layer in enumerate(self.layers) if layer.mixer is not None}
        layers = {i: mixer.state(self.hidden, dtype or self.dtype) for i, mixer in mixers.items()}
        return StateLayout(layers, math.lcm(*(mixer.grid for mixer in mixers.values())))
