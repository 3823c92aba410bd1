"""DeepSeek-V3 and V3.2, and what their successors share: latent attention, grouped experts behind a few dense
layers, and in V3.2 layers that choose the tokens they attend to."""

from __future__ import annotations

import math
from typing import Any

from engine.errors import InvalidRequest, Unsupported
from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.shape import ExpertSpec, GateSpec, IndexSpec, LatentSpec, LayerSpec, Names, RopeSpec

Config = dict[str, Any]
NAMES = Names(expert_gate="mlp.gate")


def describe_latent(config: Config, index: IndexSpec | None, kinds: list[str]) -> dict[str, Any]:
    """The fields of a spec; `kinds` says how each layer comes to its choice of tokens ("none", "own", "shared")."""
    fields.refuse_others(config, {"mlp_bias": (False, None), "num_experts": (config.get("n_routed_experts"), None)})
    count = fields.integer(config, "num_hidden_layers")
    query_rank = config.get("q_lora_rank")
    if query_rank is None and (index is not None or config.get("attention_bias")):
        raise Unsupported(field="q_lora_rank", expected="a rank, where there is an index or a bias", actual=None)
    latent = LatentSpec(
        rank=fields.integer(config, "kv_lora_rank"),
        query_rank=None if query_rank is None else fields.integer(config, "q_lora_rank"),
        nope_dim=fields.integer(config, "qk_nope_head_dim"),
        rope_dim=fields.integer(config, "qk_rope_head_dim"),
        value_dim=fields.integer(config, "v_head_dim"),
        interleaved=config.get("rope_interleave") is not False,
        index=index,
    )
    rope = fields.rope(config, fields.integer(config, "max_position_embeddings"))
    dense = _dense_layers(config, count)
    return {
        "layers": tuple(
            LayerSpec(index=kind, dense=each)  # type: ignore[arg-type]
            for kind, each in zip(kinds, dense, strict=True)
        ),
        "rope": rope,
        "num_kv_heads": 1,
        "head_dim": latent.rope_dim,
        "latent": latent,
        "query_scale": (latent.nope_dim + latent.rope_dim) ** -0.5 * _stretch(rope) ** 2,
        "experts": None if all(dense) else _experts(config),
        "predictors": config.get("num_nextn_predict_layers") or 0,
        "names": NAMES,
    }


def index_of(config: Config, interleaved: bool) -> IndexSpec:
    index = IndexSpec(
        heads=fields.integer(config, "index_n_heads"),
        head_dim=fields.integer(config, "index_head_dim"),
        top_k=fields.integer(config, "index_topk"),
        interleaved=interleaved,
    )
    rotated = fields.integer(config, "qk_rope_head_dim")
    if index.head_dim < rotated:
        raise InvalidRequest(field="index_head_dim", expected=f"{rotated} or more", actual=index.head_dim)
    return index


def _dense_layers(config: Config, count: int) -> list[bool]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        first = config.get("first_k_dense_replace") or 0
        return [layer < first for layer in range(count)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise InvalidRequest(field="mlp_layer_types", expected=f"{count} of 'dense' and 'sparse'", actual=kinds)
    return [kind == "dense" for kind in kinds]


def _experts(config: Config) -> ExpertSpec:
    fields.refuse_others(config, {"topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid", None)})
    count, groups = fields.integer(config, "n_routed_experts"), config.get("n_group") or 1
    top_groups, per_token = config.get("topk_group") or 1, fields.integer(config, "num_experts_per_tok")
    if count % groups:
        raise InvalidRequest(field="n_group", expected=f"a divisor of {count} experts", actual=groups)
    if top_groups > groups:
        raise InvalidRequest(field="topk_group", expected=f"at most {groups} groups", actual=top_groups)
    if per_token > top_groups * (count // groups):
        most = top_groups * (count // groups)
        raise InvalidRequest(field="num_experts_per_tok", expected=f"at most {most}", actual=per_token)
    if groups > 1 and count // groups < 2:
        raise InvalidRequest(field="n_group", expected="groups of two experts or more", actual=groups)
    width = fields.integer(config, "moe_intermediate_size")
    gate = GateSpec(
        width=width,
        shared=width * fields.integer(config, "n_shared_experts"),
        groups=groups,
        top_groups=top_groups,
        normed=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    return ExpertSpec(count=count, per_token=per_token, gate=gate)


def _stretch(rope: RopeSpec) -> float:
    """What long contexts scale queries and keys by."""
    if rope.kind == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


def _describe_v3(config: Config) -> dict[str, Any]:
    return describe_latent(config, None, ["none"] * fields.integer(config, "num_hidden_layers"))


def _describe_v32(config: Config) -> dict[str, Any]:
    count = fields.integer(config, "num_hidden_layers")
    fields.layer_types(config, ["indexed_attention"] * count, ("indexed_attention",))
    # The main rotation is always of neighbours here, the index's of halves.
    return describe_latent({**config, "rope_interleave": True}, index_of(config, False), ["own"] * count)


DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", "deepseek_v3", _describe_v3)
DEEPSEEK_V32 = Family("DeepseekV32ForCausalLM", "deepseek_v32", _describe_v32)
