"""What a block drafter is, read from its `config.json` in the DeepSpec layout.

Owns the translation of that configuration into one value and the refusal, by name, of whatever would
change arithmetic and is not built. Ignores weights (`engine.dspark.block_weights`) and other layouts
(`engine.dspark.layouts`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from engine.errors import InvalidRequest, Unsupported
from engine.models.spec import ModelSpec, spec_from_config

MarkovKind = Literal["none", "vanilla", "gated", "rnn"]

FAMILIES = {"Qwen3DSparkModel": "Qwen3ForCausalLM", "LlamaDSparkModel": "LlamaForCausalLM"}
"""Drafter architecture -> the target family whose layers it is made of."""

MAX_BLOCK = 64


@dataclass(frozen=True, slots=True)
class BlockDrafterSpec:
    """A block drafter's shape.

    `backbone` describes its own layers; vocabulary and width are the target's. `target_layers` are
    layer outputs, 0 for the first layer's. With `from_anchor` slot 0 of the block predicts the token
    after the anchor, so that every slot yields a draft; without it slot 0 predicts nothing.
    `draft_ids`, ascending, are all that a drafter of a reduced vocabulary proposes.
    """

    backbone: ModelSpec
    num_target_layers: int
    target_layers: tuple[int, ...]
    block: int
    mask_id: int
    markov: MarkovKind = "none"
    markov_rank: int = 0
    confidence: bool = False
    confidence_reads_markov: bool = False
    from_anchor: bool = True
    draft_ids: tuple[int, ...] | None = None

    @property
    def first_slot(self) -> int:
        """The block slot that yields the first draft."""
        return 0 if self.from_anchor else 1

    @property
    def num_drafts(self) -> int:
        return self.block - self.first_slot


def read_drafter_spec(folder: str | Path) -> BlockDrafterSpec:
    return drafter_spec_from_config(read_config(folder))


def read_config(folder: str | Path) -> dict[str, Any]:
    """A folder's `config.json`, of whatever layout."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(field=str(path), expected="a readable JSON file", actual=error) from error
    if not isinstance(config, dict):
        raise InvalidRequest(field=str(path), expected="a JSON object", actual=config)
    return config


def drafter_spec_from_config(config: dict[str, Any]) -> BlockDrafterSpec:
    """Raises `Unsupported` or `InvalidRequest`, naming the field."""
    if "packing" in config:
        expected = "an expanded drafter (`sparkroll drafter expand`)"
        raise Unsupported(field="packing", expected=expected, actual=config["packing"])
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in FAMILIES:
        raise Unsupported(field="architectures", expected=f"one of {sorted(FAMILIES)}", actual=named)
    backbone = spec_from_config(config | {"architectures": [FAMILIES[named[0]]]})
    for field in ("attention_bias", "mlp_bias"):
        if getattr(backbone, field):
            raise Unsupported(field=field, expected="no bias in a drafter's layers", actual=True)
    if not all(layer.softcap is None and not layer.sink and layer.bias is None for layer in backbone.layers):
        raise Unsupported(field="layer_types", expected="plain or windowed attention", actual=backbone.layers)
    num_target_layers = _integer(config, "num_target_layers", 1, 10_000)
    block = _block(config, backbone, from_anchor := _flag(config, "sample_from_anchor", True))
    kind, rank = _markov(config)
    confidence = _flag(config, "enable_confidence_head", False)
    reads_markov = confidence and _flag(config, "confidence_head_with_markov", rank > 0)
    if reads_markov and not rank:
        raise InvalidRequest(field="confidence_head_with_markov", expected="false at markov_rank 0", actual=True)
    return BlockDrafterSpec(
        backbone=backbone,
        num_target_layers=num_target_layers,
        target_layers=_target_layers(config, num_target_layers),
        block=block,
        mask_id=_integer(config, "mask_token_id", 0, backbone.vocab_size - 1),
        markov=kind,
        markov_rank=rank,
        confidence=confidence,
        confidence_reads_markov=reads_markov,
        from_anchor=from_anchor,
        draft_ids=_draft_ids(config, backbone.vocab_size),
    )


def check_fits(spec: BlockDrafterSpec, target: ModelSpec) -> None:
    """Raise `Unsupported`, naming the field, where this drafter was not made for this target."""
    pairs = {
        "hidden_size": (target.hidden, spec.backbone.hidden),
        "vocab_size": (target.vocab_size, spec.backbone.vocab_size),
        "num_target_layers": (target.num_layers, spec.num_target_layers),
    }
    for field, (expected, actual) in pairs.items():
        if expected != actual:
            raise Unsupported(field=f"drafter {field}", expected=f"the target's {expected}", actual=actual)


def _block(config: dict[str, Any], backbone: ModelSpec, from_anchor: bool) -> int:
    block = _integer(config, "block_size", 1 if from_anchor else 2, MAX_BLOCK)
    narrowest = min((layer.window for layer in backbone.layers if layer.window is not None), default=block)
    if narrowest < block:
        raise Unsupported(field="sliding_window", expected=f"at least the block of {block}", actual=narrowest)
    return block


def _markov(config: dict[str, Any]) -> tuple[MarkovKind, int]:
    rank = _integer(config, "markov_rank", 0, 65_536)
    kind = config.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise Unsupported(field="markov_head_type", expected="vanilla, gated or rnn", actual=kind)
    return (cast(MarkovKind, kind), rank) if rank else ("none", 0)


def _target_layers(config: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    layers = config.get("target_layer_ids")
    highest = num_target_layers - 2
    expected = f"distinct layers in [0, {highest}] (the last layer's output is not among them)"
    if not isinstance(layers, list) or not layers or len(set(map(str, layers))) != len(layers):
        raise InvalidRequest(field="target_layer_ids", expected=expected, actual=layers)
    for layer in layers:
        if type(layer) is not int or not 0 <= layer <= highest:
            raise Unsupported(field="target_layer_ids", expected=expected, actual=layers)
    return tuple(layers)


def _draft_ids(config: dict[str, Any], vocab_size: int) -> tuple[int, ...] | None:
    size, ids = config.get("draft_vocab_size"), config.get("draft_vocab_ids")
    if ids is None:
        if size not in (None, vocab_size):
            raise InvalidRequest(field="draft_vocab_ids", expected=f"the {size} ids it proposes", actual=None)
        return None
    ascending = isinstance(ids, list) and all(type(i) is int for i in ids) and sorted(set(ids)) == ids
    if not ascending or not ids or ids[0] < 0 or ids[-1] >= vocab_size or len(ids) != (size or len(ids)):
        expected = f"{size or 'some'} ascending ids below {vocab_size}"
        raise InvalidRequest(field="draft_vocab_ids", expected=expected, actual=ids)
    return tuple(ids)


def _integer(config: dict[str, Any], field: str, low: int, high: int) -> int:
    value = config.get(field)
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(field=field, expected=f"an integer in [{low}, {high}]", actual=value)
    return value


def _flag(config: dict[str, Any], field: str, default: bool) -> bool:
    value = config.get(field, default)
    if type(value) is not bool:
        raise InvalidRequest(field=field, expected="true or false", actual=value)
    return value
