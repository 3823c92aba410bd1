"""What a model is, read from a Hugging Face `config.json`.

Owns the translation of configurations into one value, and the refusal by name of everything that
would change arithmetic and is not built. What an architecture adds to the common fields is its own
file's (`engine.models.registry`). Ignores weights and tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequest, Unsupported
from engine.models import config_fields as fields
from engine.models.bamba import BAMBA
from engine.models.deepseek import DEEPSEEK_V3, DEEPSEEK_V32
from engine.models.falcon_h1 import FALCON_H1
from engine.models.gemma2 import GEMMA2
from engine.models.gemma3 import GEMMA3
from engine.models.glm_moe_dsa import GLM_MOE_DSA
from engine.models.gpt_oss import GPT_OSS
from engine.models.granite_hybrid import GRANITE_HYBRID
from engine.models.lfm2 import LFM2
from engine.models.llama import LLAMA
from engine.models.nemotron_h import NEMOTRON_H
from engine.models.qwen3 import QWEN3
from engine.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_VISION, QWEN3_5_VISION
from engine.models.qwen3_next import QWEN3_NEXT
from engine.models.shape import DTYPES, LayerSpec, ModelSpec, Names, RopeSpec

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        QWEN3,
        GEMMA2,
        GEMMA3,
        GPT_OSS,
        LFM2,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        FALCON_H1,
        NEMOTRON_H,
        GRANITE_HYBRID,
        BAMBA,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5_VISION,
        QWEN3_5_MOE_VISION,
    )
}

_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}


def read_spec(folder: str | Path) -> ModelSpec:
    """The spec of a model folder: `config.json`, and end ids from `generation_config.json` too."""
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    return spec_from_config(config, _read_json(generation_file) if generation_file.exists() else None)


def spec_from_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    """Raises `Unsupported` or `InvalidRequest`, naming the field, where the model cannot be served exactly."""
    family = FAMILIES[_architecture(config)]
    config = family.prepare(config)
    fields.refuse_others(config, {name: values for name, values in _ONLY.items() if name not in family.own_fields})
    heads = fields.integer(config, "num_attention_heads")
    hidden = fields.integer(config, "hidden_size")
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise InvalidRequest(field="num_key_value_heads", expected=f"a divisor of {heads} heads", actual=kv_heads)
    common: dict[str, Any] = dict(
        architecture=family.architecture,
        vocab_size=fields.integer(config, "vocab_size"),
        context_len=fields.integer(config, "max_position_embeddings"),
        hidden=hidden,
        intermediate=fields.integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.get("head_dim") or hidden // heads,
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=fields.eos_ids(config, generation or {}),
        dtype=fields.dtype(config),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        attention_bias=bool(config.get("attention_bias", False)),
    )
    described = family.describe(config)
    common["num_layers"] = len(described["layers"])
    return ModelSpec(**(common | described))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(field=str(path), expected="a readable JSON file", actual=error) from error
    if not isinstance(value, dict):
        raise InvalidRequest(field=str(path), expected="a JSON object", actual=value)
    return value


def _architecture(config: dict[str, Any]) -> str:
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    named = config.get("architectures") or [by_type.get(config.get("model_type", ""), config.get("model_type"))]
    if len(named) != 1 or named[0] not in FAMILIES:
        raise Unsupported(field="architectures", expected=f"one of {sorted(FAMILIES)}", actual=named)
    return str(named[0])


__all__ = [
    "DTYPES",
    "FAMILIES",
    "LayerSpec",
    "ModelSpec",
    "Names",
    "RopeSpec",
    "read_spec",
    "spec_from_config",
]
