"""Gemma 2: unit norms around mixer and block, scaled embeddings, windows in every other layer, soft caps."""

from __future__ import annotations

from typing import Any

from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.shape import Names

OWN_FIELDS = frozenset({"hidden_act"})
"""Configurations of either generation carry the gate under two names; `hidden_activation` decides."""

NAMES = Names(
    block_norm="pre_feedforward_layernorm",
    mixed_norm="post_attention_layernorm",
    added_norm="post_feedforward_layernorm",
)


def common(config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    fields.refuse_others(config, {"hidden_activation": ("gelu_pytorch_tanh", None)})
    fields.refuse_others(config, {"use_bidirectional_attention": (False, None)})
    return {
        "head_dim": config.get("head_dim") or 256,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "unit_norms": True,
        "output_norms": True,
        "activation": "gelu_tanh",
        "embed_scale": fields.integer(config, "hidden_size") ** 0.5,
        "query_scale": float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        "names": NAMES,
    }


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    count = fields.integer(config, "num_hidden_layers")
    every_other = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    return common(config) | {
        "layers": fields.windowed_layers(config, every_other, softcap=config.get("attn_logit_softcapping", 50.0)),
        "rope": fields.rope(config, fields.integer(config, "max_position_embeddings")),
        "logit_softcap": config.get("final_logit_softcapping", 30.0),
    }


GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", _describe, OWN_FIELDS)
