"""Adapters against peft: every option of its configuration, on the model that the engine runs."""

from __future__ import annotations

import json
import math

import numpy as np
import peft
import pytest
import torch

from lora.device_pool import DevicePool
from lora.errors import UnsupportedAdapter
from lora.factors import check_weights
from lora.folder import read_folder
from lora.packing import pack
from lora.step import LoopStep
from tests.oracle.latent_models import shape
from tests.oracle.model_oracle import Harness, engine_copy, random_ids, reference_logits, tiny_reference
from tests.oracle.test_models_hybrid import EXPERTS, FACTORS, GRANITE, LINEAR, MAMBA2, NEMOTRON

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MATRIX = {
    "one projection": {"target_modules": ["q_proj"]},
    "a subset of packed ones": {"target_modules": ["k_proj", "up_proj"]},
    "the other halves": {"target_modules": ["q_proj", "v_proj", "gate_proj"]},
    "row-parallel": {"target_modules": ["o_proj", "down_proj"]},
    "all by name": {"target_modules": ALL},
    "all-linear": {"target_modules": "all-linear"},
    "regular expression": {"target_modules": r".*layers\.[02]\.(self_attn\.v_proj|mlp\..*_proj)"},
    "excluded names": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "layers.1.mlp.up_proj"]},
    "excluded expression": {"target_modules": ALL, "exclude_modules": r".*\.1\..*"},
    "one layer": {"target_modules": ALL, "layers_to_transform": 1},
    "some layers": {"target_modules": ["v_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "alpha is rank": {"target_modules": ALL, "r": 4, "lora_alpha": 4},
    "rank 1": {"target_modules": ALL, "r": 1, "lora_alpha": 16},
    "rank 64": {"target_modules": ALL, "r": 64, "lora_alpha": 16},
    "rank stabilised": {"target_modules": ALL, "r": 12, "lora_alpha": 6, "use_rslora": True},
    "patterns": {
        "target_modules": "all-linear", "rank_pattern": {"v_proj": 3, r"layers\.1\.mlp\.down_proj": 17},
        "alpha_pattern": {"q_proj": 1, r"model.layers.2.mlp.(gate|up)_proj": 40},
    },
    "patterns, rank stabilised": {
        "target_modules": ALL, "use_rslora": True, "rank_pattern": {"up_proj": 2, "k_proj": 9},
        "alpha_pattern": {"up_proj": 5},
    },
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "head": {"target_modules": ["lm_head", "v_proj"]},
    "embedding and head": {"target_modules": ["lm_head", "embed_tokens"], "rank_pattern": {"lm_head": 3}},
    "bias": {"target_modules": ALL, "lora_bias": True},
    "bias at a full rank": {"target_modules": ["q_proj", "down_proj", "lm_head"], "lora_bias": True, "r": 8},
    "trained with dropout": {"target_modules": ALL, "lora_dropout": 0.5},
    "other starts": {"target_modules": ALL, "init_lora_weights": "gaussian"},
}  # fmt: skip

ENDS = ("all-linear", "embedding", "head", "embedding and head", "bias at a full rank")
"""What a tied embedding may change."""
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj"]
SECOND = {
    "qwen3": ("qwen3", {}, {"target_modules": "all-linear"}),
    "qwen3 ends": ("qwen3", {}, {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_rslora": True}),
    "gemma3": ("gemma3_text", WINDOWS, {"target_modules": ["embed_tokens", *ALL]}),
    "lfm2": ("lfm2", CONVOLUTIONS, {"target_modules": "all-linear"}),
    "deepseek": (*shape("v3-plain-queries"), {"target_modules": ["q_proj", "kv_b_proj"], "lora_bias": True}),
    "glm": (*shape("glm-16"), {"target_modules": LATENT}),
    "gpt-oss": ("gpt_oss", WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2}, {"target_modules": ALL[:4]}),
    "falcon-h1": ("falcon_h1", MAMBA2 | FACTORS, {"target_modules": ["embed_tokens", "lm_head", "in_proj", *ALL]}),
    "nemotron-h": ("nemotron_h", NEMOTRON, {"target_modules": ["embeddings", "in_proj", *ALL[:4], *ALL[5:]]}),
    "granite": ("granitemoehybrid", MAMBA2 | GRANITE, {"target_modules": ["out_proj", "input_linear", "q_proj"]}),
    "qwen3-next": ("qwen3_next", LINEAR | EXPERTS, {"target_modules": ["in_proj_qkvz", "in_proj_ba", "q_proj"]}),
    "qwen3.5": ("qwen3_5_text", LINEAR, {"target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_b", *ALL]}),
}
QUICK = ("qwen3", "qwen3 ends", "gemma3", "lfm2", "glm", "gpt-oss")


def adapt(reference, options, seed: int = 1):
    """The peft model with random factors of a size that shows."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(**({"r": 8, "lora_alpha": 16} | options))
    model = peft.get_peft_model(reference, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3 / math.sqrt(parameter.shape[-1]))
    return model


def load(engine_model, folder, same_base=None):
    """(pool with the folder's adapter in slot 1, its packed form)."""
    config, tensors = read_folder(folder)
    where = engine_model.adapter_sites
    weights = check_weights(config, tensors, where, 256, same_base or same_as(engine_model))
    packed = pack(weights, where, torch.float32)
    pool = DevicePool(where, torch.float32, torch.device("cpu"), packed.num_bytes + 512, 1)
    assert pool.load(packed) == 1
    return pool


def same_as(model):
    def same(module: str, tensor: torch.Tensor) -> bool:
        head = model.model.embed_tokens if model.lm_head is None else model.lm_head
        weight = {"lm_head": head, "model.embed_tokens": model.model.embed_tokens}[module].weight
        return weight.shape == tensor.shape and torch.equal(weight, tensor.to(weight.dtype))

    return same


def adapted_logits(engine_model, pool, ids, slot: int = 1) -> torch.Tensor:
    harness = Harness(engine_model, backend="auto")
    batch = harness.batch([], [(harness.row(ids), len(ids))])
    batch.adapters = LoopStep(pool, np.full(len(ids), slot))
    batch.logit_adapters = batch.adapters.rows(np.arange(len(ids)))
    return harness.runner.forward(batch)


@pytest.mark.parametrize("options", MATRIX.values(), ids=MATRIX)
def test_logits_equal_peft(options, tmp_path):
    check(tiny_reference("llama"), options, tmp_path)


@pytest.mark.parametrize(
    "name", [name if name in ENDS else pytest.param(name, marks=pytest.mark.slow) for name in MATRIX]
)
def test_logits_of_a_tied_model_equal_peft(name, tmp_path):
    check(tiny_reference("llama", tie_word_embeddings=True), MATRIX[name], tmp_path)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SECOND]
)
def test_another_architecture(name, tmp_path):
    kind, overrides, adapter = SECOND[name]
    check(tiny_reference(kind, **overrides), adapter, tmp_path, 1e-3 if "linear_num_key_heads" in overrides else 1e-5)


