"""Qwen3-Next: gated delta nets in three layers of four, gated attention in the fourth, experts with a shared one."""

from __future__ import annotations

from typing import Any

from engine.errors import InvalidRequest
from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.mixers import GatedDeltaSpec
from engine.models.shape import ExpertSpec, GateSpec, LayerSpec, Names

NAMES = Names(expert_gate="mlp.gate", shared_expert="mlp.shared_expert", ignored=("mtp.", "model.visual."))
OWN_FIELDS = frozenset({"partial_rotary_factor"})
KINDS = ("linear_attention", "full_attention")


def common(config: dict[str, Any], grouped: bool) -> dict[str, Any]:
    """What Qwen3-Next and Qwen3.5 share: all but what their blocks are and how checkpoints order the products of
    a gated delta net."""
    count, every = fields.integer(config, "num_hidden_layers"), config.get("full_attention_interval") or 4
    default = [KINDS[(index + 1) % every == 0] for index in range(count)]
    mixer = gated_delta(config, grouped)
    kinds = fields.layer_types(config, default, KINDS)
    return {
        "layers": tuple(LayerSpec() if kind == KINDS[1] else LayerSpec(attends=False, mixer=mixer) for kind in kinds),
        "rope": fields.rope(config, fields.integer(config, "max_position_embeddings"), part=0.25),
        "head_dim": config.get("head_dim") or 256,
        "qk_norm": True,
        "unit_norms": True,
        "attention_gate": True,
        "names": NAMES,
    }


def gated_delta(config: dict[str, Any], grouped: bool) -> GatedDeltaSpec:
    key_heads, value_heads = (fields.integer(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise InvalidRequest(
            field="linear_num_value_heads", expected=f"a multiple of {key_heads} key heads", actual=value_heads
        )
    return GatedDeltaSpec(
        key_heads,
        value_heads,
        fields.integer(config, "linear_key_head_dim"),
        fields.integer(config, "linear_value_head_dim"),
        fields.integer(config, "linear_conv_kernel_dim"),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        grouped=grouped,
    )


def experts(config: dict[str, Any], normed: bool) -> ExpertSpec:
    gate = GateSpec(
        width=fields.integer(config, "moe_intermediate_size"),
        shared=fields.integer(config, "shared_expert_intermediate_size"),
        normed=normed,
        softmax=True,
        weighed=True,
    )
    return ExpertSpec(fields.integer(config, "num_experts"), fields.integer(config, "num_experts_per_tok"), gate=gate)


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    found = common(config, grouped=True)
    if not config.get("num_experts"):
        return found
    step, plain = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    dense = [index in plain or (index + 1) % step != 0 for index in range(len(found["layers"]))]
    layers = (
        LayerSpec(layer.attends, layer.mixer, dense=is_dense)
        for layer, is_dense in zip(found["layers"], dense, strict=True)
    )
    return found | {"layers": tuple(layers), "experts": experts(config, bool(config.get("norm_topk_prob", True)))}


QWEN3_NEXT = Family("Qwen3NextForCausalLM", "qwen3_next", _describe, OWN_FIELDS)
