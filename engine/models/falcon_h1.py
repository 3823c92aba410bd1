"""Falcon-H1: attention and Mamba2 side by side in every layer, and factors wherever a product ends."""

from __future__ import annotations

from typing import Any

from engine.errors import Unsupported
from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.mamba2 import read_mamba2
from engine.models.shape import LayerSpec, Names, Scales

NAMES = Names(
    block_norm="pre_ff_layernorm",
    final_norm="model.final_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    bias, out_bias = bool(config.get("mamba_proj_bias", False)), bool(config.get("projectors_bias", False))
    if bias != out_bias:
        raise Unsupported(field="projectors_bias", expected="as mamba_proj_bias", actual=out_bias)
    norm = "before" if config.get("mamba_norm_before_gate", True) else "behind"
    mixer = read_mamba2(
        config,
        norm=norm if config.get("mamba_rms_norm", False) else "none",
        scales=_five(config),
    )
    count = fields.integer(config, "num_hidden_layers")
    gate, block_out = config.get("mlp_multipliers") or (1.0, 1.0)
    scales = Scales(
        attention_in=_factor(config, "attention_in_multiplier"),
        attention_out=_factor(config, "attention_out_multiplier"),
        mixer_out=_factor(config, "ssm_out_multiplier"),
        gate=float(gate),
        block_out=float(block_out),
        logits=_factor(config, "lm_head_multiplier"),
    )
    heads = fields.integer(config, "num_attention_heads")
    head_dim = config.get("head_dim") or fields.integer(config, "hidden_size") // heads
    return {
        "layers": (LayerSpec(mixer=mixer),) * count,
        "rope": fields.rope(config, fields.integer(config, "max_position_embeddings")),
        "rms_eps": float(config.get("rms_norm_eps", 1e-5)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "embed_scale": _factor(config, "embedding_multiplier"),
        # Keys are multiplied; scores are that much larger.
        "query_scale": _factor(config, "key_multiplier") * head_dim**-0.5,
        "scales": scales,
        "names": NAMES,
    }


def _factor(config: dict[str, Any], field: str) -> float:
    value = config.get(field)
    return 1.0 if value is None else float(value)


def _five(config: dict[str, Any]) -> tuple[float, ...] | None:
    """On gate, x, B, C and step sizes; what goes in is multiplied too, which is the same for a product. None where
    nothing changes."""
    whole = _factor(config, "ssm_in_multiplier")
    if config.get("mamba_proj_bias", False) and whole != 1.0:
        raise Unsupported(field="ssm_in_multiplier", expected="1 with mamba_proj_bias", actual=whole)
    factors = tuple(whole * float(each) for each in config.get("ssm_multipliers") or (1.0,) * 5)
    return None if all(factor == 1.0 for factor in factors) else factors


FALCON_H1 = Family("FalconH1ForCausalLM", "falcon_h1", _describe)
