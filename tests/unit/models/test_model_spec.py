"""Reading configurations: both spellings of rope, end ids, and refusals by name."""

from __future__ import annotations

import json

import pytest
import torch

from engine.errors import InvalidRequest, SparkrollError, Unsupported
from engine.models.registry import build_model
from engine.models.spec import read_spec, spec_from_config
from engine.models.weight_map import decoder_weight_map

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def test_defaults_follow_the_published_ones() -> None:
    spec = spec_from_config(BASE)
    assert (spec.head_dim, spec.dtype, spec.rope.theta, spec.tied) == (8, torch.bfloat16, 10000.0, False)
    assert spec_from_config({**BASE, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128
    mha = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert spec_from_config(mha).num_kv_heads == 4


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    old = spec_from_config({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}})
    new = spec_from_config({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}})
    assert old.rope == new.rope
    assert (new.rope.kind, new.rope.factor, new.rope.original_context) == ("llama3", 8.0, 32)
    assert spec_from_config({**BASE, "rope_scaling": None, "rope_theta": 7.0}).rope.theta == 7.0


def test_case_d5_end_ids_come_from_both_files(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": [7, 9]}))
    assert read_spec(tmp_path).eos_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11]}))
    assert read_spec(tmp_path).eos_ids == (7, 9, 11)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": None}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert read_spec(tmp_path).eos_ids == (5,)


@pytest.mark.parametrize(
    ("change", "error", "field"),
    [
        ({"architectures": ["MambaForCausalLM"]}, Unsupported, "architectures"),
        ({"architectures": None, "model_type": "gpt2"}, Unsupported, "architectures"),
        ({"hidden_act": "gelu"}, Unsupported, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, Unsupported, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, Unsupported, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, InvalidRequest, "rope_parameters.factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, Unsupported, "rope_parameters"),
        ({"layer_types": ["full_attention", "linear_attention"]}, Unsupported, "layer_types"),
        ({"layer_types": ["full_attention"]}, InvalidRequest, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, InvalidRequest, "sliding_window"),
        ({"num_key_value_heads": 3}, InvalidRequest, "num_key_value_heads"),
        ({"hidden_size": "32"}, InvalidRequest, "hidden_size"),
        ({"num_hidden_layers": 0}, InvalidRequest, "num_hidden_layers"),
        ({"torch_dtype": "float8_e4m3fn"}, Unsupported, "dtype"),
    ],
)
def test_what_is_not_built_is_refused_by_name(change, error: type[SparkrollError], field: str) -> None:
    with pytest.raises(error) as caught:
        spec_from_config({**BASE, **change})
    assert caught.value.field == field
    assert caught.value.expected is not None


def test_gemma3_reads_old_and_new_spellings_alike() -> None:
    base = {
        **BASE,
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 3,
        "sliding_window": 9,
        "hidden_size": 64,
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    old = spec_from_config({**base, "sliding_window_pattern": 3, "rope_theta": 1e6, "rope_local_base_freq": 5e3})
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"}}
    new = spec_from_config({**base, "layer_types": kinds, "rope_parameters": ropes})
    assert old == new
    assert [layer.window for layer in new.layers] == [9, 9, None]
    assert [(layer.rope or new.rope).theta for layer in new.layers] == [5e3, 5e3, 1e6]
    assert (new.embed_scale, new.query_scale, new.activation, new.uniform) == (8.0, 1 / 16, "gelu_tanh", False)
    for change in (
        {"attn_logit_softcapping": 50.0},
        {"hidden_activation": "silu"},
        {"use_bidirectional_attention": True},
    ):
        with pytest.raises(Unsupported, match=next(iter(change))):
            spec_from_config({**base, **change})


def test_nemotron_h_is_read_as_published() -> None:
    """Letters for layers, and the widths of its 8B model."""
    config = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-",
        "attention_head_dim": 128,
        "time_step_limit": [0.0, float("inf")],
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
    }
    sizes = {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    config = {**BASE, **config, **sizes, "architectures": None, "num_hidden_layers": 9}
    spec = spec_from_config(config)
    parts = [(layer.mixer is not None, layer.attends, layer.block) for layer in spec.layers]
    assert all(sum(part) == 1 for part in parts)
    assert "".join("M*-"[part.index(True)] for part in parts) == config["hybrid_override_pattern"]
    mixer = spec.layers[0].mixer
    assert mixer is not None and mixer.inputs(4096) == {"in_proj": 18560} and mixer.output(4096) == ("out_proj", 8192)
    assert spec.state_layout(torch.bfloat16).slot_bytes == 4 * (3 * 10240 * 2 + 128 * 64 * 128 * 4)
    aliases = decoder_weight_map(spec).aliases
    assert aliases["backbone.layers.7.mixer.q_proj.weight"] == "model.layers.7.mixer.q_proj.weight"
    for change, field in (
        ({"hybrid_override_pattern": "M-M-M-MX-"}, "layers_block_type"),
        ({"hybrid_override_pattern": None}, "layers_block_type"),
        ({"n_groups": 3}, "n_groups"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
    ):
        with pytest.raises(SparkrollError, match=field):
            spec_from_config({**config, **change})


def test_unreadable_folders_are_typed_errors(tmp_path) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidRequest, match="JSON object"):
        read_spec(tmp_path)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_the_weight_map_covers_every_parameter_row_once(architecture: str, tied: bool, bias: bool) -> None:
    config = {**BASE, "architectures": [architecture], "tie_word_embeddings": tied, "attention_bias": bias}
    model = build_model(spec_from_config({**config, "mlp_bias": bias}))
    covered = {name: torch.zeros(parameter.shape[0]) for name, parameter in model.named_parameters()}
    for placement in model.weight_map.placements.values():
        covered[placement.param][placement.row_start : placement.row_start + placement.num_rows] += 1
    assert all(bool((rows == 1).all()) for rows in covered.values())
    assert ("lm_head.weight" in model.weight_map.aliases) == tied
