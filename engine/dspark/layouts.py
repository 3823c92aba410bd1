"""Foreign drafter checkpoints, rewritten into the DeepSpec layout.

Owns what the `speculators` and `SpecForge` layouts call things and how they differ. Ignores the model:
what comes out is read by `engine.dspark.block_spec` and refused there where it does not fit. Conversion
happens once and offline, so that serving and live updates know one layout.

Differences that matter: `speculators` numbers target layers from the embedding (one more than here),
keeps the convention of slots in a flag that must be present, and may have a reduced vocabulary, whose
table holds offsets (target id = draft id + offset). `SpecForge` keeps its settings in a table of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from engine.dspark.block_spec import FAMILIES, BlockDrafterSpec, check_fits, drafter_spec_from_config, read_config
from engine.dspark.block_weights import SHARED_WITH_TARGET, block_weight_map
from engine.errors import InvalidRequest, Unsupported
from engine.models.spec import ModelSpec
from engine.weights.folder import WeightFolder
from engine.weights.names import bounded_list
from engine.weights.safetensors_file import WEIGHT_DTYPES

Layout = Literal["deepspec", "speculators", "specforge"]

_BY_TYPE = {"qwen3": "Qwen3DSparkModel", "llama": "LlamaDSparkModel"}
_VOCABULARY_TABLES = {"d2t": torch.int64, "t2d": torch.bool}
_STORED = WEIGHT_DTYPES | {"I64": torch.int64, "BOOL": torch.bool}
_HEAD_FIELDS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def layout_of(config: dict[str, Any]) -> Layout:
    if "speculators_model_type" in config:
        return "speculators"
    if "dflash_config" in config:
        return "specforge"
    return "deepspec"


def convert_drafter(source: Path, destination: Path, target: ModelSpec) -> BlockDrafterSpec:
    """Write `source`, of any known layout, to the new folder `destination` in the DeepSpec layout.

    Raises `Unsupported` or `InvalidRequest`, naming field or tensor, and writes nothing then.
    """
    config = read_config(source)
    tensors = read_tensors(source)
    layout = layout_of(config)
    if layout != "deepspec":
        build: Callable[..., dict[str, Any]] = {"speculators": _from_speculators, "specforge": _from_specforge}[layout]
        config = build(config, tensors, target)
    spec = drafter_spec_from_config(config)
    check_fits(spec, target)
    _widen_vocabulary(tensors, spec)
    if spec.confidence and "confidence_head.proj.bias" not in tensors:
        tensors["confidence_head.proj.bias"] = torch.zeros(1)
    check_names(tensors, spec)
    destination.mkdir(parents=True, exist_ok=False)
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(config, indent=1))
    return spec


def _from_speculators(config: dict[str, Any], tensors: dict[str, torch.Tensor], target: ModelSpec) -> dict[str, Any]:
    _only(config, "speculators_model_type", ("dspark",))
    if config.get("modality_head_rank"):
        raise Unsupported(field="modality_head_rank", expected="0", actual=config["modality_head_rank"])
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise InvalidRequest(field="transformer_layer_config", expected="an object", actual=inner)
    if "sliding_attention" in (inner.get("layer_types") or []):
        _only(config, "sliding_window_non_causal", (True,))
        inner = inner | {"use_sliding_window": True}
    convention = config.get("sample_from_anchor")
    if type(convention) is not bool:
        raise InvalidRequest(field="sample_from_anchor", expected="true or false", actual=convention)
    layers = config.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise InvalidRequest(field="aux_hidden_state_layer_ids", expected="a list of layers", actual=layers)
    flat = {
        **inner,
        "architectures": [_architecture(inner)],
        "num_target_layers": target.num_layers,
        "target_layer_ids": [layer - 1 for layer in layers],
        "sample_from_anchor": convention,
        "tie_word_embeddings": False,
    }
    for field in ("block_size", "mask_token_id", *_HEAD_FIELDS):
        if field in config:
            flat[field] = config[field]
    return flat | _draft_vocabulary(config, tensors, target.vocab_size)


def _from_specforge(config: dict[str, Any], tensors: dict[str, torch.Tensor], target: ModelSpec) -> dict[str, Any]:
    inner = config["dflash_config"]
    if not isinstance(inner, dict):
        raise InvalidRequest(field="dflash_config", expected="an object", actual=inner)
    _only(inner, "projector_type", ("dspark",))
    for field in ("conv_kernel_size", "selector_rank"):
        if inner.get(field):
            raise Unsupported(field=f"dflash_config.{field}", expected="none", actual=inner[field])
    flat = {key: value for key, value in config.items() if key not in ("dflash_config", "auto_map")}
    for field in ("target_layer_ids", "mask_token_id", "block_size", "sample_from_anchor", *_HEAD_FIELDS):
        if field in inner:
            if field in flat and flat[field] != inner[field]:
                raise InvalidRequest(field=field, expected=f"one value, {flat[field]}", actual=inner[field])
            flat[field] = inner[field]
    flat |= {"architectures": [_architecture(config)], "tie_word_embeddings": False}
    flat.setdefault("num_target_layers", target.num_layers)
    # Training supervises slot 0 with the token after the anchor; a contradicting flag is kept and refused.
    if flat.setdefault("sample_from_anchor", True) is not True:
        raise Unsupported(field="sample_from_anchor", expected="true", actual=flat["sample_from_anchor"])
    return flat


def _architecture(config: dict[str, Any]) -> str:
    kind = config.get("model_type")
    if kind not in _BY_TYPE:
        raise Unsupported(field="model_type", expected=f"one of {sorted(_BY_TYPE)}", actual=kind)
    assert _BY_TYPE[kind] in FAMILIES
    return _BY_TYPE[kind]


def _draft_vocabulary(config: dict[str, Any], tensors: dict[str, torch.Tensor], vocab_size: int) -> dict[str, Any]:
    """The ids a reduced vocabulary keeps, from its table of offsets; nothing where it keeps all."""
    size = config.get("draft_vocab_size", vocab_size)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is None:
        if size != vocab_size:
            raise InvalidRequest(field="d2t", expected=f"a table of the {size} draft ids", actual="no such tensor")
        return {}
    ids = d2t + torch.arange(len(d2t))
    if len(d2t) != size:
        raise InvalidRequest(field="d2t", expected=f"{size} offsets", actual=len(d2t))
    if t2d is not None and t2d.nonzero()[:, 0].tolist() != ids.tolist():
        raise InvalidRequest(field="t2d", expected="the ids that d2t maps to", actual=f"{int(t2d.sum())} ids")
    return {} if ids.tolist() == list(range(vocab_size)) else {"draft_vocab_ids": ids.tolist()}


def _widen_vocabulary(tensors: dict[str, torch.Tensor], spec: BlockDrafterSpec) -> None:
    """Give the Markov head's output a row for every id; those never proposed are zero."""
    name = "markov_head.markov_w2.weight"
    if spec.draft_ids is None or name not in tensors:
        return
    narrow = tensors[name]
    if narrow.shape[0] == len(spec.draft_ids):
        tensors[name] = narrow.new_zeros(spec.backbone.vocab_size, narrow.shape[1])
        tensors[name][list(spec.draft_ids)] = narrow


