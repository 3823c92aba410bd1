"""Models of several layer kinds against transformers: forward passes through pages and chunks."""

from __future__ import annotations

import pytest

from tests.oracle.model_oracle import (
    Harness,
    check_logits,
    engine_copy,
    random_ids,
    reference_logits,
    tiny_reference,
)

SLIDING, FULL = "sliding_attention", "full_attention"
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_head": 16}
FACTORS = {
    "mamba_d_ssm": 64,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
    "mlp_multipliers": [1.4, 0.7],
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
NEMOTRON = {
    "layers_block_type": ["linear_attention", "mlp", FULL, "mlp", "linear_attention"],
    "num_hidden_layers": None,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "time_step_min": 0.2,
}
EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", FULL, "mlp"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
GRANITE = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "mamba_expand": 1,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "position_embedding_type": "rope",
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
LINEAR = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
VARIANTS = {
    "gemma2": ("gemma2", {"sliding_window": 9, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}),
    "gemma3-scaled": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 40, "tie_word_embeddings": True}),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL, "conv"], "conv_bias": True, "block_multiple_of": 16}),
    "falcon-h1": ("falcon_h1", MAMBA2 | FACTORS),
    "falcon-h1-normed": ("falcon_h1", MAMBA2 | {"mamba_d_ssm": 64, "mamba_rms_norm": True, "mlp_bias": True}),
    "nemotron-h": ("nemotron_h", NEMOTRON),
    "nemotron-h-experts": ("nemotron_h", NEMOTRON | EXPERTS),
    "bamba": ("bamba", MAMBA2 | {"mamba_expand": 1, "attn_layer_indices": [1]}),
    "granite": ("granitemoehybrid", MAMBA2 | GRANITE),
    "qwen3-next": ("qwen3_next", LINEAR | EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3.5": ("qwen3_5_text", LINEAR),
    "qwen3.5-moe": ("qwen3_5_moe_text", LINEAR | EXPERTS),
    "gpt-oss": ("gpt_oss", {"sliding_window": 9, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "gpt-oss-clamped": ("gpt_oss", {"sliding_window": 16, "num_local_experts": 4, "swiglu_limit": 0.3}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_transformers(variant: str) -> None:
    """A prompt longer than the windows in chunks that end inside them, then single tokens."""
    model_type, overrides = VARIANTS[variant]
    reference = tiny_reference(model_type, attn_implementation="eager", **overrides)
    harness = Harness(engine_copy(reference), backend="auto")
    ids = random_ids(50, seed=1)
    row = harness.row(ids[:40])
    harness.prefill(row, chunk=13)
    for token in ids[40:]:
        row.ids.append(token)
        harness.step([row], [])
    tolerance = 1e-3 if "linear_num_key_heads" in overrides else 1e-4
    check_logits(harness.all_logits(row), reference_logits(reference, ids), tolerance)
