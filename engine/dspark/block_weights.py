"""Checkpoint names of a block drafter.

Owns the one table from DeepSpec names to the module's parameters, read by cold load and live update
alike. Ignores files. Copies of the target's embedding and head, which checkpoints may carry, are the
target's business and are passed over.
"""

from __future__ import annotations

from engine.dspark.block_spec import BlockDrafterSpec
from engine.weights.mapping import Placement, WeightMap

SHARED_WITH_TARGET = frozenset({"embed_tokens.weight", "lm_head.weight"})


def block_weight_map(spec: BlockDrafterSpec) -> WeightMap:
    placements: dict[str, Placement] = {}
    shape = spec.backbone
    hidden, rank = shape.hidden, spec.markov_rank

    def whole(name: str, param: str, *dims: int) -> None:
        placements[name] = Placement(param, 0, dims[0], dims)

    whole("fc.weight", "fc", hidden, hidden * len(spec.target_layers))
    whole("hidden_norm.weight", "hidden_norm.weight", hidden)
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    start = 0
    for index in range(shape.num_layers):
        layer = f"layers.{index}"
        for part, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            name = f"{layer}.self_attn.{part}.weight"
            placements[name] = Placement("qkv_proj", start, rows, (rows, hidden))
            start += rows
        whole(f"{layer}.self_attn.o_proj.weight", f"{layer}.o_proj", hidden, q_rows)
        for norm in ("q_norm", "k_norm") if shape.qk_norm else ():
            whole(f"{layer}.self_attn.{norm}.weight", f"{layer}.{norm}.weight", shape.head_dim)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            whole(f"{layer}.{norm}.weight", f"{layer}.{norm}.weight", hidden)
        for number, part in enumerate(("gate_proj", "up_proj")):
            dims = (shape.intermediate, hidden)
            placement = Placement(f"{layer}.gate_up_proj", number * shape.intermediate, shape.intermediate, dims)
            placements[f"{layer}.mlp.{part}.weight"] = placement
        whole(f"{layer}.mlp.down_proj.weight", f"{layer}.down_proj", hidden, shape.intermediate)
    whole("norm.weight", "norm.weight", hidden)
    if spec.markov != "none":
        whole("markov_head.markov_w1.weight", "markov_head.w1", shape.vocab_size, rank)
        whole("markov_head.markov_w2.weight", "markov_head.w2", shape.vocab_size, rank)
    if spec.markov == "gated":
        whole("markov_head.gate_proj.weight", "markov_head.gate_weight", rank, hidden + rank)
        whole("markov_head.gate_proj.bias", "markov_head.gate_bias", rank)
    if spec.markov == "rnn":
        whole("markov_head.joint_proj.weight", "markov_head.joint_weight", 3 * rank, 2 * rank + hidden)
        whole("markov_head.joint_proj.bias", "markov_head.joint_bias", 3 * rank)
    if spec.confidence:
        width = hidden + (rank if spec.confidence_reads_markov else 0)
        whole("confidence_head.proj.weight", "confidence_head.weight", 1, width)
        whole("confidence_head.proj.bias", "confidence_head.bias", 1)
    return WeightMap(placements, ignored=SHARED_WITH_TARGET)
