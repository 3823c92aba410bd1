"""Checkpoint names of the decoders.

Owns the one table from published names to fused parameters. Ignores files and tensors.
"""

from __future__ import annotations

from engine.models.mixers import MixerSpec
from engine.models.shape import ModelSpec
from engine.weights.mapping import Placement, WeightMap


class _Table:
    """Placements as they are added."""

    def __init__(self) -> None:
        self.placements: dict[str, Placement] = {}

    def whole(self, name: str, param: str, *shape: int, shard_dim: int | None = None) -> None:
        self.placements[name] = Placement(param, 0, shape[0], shape, shard_dim)

    def fused(self, prefix: str, parts: dict[str, int], param: str, width: int, bias: bool) -> None:
        """Products of one input whose rows lie one after the other."""
        start = 0
        for part, rows in parts.items():
            shapes = {"weight": (rows, width)} | ({"bias": (rows,)} if bias else {})
            for kind, shape in shapes.items():
                self.placements[f"{prefix}.{part}.{kind}"] = Placement(f"{param}.{kind}", start, rows, shape, 0)
            start += rows


def decoder_weight_map(spec: ModelSpec) -> WeightMap:
    table, names = _Table(), spec.names
    table.whole("model.embed_tokens.weight", "model.embed_tokens.weight", spec.vocab_size, spec.hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        table.whole(f"{layer}.{names.input_norm}.weight", f"{layer}.input_layernorm.weight", spec.hidden)
        mixer = spec.layers[index].mixer
        if mixer is not None:
            _mixer(table, mixer, spec.hidden, layer)
        if spec.layers[index].attends:
            _attention(table, spec, layer, spec.layers[index].sink)
        table.whole(f"{layer}.{names.block_norm}.weight", f"{layer}.post_attention_layernorm.weight", spec.hidden)
        if spec.output_norms:
            table.whole(f"{layer}.{names.mixed_norm}.weight", f"{layer}.mixed_norm.weight", spec.hidden)
            table.whole(f"{layer}.{names.added_norm}.weight", f"{layer}.added_norm.weight", spec.hidden)
        (_gated_block if spec.experts is None else _experts)(table, spec, layer)
    table.whole(f"{names.final_norm}.weight", "model.norm.weight", spec.hidden)
    aliases: dict[str, str] = {}
    if spec.tied:
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        table.whole("lm_head.weight", "lm_head.weight", spec.vocab_size, spec.hidden)
    inverse = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(spec.num_layers)}
    return WeightMap(table.placements, aliases, frozenset(inverse | {"model.rotary_emb.inv_freq"}))


def _attention(table: _Table, spec: ModelSpec, layer: str, sink: bool) -> None:
    names, param = spec.names, f"{layer}.self_attn"
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {names.q: q_rows, names.k: kv_rows, names.v: kv_rows}
    table.fused(layer, qkv, f"{param}.qkv_proj", spec.hidden, spec.attention_bias)
    table.whole(f"{layer}.{names.o}.weight", f"{param}.o_proj.weight", spec.hidden, q_rows, shard_dim=1)
    if spec.attention_bias:
        table.whole(f"{layer}.{names.o}.bias", f"{param}.o_proj.bias", spec.hidden)
    if sink:
        table.whole(f"{layer}.{names.sinks}", f"{param}.sinks_N", spec.num_heads, shard_dim=0)
    if spec.qk_norm:
        table.whole(f"{layer}.{names.q_norm}.weight", f"{param}.q_norm.weight", spec.head_dim)
        table.whole(f"{layer}.{names.k_norm}.weight", f"{param}.k_norm.weight", spec.head_dim)


def _mixer(table: _Table, mixer: MixerSpec, hidden: int, layer: str) -> None:
    name, param = f"{layer}.{mixer.name}", f"{layer}.mixer"
    table.fused(name, mixer.inputs(hidden), f"{param}.in_proj", hidden, mixer.bias)
    out, width = mixer.output(hidden)
    table.whole(f"{name}.{out}.weight", f"{param}.out_proj.weight", hidden, width, shard_dim=1)
    if mixer.bias:
        table.whole(f"{name}.{out}.bias", f"{param}.out_proj.bias", hidden)
    for part, whole in mixer.wholes(hidden).items():
        table.whole(f"{name}.{part}", f"{param}.{whole.param}", *whole.shape)


def _gated_block(table: _Table, spec: ModelSpec, layer: str) -> None:
    names, param = spec.names, f"{layer}.mlp"
    gate_up = {names.gate: spec.intermediate, names.up: spec.intermediate}
    table.fused(layer, gate_up, f"{param}.gate_up_proj", spec.hidden, spec.mlp_bias)
    down = f"{param}.down_proj"
    table.whole(f"{layer}.{names.down}.weight", f"{down}.weight", spec.hidden, spec.intermediate, shard_dim=1)
    if spec.mlp_bias:
        table.whole(f"{layer}.{names.down}.bias", f"{down}.bias", spec.hidden)


def _experts(table: _Table, spec: ModelSpec, layer: str) -> None:
    names, param, experts = spec.names, f"{layer}.mlp", spec.experts
    assert experts is not None, "blocks without experts are gated blocks"
    count, hidden, width = experts.count, spec.hidden, spec.intermediate
    table.whole(f"{layer}.{names.expert_gate}.weight", f"{param}.gate_XD", count, hidden)
    table.whole(f"{layer}.{names.expert_gate}.bias", f"{param}.gate_bias_X", count)
    table.whole(f"{layer}.{names.experts}.gate_up_proj", f"{param}.gate_up_XDI", count, hidden, 2 * width)
    table.whole(f"{layer}.{names.experts}.gate_up_proj_bias", f"{param}.gate_up_bias_XI", count, 2 * width)
    table.whole(f"{layer}.{names.experts}.down_proj", f"{param}.down_XID", count, width, hidden)
    table.whole(f"{layer}.{names.experts}.down_proj_bias", f"{param}.down_bias_XD", count, hidden)
