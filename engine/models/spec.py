"""What a model is, read from a Hugging Face `config.json`.

Owns the translation of configurations into one value, and the refusal by name of everything that
would change arithmetic and is not built. Ignores weights and tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engine.errors import InvalidRequest, Unsupported

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's token mixing. `window` counts the current token; `sink` adds one learned logit
    per head; `softcap` bounds scores by tanh; `bias` is the extent in tokens of a bias by
    distance, zero beyond it."""

    kind: Literal["full"] = "full"
    window: int | None = None
    sink: bool = False
    softcap: float | None = None
    bias: int | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and not self.sink and self.softcap is None and self.bias is None


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding; the fields past `theta` are those of the kinds that use them."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape. `context_len` is the longest sequence it may hold."""

    architecture: str
    vocab_size: int
    context_len: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    tied: bool
    eos_ids: tuple[int, ...]
    dtype: torch.dtype
    rms_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: RopeSpec = RopeSpec()


def read_spec(folder: str | Path) -> ModelSpec:
    """The spec of a model folder: `config.json`, and end ids from `generation_config.json` too."""
    folder = Path(folder)
    config = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    return spec_from_config(config, _read_json(generation_file) if generation_file.exists() else None)


def spec_from_config(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    """Raises `Unsupported` or `InvalidRequest`, naming the field, where the model cannot be served exactly."""
    architecture = _architecture(config)
    _refuse(config)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    num_layers = _integer(config, "num_hidden_layers")
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise InvalidRequest(field="num_key_value_heads", expected=f"a divisor of {heads} heads", actual=kv_heads)
    qwen = architecture == "Qwen3ForCausalLM"
    head_dim = config.get("head_dim") or (128 if qwen else hidden // heads)
    context_len = _integer(config, "max_position_embeddings")
    return ModelSpec(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        context_len=context_len,
        hidden=hidden,
        intermediate=_integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_layers(config, num_layers),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(config, generation or {}),
        dtype=_dtype(config),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)) and not qwen,
        qk_norm=qwen,
        rope=_rope(config, context_len),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(field=str(path), expected="a readable JSON file", actual=error) from error
    if not isinstance(value, dict):
        raise InvalidRequest(field=str(path), expected="a JSON object", actual=value)
    return value


def _architecture(config: dict[str, Any]) -> str:
    by_type = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    named = config.get("architectures") or [by_type.get(config.get("model_type", ""), config.get("model_type"))]
    if len(named) != 1 or named[0] not in by_type.values():
        raise Unsupported(field="architectures", expected=f"one of {sorted(by_type.values())}", actual=named)
    return str(named[0])


def _refuse(config: dict[str, Any]) -> None:
    """Fields whose other values change arithmetic that is not built."""
    only: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "pretraining_tp": (1,),
        "quantization_config": (None,),
        "partial_rotary_factor": (1, None),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
    }
    for field, allowed in only.items():
        if field in config and config[field] not in allowed:
            raise Unsupported(field=field, expected=f"one of {list(allowed)}", actual=config[field])


def _layers(config: dict[str, Any], num_layers: int) -> tuple[LayerSpec, ...]:
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise InvalidRequest(field="layer_types", expected=f"{num_layers} entries", actual=kinds)
    layers = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise Unsupported(field="layer_types", expected="full_attention or sliding_attention", actual=kind)
        if kind == "sliding_attention" and not window:
            raise InvalidRequest(field="sliding_window", expected="a window for sliding_attention", actual=window)
        layers.append(LayerSpec(window=window if kind == "sliding_attention" else None))
    return tuple(layers)


def _rope(config: dict[str, Any], context_len: int) -> RopeSpec:
    """`rope_parameters` (newer) or `rope_scaling` with `rope_theta` (older)."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise Unsupported(field="rope_parameters", expected="one set for all layers", actual=given)
    kind = given.get("rope_type") or given.get("type") or "default"
    used = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }
    if kind not in used:
        raise Unsupported(field="rope_type", expected=f"one of {sorted(used)}", actual=kind)
    if given.get("partial_rotary_factor") not in (None, 1):
        raise Unsupported(field="partial_rotary_factor", expected="1", actual=given["partial_rotary_factor"])
    values = {name: given[name] for name in used[kind] if given.get(name) is not None}
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    if kind == "yarn" and "factor" not in values:
        values["factor"] = context_len / (original or context_len)
    elif kind != "default" and "factor" not in values:
        raise InvalidRequest(field="rope_parameters.factor", expected=f"a number for {kind}", actual=None)
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return RopeSpec(theta=float(theta), kind=kind, original_context=int(original or context_len), **values)


def _eos_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    """Both files may name one id, several or none; the model ends on any of them."""
    found: list[int] = []
    for source in (config, generation):
        value = source.get("eos_token_id")
        if value is not None:
            found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(found))


def _dtype(config: dict[str, Any]) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise Unsupported(field="dtype", expected=f"one of {sorted(DTYPES)}", actual=name)
    return DTYPES[name]


def _integer(config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(field=field, expected="a positive integer in config.json", actual=value)
    return value
