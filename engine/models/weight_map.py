"""Checkpoint names of the decoders.

Owns the one table from published names to fused parameters. Ignores files and tensors.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.adapter_sites import block_inputs
from engine.models.mixers import MixerSpec
from engine.models.shape import LayerSpec, ModelSpec
from engine.weights.mapping import Packed, Placement, WeightMap


class _Table:
    """Placements as they are added."""

    def __init__(self) -> None:
        self.placements: dict[str, Placement] = {}
        self.packed: dict[str, Packed] = {}

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
    embedding = f"model.{names.embedding}.weight"
    table.whole(embedding, "model.embed_tokens.weight", spec.vocab_size, spec.hidden)
    for index in range(spec.num_layers):
        _layer(table, spec, spec.layers[index], f"model.layers.{index}")
    table.whole(f"{names.final_norm}.weight", "model.norm.weight", spec.hidden)
    aliases: dict[str, str] = {}
    if spec.tied:
        aliases["lm_head.weight"] = embedding
    else:
        table.whole("lm_head.weight", "lm_head.weight", spec.vocab_size, spec.hidden)
    if names.root != "model":
        stored = {name: names.root + name.removeprefix("model") for name in table.placements}
        aliases |= {other: name for name, other in stored.items() if name.startswith("model.")}
    inverse = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(spec.num_layers)}
    ignored = frozenset(inverse | {"model.rotary_emb.inv_freq"} | _predictors(spec))
    return WeightMap(table.placements, aliases, ignored, table.packed, names.ignored)


def _layer(table: _Table, spec: ModelSpec, kind: LayerSpec, layer: str) -> None:
    names = spec.names
    if kind.attends or kind.mixer is not None:
        table.whole(f"{layer}.{names.input_norm}.weight", f"{layer}.input_layernorm.weight", spec.hidden)
    if kind.mixer is not None:
        _mixer(table, kind.mixer, spec.hidden, layer)
    if kind.attends:
        (_attention if spec.latent is None else _latent_attention)(table, spec, kind, layer)
    if spec.output_norms:
        table.whole(f"{layer}.{names.mixed_norm}.weight", f"{layer}.mixed_norm.weight", spec.hidden)
        table.whole(f"{layer}.{names.added_norm}.weight", f"{layer}.added_norm.weight", spec.hidden)
    if not kind.block:
        return
    table.whole(f"{layer}.{names.block_norm}.weight", f"{layer}.post_attention_layernorm.weight", spec.hidden)
    if spec.experts is None or kind.dense:
        _block(table, spec, layer)
    else:
        (_experts if spec.experts.gate is None else _routed_experts)(table, spec, layer)


def _predictors(spec: ModelSpec) -> set[str]:
    """Names of layers behind the last, which checkpoints carry."""
    table = _Table()
    for index in range(spec.num_layers, spec.num_layers + spec.predictors):
        layer = f"model.layers.{index}"
        _layer(table, spec, spec.layers[-1], layer)
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"):
            table.whole(f"{layer}.{name}.weight", layer, spec.hidden)
    if spec.latent is not None and spec.latent.index is not None:
        # Such a layer chooses for itself, whatever the last one does.
        own = replace(spec.layers[-1], index="own")
        for index in range(spec.num_layers, spec.num_layers + spec.predictors):
            _latent_attention(table, spec, own, f"model.layers.{index}")
    return set(table.placements) | set(table.packed)


def _attention(table: _Table, spec: ModelSpec, kind: LayerSpec, layer: str) -> None:
    names, param = spec.names, f"{layer}.self_attn"
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = {names.q: q_rows * (1 + spec.attention_gate), names.k: kv_rows, names.v: kv_rows}
    table.fused(layer, qkv, f"{param}.qkv_proj", spec.hidden, spec.attention_bias)
    table.whole(f"{layer}.{names.o}.weight", f"{param}.o_proj.weight", spec.hidden, q_rows, shard_dim=1)
    if spec.attention_bias:
        table.whole(f"{layer}.{names.o}.bias", f"{param}.o_proj.bias", spec.hidden)
    if kind.sink:
        table.whole(f"{layer}.{names.sinks}", f"{param}.sinks_N", spec.num_heads, shard_dim=0)
    if spec.qk_norm:
        table.whole(f"{layer}.{names.q_norm}.weight", f"{param}.q_norm.weight", spec.head_dim)
        table.whole(f"{layer}.{names.k_norm}.weight", f"{param}.k_norm.weight", spec.head_dim)


def _latent_attention(table: _Table, spec: ModelSpec, kind: LayerSpec, layer: str) -> None:
    latent, name, param = spec.latent, f"{layer}.self_attn", f"{layer}.self_attn"
    assert latent is not None, "the spec has latents"
    queries = spec.num_heads * (latent.nope_dim + latent.rope_dim)
    q_in = {"q_proj": queries} if latent.query_rank is None else {"q_a_proj": latent.query_rank}
    inputs = q_in | {"kv_a_proj_with_mqa": latent.row}
    table.fused(name, inputs, f"{param}.in_proj", spec.hidden, spec.attention_bias)
    if latent.query_rank is not None:
        table.whole(f"{name}.q_a_layernorm.weight", f"{param}.q_norm.weight", latent.query_rank)
        table.fused(name, {"q_b_proj": queries}, f"{param}.q_proj", latent.query_rank, False)
    table.whole(f"{name}.kv_a_layernorm.weight", f"{param}.kv_norm.weight", latent.rank)
    expanded, out = (spec.num_heads * width for width in (latent.nope_dim + latent.value_dim, latent.value_dim))
    table.whole(f"{name}.kv_b_proj.weight", f"{param}.expand_OL", expanded, latent.rank, shard_dim=0)
    table.whole(f"{name}.o_proj.weight", f"{param}.o_proj.weight", spec.hidden, out, shard_dim=1)
    if spec.attention_bias:
        table.whole(f"{name}.o_proj.bias", f"{param}.o_proj.bias", spec.hidden)
    if kind.index == "own" and latent.index is not None and latent.query_rank is not None:
        index, name, param = latent.index, f"{name}.indexer", f"{param}.indexer"
        table.fused(name, {"wq_b": index.heads * index.head_dim}, f"{param}.q_proj", latent.query_rank, False)
        table.fused(name, {"wk": index.head_dim}, f"{param}.k_proj", spec.hidden, False)
        table.whole(f"{name}.k_norm.weight", f"{param}.norm_E", index.head_dim)
        table.whole(f"{name}.k_norm.bias", f"{param}.norm_bias_E", index.head_dim)
        table.fused(name, {"weights_proj": index.heads}, f"{param}.weigh_proj", spec.hidden, False)


def _mixer(table: _Table, mixer: MixerSpec, hidden: int, layer: str) -> None:
    name, param = f"{layer}.{mixer.name}", f"{layer}.mixer"
    table.fused(name, mixer.inputs(hidden), f"{param}.in_proj", hidden, mixer.bias)
    out, width = mixer.output(hidden)
    table.whole(f"{name}.{out}.weight", f"{param}.out_proj.weight", hidden, width, shard_dim=1)
    if mixer.bias:
        table.whole(f"{name}.{out}.bias", f"{param}.out_proj.bias", hidden)
    for part, whole in mixer.wholes(hidden).items():
        table.whole(f"{name}.{part}", f"{param}.{whole.param}", *whole.shape)


def _block(table: _Table, spec: ModelSpec, layer: str) -> None:
    names, param = spec.names, f"{layer}.mlp"
    inputs = f"{param}.gate_up_proj" if spec.gated else f"{param}.up_proj"
    table.fused(layer, block_inputs(spec), inputs, spec.hidden, spec.mlp_bias)
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


def _routed_experts(table: _Table, spec: ModelSpec, layer: str) -> None:
    """One by one, as checkpoints store them, or all of a layer's as one tensor, as trainers hold them."""
    names, param, experts = spec.names, f"{layer}.mlp", spec.experts
    assert experts is not None and experts.gate is not None, "the spec has a gate"
    count, hidden, width, shared = experts.count, spec.hidden, experts.gate.width, experts.gate.shared
    table.whole(f"{layer}.{names.expert_gate}.weight", f"{param}.gate_XD", count, hidden)
    if not experts.gate.softmax:
        table.whole(f"{layer}.{names.expert_gate}.e_score_correction_bias", f"{param}.correction_X", count)
    if experts.gate.weighed:
        table.whole(f"{layer}.{names.shared_expert}_gate.weight", f"{param}.shared_gate_1D", 1, hidden)
    gate_up, down, inputs = [], [], ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
    for expert in range(count):
        name = f"{layer}.{names.experts}.{expert}"
        for place, part in enumerate(inputs):
            start, shape = width * (len(inputs) * expert + place), (width, hidden)
            table.placements[f"{name}.{part}.weight"] = Placement(f"{param}.gate_up_RD", start, width, shape)
            gate_up.append(f"{name}.{part}.weight")
        place = Placement(f"{param}.down_RI", hidden * expert, hidden, (hidden, width))
        table.placements[f"{name}.down_proj.weight"] = place
        down.append(f"{name}.down_proj.weight")
    packed = f"{layer}.{names.experts}"
    first = "gate_up_proj" if spec.gated else "up_proj"
    table.packed[f"{packed}.{first}"] = Packed((count, len(inputs) * width, hidden), tuple(gate_up))
    table.packed[f"{packed}.down_proj"] = Packed((count, hidden, width), tuple(down))
    shared_name = f"{layer}.{names.shared_expert}"
    table.fused(shared_name, dict.fromkeys(inputs, shared), f"{param}.gate_up_proj", hidden, False)
    table.whole(f"{shared_name}.down_proj.weight", f"{param}.down_proj.weight", hidden, shared, shard_dim=1)
