"""Granite 4 hybrids without experts: Mamba2 in most layers, attention in some, one factor on all that is added."""

from __future__ import annotations

from typing import Any

from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.mamba2 import read_mamba2
from engine.models.shape import LayerSpec, Names, RopeSpec, Scales

NAMES = Names(gate="shared_mlp.input_linear", up="", down="shared_mlp.output_linear")


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    fields.refuse_others(config, {"num_local_experts": (0, None), "position_embedding_type": (None, "nope", "rope")})
    count = fields.integer(config, "num_hidden_layers")
    kinds = fields.layer_types(config, ["linear_attention"] * count, ("linear_attention", "full_attention"))
    mixing = LayerSpec(attends=False, mixer=read_mamba2(config))
    added = float(config.get("residual_multiplier") or 1.0)
    rotates = config.get("position_embedding_type") == "rope"
    return {
        "layers": tuple(LayerSpec() if kind == "full_attention" else mixing for kind in kinds),
        "rope": _rope(config) if rotates else RopeSpec(kind="none"),
        "intermediate": fields.integer(config, "shared_intermediate_size"),
        "embed_scale": float(config.get("embedding_multiplier") or 1.0),
        "query_scale": float(config.get("attention_multiplier") or 1.0),
        "scales": Scales(
            attention_out=added,
            mixer_out=added,
            block_out=added,
            logits=1.0 / float(config.get("logits_scaling") or 1.0),
        ),
        "names": NAMES,
    }


def _rope(config: dict[str, Any]) -> RopeSpec:
    return fields.rope(config, fields.integer(config, "max_position_embeddings"))


GRANITE_HYBRID = Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", _describe)