def check_names(tensors: dict[str, torch.Tensor], spec: BlockDrafterSpec) -> None:
    """Drop copies of the target's ends; raise `InvalidRequest` unless what is left is all of a drafter's tensors."""
    for name in SHARED_WITH_TARGET:
        tensors.pop(name, None)
    expected = block_weight_map(spec).placements
    unmatched, absent = set(tensors) - set(expected), set(expected) - set(tensors)
    if unmatched or absent:
        raise InvalidRequest(
            f"the tensors do not fit a drafter: unmatched {bounded_list(unmatched)}, absent {bounded_list(absent)}",
            field="tensors",
            expected=len(expected),
            actual=len(tensors),
        )
    for name, placement in expected.items():
        if tuple(tensors[name].shape) != placement.shape:
            raise InvalidRequest(field=name, expected=f"shape {placement.shape}", actual=tuple(tensors[name].shape))


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors by name, on the CPU. Raises `InvalidRequest` naming file or tensor."""
    tensors = {}
    with WeightFolder(folder) as weights:
        for spec, data in weights:
            expected = _VOCABULARY_TABLES.get(spec.name)
            dtype = _STORED.get(spec.dtype)
            if dtype is None or (dtype not in WEIGHT_DTYPES.values() and dtype != expected):
                raise InvalidRequest(field=spec.name, expected="floating-point values", actual=spec.dtype)
            tensors[spec.name] = data.view(dtype).reshape(spec.shape)
        weights.verify_unchanged()
    return tensors


def _only(config: dict[str, Any], field: str, allowed: tuple[Any, ...]) -> None:
    if config.get(field) not in allowed:
        raise Unsupported(field=field, expected=f"one of {list(allowed)}", actual=config.get(field))
