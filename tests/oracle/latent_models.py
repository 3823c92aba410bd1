"""Tiny models of latent attention: their shapes, and corrections that are not zero.

Owns what both the forward passes' and the served models' oracles build. Ignores how they are run.
"""

from __future__ import annotations

from typing import Any

import torch

MOE = dict(
    moe_intermediate_size=24,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    num_hidden_layers=3,
)
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    head_dim=8,
    attn_implementation="eager",
)
SHARED = ["full", "shared", "full"]


def index(heads: int, top_k: int = 12) -> dict[str, Any]:
    return dict(index_topk=top_k, index_n_heads=heads, index_head_dim=16)


def yarn(**fields: float) -> dict[str, Any]:
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, **fields)
    return dict(rope_parameters=rope)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3": ("deepseek_v3", {}),
    "v3-yarn": (
        "deepseek_v3",
        yarn(mscale=1.0, mscale_all_dim=0.8) | dict(attention_bias=True, n_group=1, topk_group=1),
    ),
    "v3-plain-queries": ("deepseek_v3", dict(q_lora_rank=None, rope_interleave=False, norm_topk_prob=False)),
    "v32-4": ("deepseek_v32", index(4)),
    "v32-16": ("deepseek_v32", index(16)),
    "v32-64": ("deepseek_v32", index(64)),
    "glm-4": ("glm_moe_dsa", index(4)),
    "glm-16": ("glm_moe_dsa", index(16) | dict(indexer_types=SHARED)),
    "glm-64": ("glm_moe_dsa", index(64) | dict(indexer_types=SHARED)),
    "glm-all": ("glm_moe_dsa", index(4, top_k=64) | dict(indexer_types=SHARED)),
}


def shape(kind: str) -> tuple[str, dict[str, Any]]:
    """The model type and what it overrides."""
    model_type, overrides = KINDS[kind]
    return model_type, MOE | LATENT | overrides


@torch.no_grad()
def correct_gates(model: torch.nn.Module) -> None:
    """Corrections start at zero, where choosing by uncorrected scores would pass."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.2)
