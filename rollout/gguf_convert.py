"""A GGUF file as a Hugging Face folder.

Owns the conversion of weights and configuration: names, dequantisation, row order. Ignores where files
come from and go to (`rollout.model_catalog`) and how texts become tokens (`rollout.gguf_tokenizer`).

Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig

from engine.errors import NotFound, Unsupported
from rollout.gguf_tokenizer import SPECIAL, write_tokenizer

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
_GEMMA_NAMES = _NAMES | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    """`values` takes a tensor's stem, its values and the file's fields, and gives them as checkpoints have
    them; `config` makes a configuration of the fields and what all families share."""

    names: dict[str, str]
    values: Callable[[str, np.ndarray, Fields], np.ndarray]
    config: Callable[[Fields, dict[str, Any]], PreTrainedConfig]


def convert_gguf(source: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write `source` into `folder` as bfloat16 safetensors, config, tokenizer and chat template.

    `progress` is told (tensors done, tensors in all).
    """
    gguf = _import_gguf()
    reader = _reader(gguf, source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    family = _FAMILIES.get(fields["general.architecture"])
    if family is None:
        raise Unsupported(
            field=source.name, expected=f"a model of {sorted(_FAMILIES)}", actual=fields["general.architecture"]
        )
    write_tokenizer(fields, folder)
    tensors: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name, values = _place(family, tensor.name, values, fields)
        tensors[name] = torch.from_numpy(np.array(values, np.float32)).to(torch.bfloat16)
        progress(done, len(reader.tensors))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    _write_config(family, fields, folder, tied="lm_head.weight" not in tensors)


def _place(family: _Family, name: str, values: np.ndarray, fields: Fields) -> tuple[str, np.ndarray]:
    """The checkpoint's name for a GGUF tensor, and its values as the checkpoint has them."""
    stem, _, kind = name.rpartition(".")
    layer = ""
    if stem.startswith("blk."):
        _, index, stem = stem.split(".", 2)
        layer = f"model.layers.{index}."
    if stem not in family.names:
        raise Unsupported(field="tensor", expected=f"one of {sorted(family.names)}", actual=name)
    return f"{layer}{family.names[stem]}.{kind}", family.values(stem, values, fields)


def _write_config(family: _Family, fields: Fields, folder: Path, tied: bool) -> None:
    ids = {key: fields.get(f"tokenizer.ggml.{name}_token_id") for key, name in SPECIAL.items() if key != "unk_token"}
    ids = {f"{key}_id": value for key, value in ids.items() if value is not None}
    kind = fields["general.architecture"]
    shared = dict(
        hidden_size=fields[f"{kind}.embedding_length"],
        intermediate_size=fields[f"{kind}.feed_forward_length"],
        num_hidden_layers=fields[f"{kind}.block_count"],
        num_attention_heads=fields[f"{kind}.attention.head_count"],
        num_key_value_heads=fields[f"{kind}.attention.head_count_kv"],
        max_position_embeddings=fields[f"{kind}.context_length"],
        rms_norm_eps=_shortest(fields[f"{kind}.attention.layer_norm_rms_epsilon"]),
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        tie_word_embeddings=tied,
        dtype="bfloat16",
        **ids,
    )
    family.config(fields, shared).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


def _llama_values(stem: str, values: np.ndarray, fields: Fields) -> np.ndarray:
    """GGUF interleaves the two halves of each rotary head, row by row; checkpoints keep them apart."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    if stem not in heads:
        return values
    return values.reshape(heads[stem], len(values) // heads[stem] // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def _llama_config(fields: Fields, shared: dict[str, Any]) -> PreTrainedConfig:
    rope = {"rope_type": "default", "rope_theta": _shortest(fields["llama.rope.freq_base"])}
    return LlamaConfig(architectures=["LlamaForCausalLM"], rope_parameters=rope, **shared)


def _gemma3_values(stem: str, values: np.ndarray, fields: Fields) -> np.ndarray:
    """GGUF has norms' factors whole; checkpoints have them less one."""
    return values - 1 if stem.endswith("norm") else values


def _gemma3_config(fields: Fields, shared: dict[str, Any]) -> PreTrainedConfig:
    """What the format does not say is the same in all sizes with one key head to a query's scale."""
    head_dim = fields["gemma3.attention.key_length"]
    bases = {"full_attention": _shortest(fields["gemma3.rope.freq_base"]), "sliding_attention": 10000.0}
    return Gemma3TextConfig(
        architectures=["Gemma3ForCausalLM"],
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=fields["gemma3.attention.sliding_window"],
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        **shared,
    )


_FAMILIES = {
    "llama": _Family(_NAMES, _llama_values, _llama_config),
    "gemma3": _Family(_GEMMA_NAMES, _gemma3_values, _gemma3_config),
}


def _shortest(value: float) -> float:
    """The decimal that a float32 from the file stands for."""
    return float(str(np.float32(value)))


def _reader(gguf: Any, source: Path) -> Any:
    """Reads from a plain array: a vocabulary is half a million slices, and those of `np.memmap` are slow."""

    class PlainReader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = np.asarray(mapped)

    return PlainReader(source)


def _import_gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise NotFound("reading this model needs the package gguf: pip install gguf") from error
    return gguf
