"""Llama: the dense decoder as it is, with biases where the configuration has them."""

from __future__ import annotations

from typing import Any

from engine.models import config_fields as fields
from engine.models.family import Family


def plain_layers(config: dict[str, Any]) -> dict[str, Any]:
    """Rope and layers of decoders whose windows need `use_sliding_window` and begin at a layer."""
    windows = bool(config.get("use_sliding_window") and config.get("sliding_window"))
    first = config.get("max_window_layers", 28)
    count = fields.integer(config, "num_hidden_layers")
    default = ["sliding_attention" if windows and i >= first else "full_attention" for i in range(count)]
    layers = fields.windowed_layers(config if windows else {**config, "sliding_window": None}, default)
    return {"layers": layers, "rope": fields.rope(config, fields.integer(config, "max_position_embeddings"))}


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    return plain_layers(config) | {"mlp_bias": bool(config.get("mlp_bias", False))}


LLAMA = Family("LlamaForCausalLM", "llama", _describe)
