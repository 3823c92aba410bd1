"""Gemma 3 (text): Gemma's decoder with normed heads, five windowed layers to a full one, two ropes."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.errors import Unsupported
from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.gemma2 import OWN_FIELDS, common
from engine.models.shape import RopeSpec


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("attn_logit_softcapping") is not None:
        raise Unsupported(
            field="attn_logit_softcapping", expected="none in Gemma 3", actual=config["attn_logit_softcapping"]
        )
    count = fields.integer(config, "num_hidden_layers")
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    default = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)]
    whole, local = _ropes(config)
    layers = tuple(
        layer if layer.window is None else dataclasses.replace(layer, rope=local)
        for layer in fields.windowed_layers(config, default)
    )
    softcap = config.get("final_logit_softcapping")
    return common(config) | {"layers": layers, "rope": whole, "qk_norm": True, "logit_softcap": softcap}


def _ropes(config: dict[str, Any]) -> tuple[RopeSpec, RopeSpec]:
    """Of full layers and of windowed ones: a set each, or (older) one and a base for windows."""
    context_len = fields.integer(config, "max_position_embeddings")
    given = config.get("rope_parameters") or {}
    if "full_attention" in given or "sliding_attention" in given:
        sets = ({"rope_parameters": given.get(kind) or {}} for kind in ("full_attention", "sliding_attention"))
        whole, local = (fields.rope(each, context_len) for each in sets)
        return whole, local
    whole = fields.rope({"rope_theta": 1e6, **config}, context_len)
    return whole, RopeSpec(theta=float(config.get("rope_local_base_freq", 1e4)), original_context=context_len)


GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", _describe, OWN_FIELDS)
