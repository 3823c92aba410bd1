"""Latent models: configurations as published, refusals by name, and both spellings of experts."""

from __future__ import annotations

import json

import pytest
import torch

from engine.errors import InvalidRequest, SparkrollError, Unsupported
from engine.models.registry import build_model
from engine.models.spec import spec_from_config
from engine.types import TensorSpec, UpdateBegin
from engine.weights.transaction import UpdateTransaction
from tests.oracle.latent_models import shape

COMMON = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=64)
DEEPSEEK = json.loads("""{"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168,
 "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
 "max_position_embeddings": 163840, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
 "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8,
 "topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
 "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": true,
 "num_nextn_predict_layers": 1, "rope_theta": 10000, "torch_dtype": "bfloat16", "rope_scaling": {"type": "yarn",
 "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
 "original_max_position_embeddings": 4096}}""")
GLM = DEEPSEEK | dict(
    architectures=["GlmMoeDsaForCausalLM"], num_hidden_layers=78, rope_scaling=None, index_n_heads=32,
    index_head_dim=128, index_topk=2048, index_topk_freq=4, index_skip_topk_offset=3, n_group=1, topk_group=1,
)  # fmt: skip


def tiny(kind: str, **changes):
    model_type, fields = shape(kind)
    return {"model_type": model_type, **COMMON, **fields, **changes}


def test_published_shapes() -> None:
    spec = spec_from_config(DEEPSEEK)
    assert spec.query_scale == pytest.approx(192**-0.5 * (0.1 * 3.6888794541139363 + 1) ** 2)
    assert spec.token_numbers == 61 * 576 and [layer.dense for layer in spec.layers].count(True) == 3
    glm = spec_from_config(GLM)
    owners = sum(layer.index == "own" for layer in glm.layers)
    assert glm.token_numbers == 78 * 576 + owners * 128 and owners == 21, "one in four layers, and the first ones"
    names = build_model(spec_from_config(tiny("glm-16", num_nextn_predict_layers=1)), device="meta").weight_map
    assert "model.layers.3.self_attn.indexer.wk.weight" in names.ignored
    assert {"model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight"} <= names.ignored


@pytest.mark.parametrize("kind", ["v32-4", "glm-4"])
def test_layers_are_read_by_their_old_and_new_name(kind: str) -> None:
    named = [
        spec_from_config(tiny(kind, layer_types=[f"{name}_attention"] * 3)) for name in ("indexed", "deepseek_sparse")
    ]
    assert named[0] == named[1] == spec_from_config(tiny(kind))


@pytest.mark.parametrize(
    ("kind", "change", "error", "field"),
    [
        ("v3", {"n_group": 3}, InvalidRequest, "n_group"),
        ("v3", {"topk_group": 5}, InvalidRequest, "topk_group"),
        ("v3", {"num_experts_per_tok": 5}, InvalidRequest, "num_experts_per_tok"),
        ("v3", {"scoring_func": "softmax"}, Unsupported, "scoring_func"),
        ("v3", {"kv_lora_rank": None}, InvalidRequest, "kv_lora_rank"),
        ("v3", {"mlp_layer_types": ["dense"]}, InvalidRequest, "mlp_layer_types"),
        ("v32-4", {"q_lora_rank": None}, Unsupported, "q_lora_rank"),
        ("v32-4", {"index_head_dim": 4}, InvalidRequest, "index_head_dim"),
        ("v32-4", {"layer_types": ["full_attention"] * 3}, Unsupported, "layer_types"),
        ("glm-4", {"indexer_types": ["shared", "full", "full"]}, InvalidRequest, "indexer_types"),
        ("glm-4", {"indexer_types": None, "index_topk_pattern": "FXF"}, InvalidRequest, "indexer_types"),
    ],
)
def test_what_cannot_be_is_refused_by_name(kind, change, error: type[SparkrollError], field: str) -> None:
    with pytest.raises(error) as caught:
        spec_from_config(tiny(kind, **change))
    assert caught.value.field == field


def test_experts_come_one_by_one_or_as_one_tensor() -> None:
    """Either spelling gives the same parameters; both at once, or a part of one, is refused with names."""
    spec = spec_from_config(tiny("v3"))
    model = build_model(spec)
    tensors = {name: torch.randn(place.shape) for name, place in model.weight_map.placements.items()}
    packed = dict(tensors)
    for name, group in model.weight_map.packed.items():
        packed[name] = torch.cat([packed.pop(part) for part in group.names]).view(group.shape)

    def staged(values: dict[str, torch.Tensor]) -> str:
        manifest = [TensorSpec(name=name, dtype="F32", shape=list(value.shape)) for name, value in values.items()]
        transaction = UpdateTransaction(model, UpdateBegin(txn="t", base_version=0, new_version=1, manifest=manifest))
        transaction.stage_live(values)
        return transaction.prepare().digest

    assert staged(packed) == staged(tensors)
    some = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(InvalidRequest, match=r"gate_up_proj and .*experts\.3\.up_proj"):
        staged(packed | {some: tensors[some]})
    with pytest.raises(InvalidRequest, match=r"absent.*experts\.3\.up_proj"):
        staged({name: value for name, value in tensors.items() if name != some})
