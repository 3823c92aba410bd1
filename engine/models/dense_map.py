"""Checkpoint names of the dense decoders.

Owns the one table from published names to fused parameters. Ignores files and tensors.
"""

from __future__ import annotations

from engine.models.spec import ModelSpec
from engine.weights.mapping import Placement, WeightMap


def dense_weight_map(spec: ModelSpec) -> WeightMap:
    placements: dict[str, Placement] = {}

    def whole(name: str, *shape: int, shard_dim: int | None = None) -> None:
        placements[name] = Placement(name, 0, shape[0], shape, shard_dim)

    def fused(prefix: str, param: str, parts: dict[str, int], bias: bool) -> None:
        start = 0
        for part, rows in parts.items():
            shapes = {"weight": (rows, spec.hidden)} | ({"bias": (rows,)} if bias else {})
            for kind, shape in shapes.items():
                placements[f"{prefix}.{part}.{kind}"] = Placement(f"{prefix}.{param}.{kind}", start, rows, shape, 0)
            start += rows

    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    whole("model.embed_tokens.weight", spec.vocab_size, spec.hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}"
        whole(f"{layer}.input_layernorm.weight", spec.hidden)
        qkv = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        fused(f"{layer}.self_attn", "qkv_proj", qkv, spec.attention_bias)
        whole(f"{layer}.self_attn.o_proj.weight", spec.hidden, q_rows, shard_dim=1)
        if spec.attention_bias:
            whole(f"{layer}.self_attn.o_proj.bias", spec.hidden)
        if spec.qk_norm:
            whole(f"{layer}.self_attn.q_norm.weight", spec.head_dim)
            whole(f"{layer}.self_attn.k_norm.weight", spec.head_dim)
        whole(f"{layer}.post_attention_layernorm.weight", spec.hidden)
        gate_up = {"gate_proj": spec.intermediate, "up_proj": spec.intermediate}
        fused(f"{layer}.mlp", "gate_up_proj", gate_up, spec.mlp_bias)
        whole(f"{layer}.mlp.down_proj.weight", spec.hidden, spec.intermediate, shard_dim=1)
        if spec.mlp_bias:
            whole(f"{layer}.mlp.down_proj.bias", spec.hidden)
    whole("model.norm.weight", spec.hidden)
    aliases: dict[str, str] = {}
    if spec.tied:
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        whole("lm_head.weight", spec.vocab_size, spec.hidden)
    inverse = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(spec.num_layers)}
    return WeightMap(placements, aliases, frozenset(inverse | {"model.rotary_emb.inv_freq"}))
