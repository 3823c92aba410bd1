"""Reading single fields of a `config.json`, with errors that name them.

Owns fields whose spelling several architectures share. Ignores which architecture reads them.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.errors import InvalidRequest, Unsupported
from engine.models.shape import DTYPES, LayerSpec, RopeSpec

Config = dict[str, Any]

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}

_RENAMED = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
"""What older files call kinds of layers."""


def integer(config: Config, field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(field=field, expected="a positive integer in config.json", actual=value)
    return value


def refuse_others(config: Config, allowed: dict[str, tuple[Any, ...]]) -> None:
    """Fields whose other values change arithmetic that is not built."""
    for field, values in allowed.items():
        if field in config and config[field] not in values:
            raise Unsupported(field=field, expected=f"one of {list(values)}", actual=config[field])


def layer_types(config: Config, default: list[str], known: tuple[str, ...]) -> list[str]:
    """One kind a layer by its newest name; `default` where the configuration lists none."""
    kinds = [_RENAMED.get(str(kind), kind) for kind in config.get("layer_types") or default]
    if len(kinds) != len(default):
        raise InvalidRequest(field="layer_types", expected=f"{len(default)} entries", actual=kinds)
    for kind in kinds:
        if kind not in known:
            raise Unsupported(field="layer_types", expected=f"one of {list(known)}", actual=kind)
    return kinds


def windowed_layers(config: Config, default: list[str], **fields: Any) -> tuple[LayerSpec, ...]:
    """Layers of full and sliding attention; `fields` are what all of them share."""
    window = config.get("sliding_window") or None
    layers = []
    for kind in layer_types(config, default, ("full_attention", "sliding_attention")):
        sliding = kind == "sliding_attention"
        if sliding and not window:
            raise InvalidRequest(field="sliding_window", expected="a window for sliding_attention", actual=window)
        layers.append(LayerSpec(window=window if sliding else None, **fields))
    return tuple(layers)


def rope(config: Config, context_len: int, part: float = 1.0) -> RopeSpec:
    """`rope_parameters` (newer) or `rope_scaling` with `rope_theta` (older). `part` is how much of a head turns
    where that is not all and the configuration does not say."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise Unsupported(field="rope_parameters", expected="one set for all layers", actual=given)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_FIELDS:
        raise Unsupported(field="rope_type", expected=f"one of {sorted(_ROPE_FIELDS)}", actual=kind)
    named = given.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if part == 1.0 and named not in (None, 1):
        raise Unsupported(field="partial_rotary_factor", expected="1", actual=named)
    values = {name: given[name] for name in _ROPE_FIELDS[kind] if given.get(name) is not None}
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    if kind == "yarn" and "factor" not in values:
        values["factor"] = context_len / (original or context_len)
    elif kind != "default" and "factor" not in values:
        raise InvalidRequest(field="rope_parameters.factor", expected=f"a number for {kind}", actual=None)
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return RopeSpec(
        theta=float(theta),
        kind=kind,
        part=float(named or part),
        original_context=int(original or context_len),
        **values,
    )


def eos_ids(config: Config, generation: Config) -> tuple[int, ...]:
    """Both files may name one id, several or none; the model ends on any of them."""
    found: list[int] = []
    for source in (config, generation):
        value = source.get("eos_token_id")
        if value is not None:
            found += value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(found))


def dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise Unsupported(field="dtype", expected=f"one of {sorted(DTYPES)}", actual=name)
    return DTYPES[name]
