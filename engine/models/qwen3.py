"""Qwen3 dense: the dense decoder with a norm per head on queries and keys before rotation."""

from __future__ import annotations

from typing import Any

from engine.models.family import Family
from engine.models.llama import plain_layers


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    return plain_layers(config) | {"head_dim": config.get("head_dim") or 128, "qk_norm": True}


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", _describe)
