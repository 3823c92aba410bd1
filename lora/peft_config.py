"""What an `adapter_config.json` of peft says about each module.

Owns the meaning of its fields: which modules are adapted, at which rank and scale. Every field that
changes arithmetic is either honoured here or refused by its name, and so is any field this file does
not know unless it is switched off. Ignores tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from lora.errors import InvalidAdapter, UnsupportedAdapter
from lora.geometry import Geometry, Kind

MAX_PATTERN = 4096
"""Characters of one regular expression."""

_DESCRIPTIVE = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config",
}  # fmt: skip
"""Fields that say where an adapter comes from or how it is trained, never what it computes.
`loftq_config` and `eva_config` matter through `init_lora_weights` alone."""

_HONOURED = {
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "lora_bias", "bias", "init_lora_weights",
}  # fmt: skip

_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""The other initialisations change the base weights, and the adapter is right on those alone."""


class PeftConfig:
    """The settings of one adapter. Raises for whatever cannot be computed exactly as peft does."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse(config)
        self._config = config
        self.rank = _positive(config, "r", 8)
        self.alpha = _number(config.get("lora_alpha", 8), "lora_alpha")
        self.rslora = _flag(config, "use_rslora")
        self.bias = _flag(config, "lora_bias")
        self._ranks = _pattern(config, "rank_pattern")
        self._alphas = _pattern(config, "alpha_pattern")
        for name, rank in self._ranks.items():
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise InvalidAdapter(f"rank_pattern[{name!r}]", "a positive integer", rank)
        for name, alpha in self._alphas.items():
            _number(alpha, f"alpha_pattern[{name!r}]")
        self._targets = _modules(config, "target_modules")
        self._excluded = _modules(config, "exclude_modules")
        self._layers = _layer_indices(config)
        patterns = config.get("layers_pattern") or []
        self._layer_patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in self._layer_patterns:
            _check_regex(pattern, "layers_pattern")
        if self._layers is not None and isinstance(self._targets, str):
            raise InvalidAdapter("layers_to_transform", "a list of target_modules beside it", self._targets)

    def rank_of(self, module: str) -> int:
        return int(_matching(self._ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) with rank stabilisation."""
        rank = self.rank_of(module)
        alpha = float(_matching(self._alphas, module, self.alpha))
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def targets(self, geometry: Geometry) -> set[str] | None:
        """The modules of the model that the configuration selects; None where it does not say."""
        if self._targets is None:
            return None
        return {module for module in geometry.places if self._selects(module, geometry.kind(module))}

    def _selects(self, module: str, kind: Kind) -> bool:
        if self._excluded is not None and _named(self._excluded, module):
            return False
        if isinstance(self._targets, str) and self._targets.lower() == "all-linear":
            return kind is Kind.LINEAR
        assert self._targets is not None
        if not _named(self._targets, module):
            return False
        if self._layers is None or (not isinstance(self._targets, str) and module in self._targets):
            return True
        return self._layer_of(module) in self._layers

    def _layer_of(self, module: str) -> int | None:
        """The first numbered segment of the name, after one of the patterns where there are any."""
        if not self._layer_patterns:
            found = re.match(r".*?\.[^.]*\.(?P<index>\d+)\.", module)
            return int(found["index"]) if found else None
        for pattern in self._layer_patterns:
            found = re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", module)
            if found:
                return int(found["index"])
        return None


def _refuse(config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if str(kind).upper().removeprefix("PEFTTYPE.") != "LORA":
        raise UnsupportedAdapter("peft_type", "LORA", kind)
    bias = config.get("bias", "none")
    if bias != "none":
        raise UnsupportedAdapter("bias", "'none': trained biases of the base model are not served", bias)
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise UnsupportedAdapter("init_lora_weights", f"one of {list(_PLAIN_INITS)}, or a converted adapter", init)
    for name in sorted(set(config) - _DESCRIPTIVE - _HONOURED):
        if config[name]:
            raise UnsupportedAdapter(name, "unset: it changes what the adapter computes, or is unknown", config[name])


def _named(chosen: str | list[str], module: str) -> bool:
    """A regular expression over whole names, or names and their endings."""
    if isinstance(chosen, str):
        return re.fullmatch(chosen, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in chosen)


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that is, or matches, the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _modules(config: Mapping[str, Any], field: str) -> str | list[str] | None:
    value = config.get(field)
    if value is None or (field == "exclude_modules" and not value):
        return None
    if isinstance(value, str):
        if value.lower() != "all-linear":
            _check_regex(value, field)
        return value
    if not isinstance(value, list | tuple | set) or not all(isinstance(name, str) for name in value):
        raise InvalidAdapter(field, "a string or a list of names", value)
    return sorted(value)


def _pattern(config: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = config.get(field) or {}
    if not isinstance(value, dict):
        raise InvalidAdapter(field, "a table from module patterns to numbers", value)
    for pattern in value:
        _check_regex(pattern, field)
    return value


def _check_regex(pattern: Any, field: str) -> None:
    if not isinstance(pattern, str) or len(pattern) > MAX_PATTERN:
        raise InvalidAdapter(field, f"a pattern of at most {MAX_PATTERN} characters", pattern)
    try:
        re.compile(pattern)
    except re.error as error:
        raise InvalidAdapter(field, f"a regular expression ({error})", pattern) from None


def _layer_indices(config: Mapping[str, Any]) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    if value is None or value == []:
        return None
    indices = [value] if isinstance(value, int) else value
    if not isinstance(indices, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in indices):
        raise InvalidAdapter("layers_to_transform", "a layer's index or a list of them", value)
    return frozenset(indices)


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise InvalidAdapter(field, "true or false", value)
    return value


def _positive(config: Mapping[str, Any], field: str, default: int) -> int:
    value = config.get(field, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidAdapter(field, "a positive integer", value)
    return value


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidAdapter(field, "a finite number", value)
    return float(value)
