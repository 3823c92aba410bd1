"""Qwen3.5: Qwen3-Next's layers with products of their own for queries, gates and decays; dense or with experts.

Of models that see, too, the language model is read: positions of text are the same in all three directions.
"""

from __future__ import annotations

from typing import Any

from engine.errors import InvalidRequest
from engine.models.family import Family
from engine.models.qwen3_next import OWN_FIELDS, common, experts


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    return common(config, grouped=False)


def _describe_moe(config: dict[str, Any]) -> dict[str, Any]:
    return common(config, grouped=False) | {"experts": experts(config, normed=True)}


def _sized(config: dict[str, Any]) -> dict[str, Any]:
    """No layer is dense."""
    return {"intermediate_size": config.get("moe_intermediate_size"), **config}


def _text(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise InvalidRequest(field="text_config", expected="the language model's configuration", actual=text)
    whole = {name: config[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in config}
    return whole | text


def _text_sized(config: dict[str, Any]) -> dict[str, Any]:
    return _sized(_text(config))


QWEN3_5 = Family("Qwen3_5ForCausalLM", "qwen3_5_text", _describe, OWN_FIELDS)
QWEN3_5_MOE = Family("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _describe_moe, OWN_FIELDS, _sized)
QWEN3_5_VISION = Family("Qwen3_5ForConditionalGeneration", "qwen3_5", _describe, OWN_FIELDS, _text)
QWEN3_5_MOE_VISION = Family("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", _describe_moe, OWN_FIELDS, _text_sized)
