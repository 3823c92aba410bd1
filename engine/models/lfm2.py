"""LFM2: short convolutions in most layers, attention with normed heads in the others."""

from __future__ import annotations

from typing import Any

from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.mixers import ShortConvSpec
from engine.models.shape import LayerSpec, Names

NAMES = Names(
    input_norm="operator_norm",
    block_norm="ffn_norm",
    final_norm="model.embedding_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    count = fields.integer(config, "num_hidden_layers")
    attending = config.get("full_attn_idxs")
    default = ["full_attention" if attending is None or i in attending else "conv" for i in range(count)]
    kinds = fields.layer_types(config, default, ("full_attention", "conv"))
    conv = ShortConvSpec(fields.integer(config, "conv_L_cache"), bool(config.get("conv_bias", False)))
    return {
        "layers": tuple(LayerSpec() if kind != "conv" else LayerSpec(attends=False, mixer=conv) for kind in kinds),
        "rope": fields.rope({"rope_theta": 1e6, **config}, fields.integer(config, "max_position_embeddings")),
        "intermediate": _intermediate(config),
        "rms_eps": float(config.get("norm_eps", 1e-5)),
        "tied": bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        "qk_norm": True,
        "names": NAMES,
    }


def _intermediate(config: dict[str, Any]) -> int:
    """Two thirds of the named width, times a factor, rounded up."""
    width = config.get("block_ff_dim") or fields.integer(config, "intermediate_size")
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    multiple = config.get("block_multiple_of", 256)
    return -(-int(factor * width) // multiple) * multiple


LFM2 = Family("Lfm2ForCausalLM", "lfm2", _describe)
