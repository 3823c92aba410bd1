"""gpt-oss: windows in every other layer, a sink per head, and blocks of clamped experts."""

from __future__ import annotations

from typing import Any

from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.shape import ExpertSpec


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    count = fields.integer(config, "num_hidden_layers")
    every_other = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    experts = ExpertSpec(
        count=fields.integer(config, "num_local_experts"),
        per_token=fields.integer(config, "num_experts_per_tok"),
        alpha=float(config.get("swiglu_alpha", 1.702)),
        limit=float(config.get("swiglu_limit", 7.0)),
    )
    return {
        "layers": fields.windowed_layers(config, every_other, sink=True),
        "rope": fields.rope(config, fields.integer(config, "max_position_embeddings")),
        "head_dim": config.get("head_dim") or 64,
        "attention_bias": bool(config.get("attention_bias", True)),
        "experts": experts,
    }


GPT_OSS = Family("GptOssForCausalLM", "gpt_oss", _describe)
