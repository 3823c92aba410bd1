"""Nemotron-H: every layer is one thing, Mamba2, attention without positions, or a block of squared relus, dense or
of experts."""

from __future__ import annotations

from typing import Any

from engine.errors import InvalidRequest, Unsupported
from engine.models import config_fields as fields
from engine.models.family import Family
from engine.models.mamba2 import Mamba2Spec, check_groups
from engine.models.shape import ExpertSpec, GateSpec, LayerSpec, Names, RopeSpec

NAMES = Names(
    root="backbone",
    embedding="embeddings",
    input_norm="norm",
    block_norm="norm",
    final_norm="model.norm_f",
    q="mixer.q_proj",
    k="mixer.k_proj",
    v="mixer.v_proj",
    o="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    expert_gate="mixer.gate",
    experts="mixer.experts",
    shared_expert="mixer.shared_experts",
)
_KINDS = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "linear_attention": "mamba",
    "full_attention": "attention",
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "residual_in_fp32": (False, None),
    "sliding_window": (None,),
}


def _describe(config: dict[str, Any]) -> dict[str, Any]:
    fields.refuse_others(config, _ONLY)
    mixer, rms_eps = _mixer(config), float(config.get("layer_norm_epsilon") or config.get("rms_norm_eps") or 1e-5)
    kinds = {
        "mamba": LayerSpec(attends=False, mixer=mixer, block=False),
        "attention": LayerSpec(block=False),
        "mlp": LayerSpec(attends=False, dense=True),
        "moe": LayerSpec(attends=False),
    }
    layers, pattern = [], _pattern(config)
    for kind in pattern:
        if kind not in kinds:
            raise Unsupported(field="layers_block_type", expected=f"one of {sorted(kinds)}", actual=kind)
        layers.append(kinds[kind])
    return {
        "layers": tuple(layers),
        "rope": RopeSpec(kind="none"),
        "rms_eps": rms_eps,
        "head_dim": config.get("head_dim") or config.get("attention_head_dim") or 128,
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "activation": "relu2",
        "gated": False,
        "experts": _experts(config) if "moe" in pattern else None,
        "names": NAMES,
    }


def _pattern(config: dict[str, Any]) -> list[str]:
    """One kind a layer, from a list or (older) a letter for each."""
    given = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    if not given:
        raise InvalidRequest(field="layers_block_type", expected="one kind a layer", actual=given)
    return [_KINDS.get(str(each), str(each)) for each in given]


def _experts(config: dict[str, Any]) -> ExpertSpec:
    fields.refuse_others(config, {"moe_latent_size": (None,), "mlp_bias": (False, None)})
    gate = GateSpec(
        width=fields.integer(config, "moe_intermediate_size"),
        shared=fields.integer(config, "moe_shared_expert_intermediate_size"),
        groups=config.get("n_group", 1),
        top_groups=config.get("topk_group", 1),
        normed=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )
    count = fields.integer(config, "n_routed_experts")
    return ExpertSpec(count, fields.integer(config, "num_experts_per_tok"), gate=gate)


def _mixer(config: dict[str, Any]) -> Mamba2Spec:
    """Step sizes are bounded from below by what initialises them, as trainers compute it."""
    heads = fields.integer(config, "mamba_num_heads")
    check_groups("n_groups", config.get("n_groups"), heads)
    return Mamba2Spec(
        heads=heads,
        head_dim=fields.integer(config, "mamba_head_dim"),
        groups=fields.integer(config, "n_groups"),
        state_size=fields.integer(config, "ssm_state_size"),
        width=fields.integer(config, "conv_kernel"),
        eps=float(config.get("layer_norm_epsilon") or config.get("rms_norm_eps") or 1e-5),
        bias=bool(config.get("use_bias", False)),
        conv_bias=bool(config.get("use_conv_bias", True)),
        low=float(config.get("time_step_min", 0.001)),
        name="mixer",
    )


NEMOTRON_H = Family("NemotronHForCausalLM", "nemotron_h", _describe)
