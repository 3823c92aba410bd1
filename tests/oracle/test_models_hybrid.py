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
VARIANTS = {
    "gemma2": ("gemma2", {"sliding_window": 9, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}),
    "gemma3-scaled": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 40, "tie_word_embeddings": True}),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL, "conv"], "conv_bias": True, "block_multiple_of": 16}),
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
    check_logits(harness.all_logits(row), reference_logits(reference, ids))
