"""Bamba: Mamba2 in most layers, attention of which half a head turns in some, a gated block behind each."""

from __future__ import annotations

from typing import Any

from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.mamba2 import read_mamba2
from engine.models.shape import LayerSpec, Names

NAMES = Names(
    block_norm="pre_ff_layernorm",
    final_norm="model.final_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    attending = config.get("attn_layer_indices") or ()
    mixing = LayerSpec(attends=False, mixer=read_mamba2(config))
    count = fields.integer(config, "num_hidden_layers")
    return {
        "layers": tuple(LayerSpec() if index in attending else mixing for index in range(count)),
        "rope": fields.rope(config, fields.integer(config, "max_position_embeddings"), part=0.5),
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "names": NAMES,
    }


BAMBA = Family("BambaForCausalLM", "bamba", _describe, frozenset({"partial_rotary_factor"}))
