"""A llama-type GGUF file as a Hugging Face folder.

Owns the conversion: names, dequantisation, row order, configuration and tokenizer. Ignores where
files come from and go to (`rollout.model_catalog`).

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine.errors import NotFound, Unsupported

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4


def convert_gguf(source: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write `source` into `folder` as bfloat16 safetensors, config, tokenizer and chat template.

    `progress` is told (tensors done, tensors in all).
    """
    gguf = _import_gguf()
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture, tokenizer = fields["general.architecture"], fields["tokenizer.ggml.model"]
    if (architecture, tokenizer) != ("llama", "gpt2"):
        raise Unsupported(
            field=source.name, expected="a llama model with a gpt2 tokenizer", actual=(architecture, tokenizer)
        )
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, values = _place(tensor.name, values, fields)
        tensors[name] = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
        progress(done, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_config(fields, folder, tied="lm_head.weight" not in tensors)
    _write_tokenizer(fields, folder)


def _place(name: str, values: np.ndarray, fields: dict[str, Any]) -> tuple[str, np.ndarray]:
    """The checkpoint's name for a GGUF tensor, and its rows in the checkpoint's order.

    GGUF interleaves the two halves of each rotary head, row by row; checkpoints keep them apart.
    """
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, index, stem = stem.split(".", 2)
        layer = f"model.layers.{index}."
    if stem not in _NAMES:
        raise Unsupported(field="tensor", expected=f"one of {sorted(_NAMES)}", actual=name)
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}.get(
        stem
    )
    if heads is not None:
        rows = values.shape[0]
        values = values.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    return f"{layer}{_NAMES[stem]}.{kind}", values


def _write_config(fields: dict[str, Any], folder: Path, tied: bool) -> None:
    ids = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in _SPECIAL.items() if key != "unk_token"}
    ids = {f"{key}_id": value for key, value in ids.items() if value is not None}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=_shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": _shortest(fields["llama.rope.freq_base"])},
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **ids,
    )
    config.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    single_digits = [Digits(individual_digits=True)] if fields.get("tokenizer.ggml.pre") == "smollm" else []
    tokenizer.pre_tokenizer = PreTokenizers([*single_digits, ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [AddedToken(tokens[i], special=special, normalized=False) for i, k in enumerate(kinds) if k == kind]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    ids = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in _SPECIAL.items()}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{key: tokens[index] for key, index in ids.items() if index is not None},
    )
    wrapped.chat_template = fields.get("tokenizer.chat_template")
    wrapped.save_pretrained(folder)


def _shortest(value: float) -> float:
    """The decimal that a float32 from the file stands for."""
    return float(str(np.float32(value)))


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise NotFound("reading this model needs the package gguf: pip install gguf") from error
    return gguf
