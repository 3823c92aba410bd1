"""Every architecture: what transformers saves is what the parameters hold, loaded or updated."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from engine.errors import InvalidRequest
from engine.models.registry import build_model
from engine.models.spec import read_spec, spec_from_config
from engine.weights.digest import model_digest
from engine.weights.loader import load_weights
from engine.weights.names import NameResolver
from engine.weights.transaction import UpdateTransaction
from tests.unit.weights.tiny_weights import begin_for, named_all

SHAPE: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    pad_token_id=None,
)
MAMBA2: dict[str, Any] = dict(mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4)
NEMOTRON: dict[str, Any] = dict(
    num_hidden_layers=None,
    layers_block_type=["linear_attention", "full_attention", "mlp", "moe"],
    mamba_num_heads=4,
    mamba_head_dim=4,
    n_groups=2,
    ssm_state_size=4,
    n_routed_experts=4,
    moe_intermediate_size=8,
    moe_shared_expert_intermediate_size=12,
)
GATED_DELTA: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=12,
)
KINDS = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-biased": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen3": Qwen3Config(**SHAPE),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=8),
    "gpt-oss": GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_multiple_of=8),
    "falcon-h1": FalconH1Config(**SHAPE, **MAMBA2, mamba_rms_norm=True, mamba_d_ssm=32),
    "nemotron-h": NemotronHConfig(**(SHAPE | NEMOTRON)),
    "granite": GraniteMoeHybridConfig(**SHAPE, **MAMBA2, layer_types=["mamba", "attention"], num_local_experts=0),
    "qwen3-next": Qwen3NextConfig(**(SHAPE | GATED_DELTA), mlp_only_layers=[1]),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**(SHAPE | GATED_DELTA)),
    "qwen3-tied-biased": Qwen3Config(**SHAPE, tie_word_embeddings=True, attention_bias=True),
}

SELDOM = ("granite", "qwen3.5-moe")


def trained(kind: str, seed: int):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(KINDS[kind], dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


def engine_model(folder: Path, dtype: torch.dtype = torch.float32):
    model = build_model(read_spec(folder), dtype)
    for parameter in model.parameters():
        parameter.data.fill_(-7)
    return model


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow) if kind in ("granite", "qwen3.5-moe") else kind for kind in KINDS],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_b1_update_equals_cold_load_for_every_architecture(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    policy = trained(kind, 1)
    policy.save_pretrained(tmp_path / "single")
    policy.save_pretrained(tmp_path / "shards", max_shard_size="3KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    models = {folder: engine_model(tmp_path / folder, dtype) for folder in ("single", "shards")}
    reports = {folder: load_weights(model, tmp_path / folder) for folder, model in models.items()}
    assert reports["single"].loaded == reports["single"].expected
    assert reports["single"].digest == reports["shards"].digest == model_digest(models["shards"])
    sent = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    for seed in range(3):
        model = engine_model(tmp_path / "single", dtype)
        transaction = UpdateTransaction(model, begin_for(sent))
        tensors = named_all(sent)
        random.Random(seed).shuffle(tensors)
        for start in range(0, len(tensors), 4):
            transaction.stage(tensors[start : start + 4])
        prepared = transaction.prepare()
        transaction.apply()
        assert model_digest(model) == prepared.digest == reports["single"].digest


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_case_b9_every_single_tensor_is_needed_and_checked(tmp_path: Path, kind: str) -> None:
    policy = trained(kind, 1)
    policy.save_pretrained(tmp_path)
    sent = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    model = engine_model(tmp_path)
    before = model_digest(model)
    for name in sent:
        with pytest.raises(InvalidRequest) as error:
            UpdateTransaction(model, begin_for({other: tensor for other, tensor in sent.items() if other != name}))
        assert name in str(error.value)
        transaction = UpdateTransaction(model, begin_for(sent))
        poisoned = sent[name].clone()
        poisoned.view(-1)[-1] = float("nan")
        with pytest.raises(InvalidRequest) as error:
            transaction.stage(named_all({**sent, name: poisoned}))
        assert name in str(error.value)
        cut = [
            msgspec.structs.replace(tensor, data=tensor.data[:-1]) if tensor.name == name else tensor
            for tensor in named_all(sent)
        ]
        with pytest.raises(InvalidRequest) as error:
            transaction.stage(cut)
        assert name in str(error.value) and transaction.progress().staged == 0
    assert model_digest(model) == before


def test_a_model_that_sees_is_read_as_the_language_model_in_it():
    """Its names carry a segment more; what sees, and layers that predict further, are left out."""
    text = KINDS["qwen3.5-moe"].to_dict()
    architectures = ["Qwen3_5MoeForConditionalGeneration"]
    model = build_model(spec_from_config({"architectures": architectures, "text_config": text}), device="meta")
    names, weights = NameResolver(model.weight_map), model.weight_map
    for name in weights.placements:
        if name.startswith("model."):
            assert names.resolve(f"model.language_model.{name.removeprefix('model.')}") == name
    for name in ("mtp.layers.0.mlp.gate.weight", "model.visual.blocks.0.attn.qkv.weight"):
        found = names.resolve(name)
        assert found is not None and weights.ignores(found)
    assert names.resolve("model.layers.0.linear_attn.in_proj_x.weight") is None
