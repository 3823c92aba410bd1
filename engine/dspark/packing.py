"""Drafters in 8 bits, to be shipped.

Owns the packed folder and its way to the DeepSpec layout and back. Ignores who names it, and serving: an engine
reads the expanded folder alone.

A packed folder is an exported one (config, temperatures, card) whose matrices are int8 with a float32 scale for
each row, `NAME.scale`: value = integer x scale. The scale is the row's largest magnitude / 127. Scales of least
squared error, which clip a row's ends, were no better than 1 % of an error of 0.6 to 0.9 % for normal rows of 64
to 2,880 values. Norms, biases and matrices of one row stay in bfloat16.

Shapes: R rows, C columns.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.dspark.block_spec import BlockDrafterSpec, drafter_spec_from_config, read_config, read_drafter_spec
from engine.dspark.layouts import check_names, read_tensors
from engine.errors import InvalidRequest, Unsupported
from engine.user_cache import build_folder
from engine.weights.folder import SINGLE, WeightFolder

PACKING = "int8-rows"
SCALE = ".scale"
_LIMIT = 127
_STORED = {"I8": torch.int8, "F32": torch.float32, "BF16": torch.bfloat16}
_BESIDE = ("README.md", "sts-*.json")


@dataclass(frozen=True, slots=True)
class PackReport:
    """Bytes of all files before and after. `errors` holds by matrix the root of squared error / squared values."""

    before: int
    after: int
    errors: dict[str, float]


def pack_drafter(source: Path, destination: Path) -> PackReport:
    """Write `source`, in the DeepSpec layout, to the new folder `destination`, packed.

    Raises `Unsupported` or `InvalidRequest`, naming file, field or tensor, and writes nothing then."""
    _require_new(destination)
    config = read_config(source)
    spec = drafter_spec_from_config(config)
    tensors = read_tensors(source)
    check_names(tensors, spec)
    packed: dict[str, torch.Tensor] = {}
    errors: dict[str, float] = {}
    for name, value in tensors.items():
        if not bool(value.isfinite().all()):
            raise InvalidRequest(field=_place(source, name), expected="finite values", actual="others among them")
        if not _is_matrix(value):
            packed[name] = value.bfloat16()
            continue
        ints_RC, scales_R = pack_rows(value)
        packed[name], packed[name + SCALE] = ints_RC, scales_R
        errors[name] = _error(value, unpack_rows(ints_RC, scales_R))
    # `target_digest` is of weights in the dtype that the exported drafter had.
    stored = config | {"packing": PACKING, "torch_dtype": "bfloat16"}
    stored.setdefault("target_dtype", config.get("torch_dtype", "bfloat16"))
    build_folder(destination, lambda folder: _write(source, folder, stored, packed))
    return PackReport(folder_bytes(source), folder_bytes(destination), errors)


def expand_drafter(source: Path, destination: Path) -> BlockDrafterSpec:
    """Write the packed folder `source` to the new folder `destination` in the DeepSpec layout, in bfloat16.

    Raises `Unsupported` or `InvalidRequest`, naming file and field or tensor, and writes nothing then."""
    _require_new(destination)
    build_folder(destination, lambda folder: expand_into(source, folder))
    return read_drafter_spec(destination)


def expand_into(source: Path, folder: Path) -> None:
    """The same into an empty folder that is there."""
    config = read_config(source)
    packing = config.pop("packing", None)
    if packing != PACKING:
        raise Unsupported(field=f"{source / 'config.json'}: packing", expected=PACKING, actual=packing)
    _write(source, folder, config, _read_packed(source, drafter_spec_from_config(config)))


def pack_rows(values_RC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [R, C] and float32 [R]; a row of zeros has scale 0."""
    exact_RC = values_RC.float()
    scales_R = exact_RC.abs().amax(dim=1) / _LIMIT
    safe_R1 = torch.where(scales_R > 0, scales_R, 1.0)[:, None]
    return (exact_RC / safe_R1).round_().clamp_(-_LIMIT, _LIMIT).to(torch.int8), scales_R


def unpack_rows(ints_RC: torch.Tensor, scales_R: torch.Tensor) -> torch.Tensor:
    return (ints_RC.float() * scales_R[:, None]).bfloat16()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _read_packed(folder: Path, spec: BlockDrafterSpec) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    with WeightFolder(folder) as weights:
        for one, data in weights:
            if one.dtype not in _STORED:
                raise InvalidRequest(field=_place(folder, one.name), expected=f"{sorted(_STORED)}", actual=one.dtype)
            stored[one.name] = data.view(_STORED[one.dtype]).reshape(one.shape)
        weights.verify_unchanged()
    tensors: dict[str, torch.Tensor] = {}
    for name, value in stored.items():
        if value.dtype is torch.bfloat16:
            tensors[name] = value
        elif value.dtype is torch.int8:
            tensors[name] = unpack_rows(value, _scales(folder, name, value, stored))
        elif name.removesuffix(SCALE) not in stored or not name.endswith(SCALE):
            raise InvalidRequest(field=_place(folder, name), expected="scales of a tensor beside them", actual="none")
    check_names(tensors, spec)
    return tensors


def _scales(folder: Path, name: str, ints: torch.Tensor, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    scales = stored.get(name + SCALE)
    expected = f"float32, [{len(ints) if ints.dim() == 2 else 'rows of a matrix'}], finite and 0 or more"
    if scales is None or scales.dtype is not torch.float32 or ints.dim() != 2 or scales.shape != ints.shape[:1]:
        actual = None if scales is None else f"{scales.dtype}, {list(scales.shape)}"
        raise InvalidRequest(field=_place(folder, name + SCALE), expected=expected, actual=actual)
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise InvalidRequest(field=_place(folder, name + SCALE), expected=expected, actual="others among them")
    return scales


def _write(source: Path, folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for pattern in _BESIDE:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def _is_matrix(value: torch.Tensor) -> bool:
    return value.dim() == 2 and value.shape[0] > 1


def _error(value: torch.Tensor, unpacked: torch.Tensor) -> float:
    norm = float(value.float().norm())
    return float((unpacked.float() - value.float()).norm()) / norm if norm else 0.0


def _place(folder: Path, name: str) -> str:
    return f"{folder / SINGLE}: {name}"


def _require_new(destination: Path) -> None:
    if destination.exists():
        raise InvalidRequest(field="out", expected="a folder that does not exist yet", actual=str(destination))