def check(reference, options, folder, tolerance: float = 1e-5) -> None:
    engine_model, ids = engine_copy(reference), random_ids(13, 5)
    plain = reference_logits(reference, ids)
    model = adapt(reference, options)
    model.save_pretrained(folder)
    expected = reference_logits(model, ids)
    pool = load(engine_model, folder)
    actual = adapted_logits(engine_model, pool, ids)
    assert (expected - plain).abs().max() > 0.01, "the adapter changes something"
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=1e-5)
    assert torch.equal(adapted_logits(engine_model, pool, ids, slot=0), adapted_base(engine_model, ids))


def adapted_base(engine_model, ids) -> torch.Tensor:
    harness = Harness(engine_model, backend="auto")
    return harness.runner.forward(harness.batch([], [(harness.row(ids), len(ids))]))


def test_tensors_of_a_live_model_equal_its_folder(tmp_path):
    """A trainer's own state dict, with the adapter's name still in it."""
    reference = tiny_reference("llama")
    engine_model = engine_copy(reference)
    model = adapt(reference, MATRIX["patterns"])
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    live = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    assert any(".default." in name for name in live)
    where = engine_model.adapter_sites
    saved = check_weights(*read_folder(tmp_path), where, 256, same_as(engine_model))
    assert check_weights(config, live, where, 256, same_as(engine_model)).digest == saved.digest


def test_case_e2_merged_by_hand():
    """alpha / r = 2 exactly: logits of W + 2 B A."""
    reference = tiny_reference("llama")
    ids = random_ids(9, 3)
    model = adapt(reference, {"target_modules": ALL, "r": 4, "lora_alpha": 8})
    merged = model.merge_and_unload()
    expected = reference_logits(merged, ids)
    fresh = tiny_reference("llama")
    again = adapt(fresh, {"target_modules": ALL, "r": 4, "lora_alpha": 8})
    plain = engine_copy(tiny_reference("llama"))
    config = {"r": 4, "lora_alpha": 8}
    tensors = {name: value for name, value in again.state_dict().items() if "lora_" in name}
    weights = check_weights(config, tensors, plain.adapter_sites, 64, lambda module, tensor: False)
    assert {factors.scale for factors in weights.modules.values()} == {2.0}
    packed = pack(weights, plain.adapter_sites, torch.float32)
    pool = DevicePool(plain.adapter_sites, torch.float32, torch.device("cpu"), packed.num_bytes, 1)
    assert pool.load(packed) == 1
    torch.testing.assert_close(adapted_logits(plain, pool, ids), expected, atol=1e-4, rtol=0)


REFUSED = {
    "use_dora": {"target_modules": ALL, "use_dora": True},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trainable_token_indices": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    "target_parameters": {"target_modules": ["q_proj"], "target_parameters": ["mlp.down_proj.weight"]},
    "bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "alora_invocation_tokens": {"target_modules": ["q_proj"], "alora_invocation_tokens": [3]},
    "init_lora_weights": {"target_modules": ["q_proj"], "init_lora_weights": "pissa"},
    "layer_replication": {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 3]]},
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_computed_is_refused_by_its_field(field, tmp_path):
    reference = tiny_reference("llama")
    engine_model = engine_copy(reference)
    model = peft.get_peft_model(reference, peft.LoraConfig(**({"r": 4, "task_type": "CAUSAL_LM"} | REFUSED[field])))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedAdapter) as caught:
        load(engine_model, tmp_path)
    assert caught.value.field == field


def test_an_embedding_that_was_trained_is_refused(tmp_path):
    """peft saves targeted embeddings whole: an unchanged copy is fine, another weight is not."""
    reference = tiny_reference("llama")
    engine_model = engine_copy(reference)
    model = adapt(reference, MATRIX["embedding"])
    with torch.no_grad():
        model.base_model.model.model.embed_tokens.base_layer.weight[3, 3] += 1
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedAdapter, match=r"modules_to_save.*base_layer"):
        load(engine_model, tmp_path)
