"""The weights of a checkpoint folder, and which folders an update may name.

Owns finding the safetensors files of a folder (one file, or shards with an index), reading their
tensors consistently, and the path rules of disk updates. Ignores what the tensors are for. No
other weight format is ever opened: the others carry code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.errors import InvalidRequest
from engine.types import TensorSpec
from engine.weights.names import bounded_list
from engine.weights.safetensors_file import SafetensorsFile, StoredTensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_CODE_BEARING = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_INDEX = 64 * 2**20


class WeightFolder:
    """Every tensor of a folder, opened together; a context manager.

    All files are opened and their headers checked on entry, so that a missing or cut shard is
    refused before a single value is used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._places: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}

    def __enter__(self) -> WeightFolder:
        try:
            names, announced = _weight_files(self.folder)
            for name in names:
                file = SafetensorsFile(self.folder / name)
                self._files.append(file)
                self._add(file, announced)
            missing = set(announced or ()) - set(self._places)
            if missing:
                raise InvalidRequest(
                    field=INDEX,
                    expected="shards holding every name of the index",
                    actual=f"none has {bounded_list(missing)}",
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files:
            file.close()

    @property
    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name=t.name, dtype=t.dtype, shape=list(t.shape)) for _, t in self._places.values()]

    def __iter__(self) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Specs with their bytes (uint8 [num_bytes]), file by file in storage order."""
        for file in self._files:
            for stored in sorted(file.tensors.values(), key=lambda t: t.offset):
                yield TensorSpec(name=stored.name, dtype=stored.dtype, shape=list(stored.shape)), file.read(stored)

    def verify_unchanged(self) -> None:
        for file in self._files:
            file.verify_unchanged()

    def _add(self, file: SafetensorsFile, announced: dict[str, str] | None) -> None:
        for stored in file.tensors.values():
            if announced is not None and announced.get(stored.name) != file.path.name:
                raise InvalidRequest(
                    field=INDEX,
                    expected=f"{stored.name[:120]!a} to lie in {announced.get(stored.name, 'no shard')}",
                    actual=f"it lies in {file.path.name}",
                )
            self._places[stored.name] = (file, stored)


def _weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """File names to open, and the index's {tensor: file} where there is one."""
    single, index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if single and index:
        raise InvalidRequest(field=str(folder), expected=f"one of {SINGLE} and {INDEX}", actual="both")
    if single:
        return [SINGLE], None
    if not index:
        raise InvalidRequest(field=str(folder), expected=f"{SINGLE} or {INDEX}", actual=_describe(folder))
    try:
        with open(folder / INDEX, "rb") as file:
            table = json.loads(file.read(_MAX_INDEX))["weight_map"]
        assert isinstance(table, dict) and all(isinstance(name, str) for name in table.values())
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise InvalidRequest(field=INDEX, expected="JSON with a weight_map of names to files", actual=error) from error
    names = sorted(set(table.values()))
    for name in names:
        if not name.endswith(".safetensors") or "/" in name or "\\" in name or "\0" in name:
            raise InvalidRequest(field=INDEX, expected="safetensors files of the same folder", actual=name)
    return names, table


def _describe(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    others = [path.name for path in folder.iterdir() if path.suffix in _CODE_BEARING]
    if others:
        return f"{bounded_list(others)}, which may carry code and is never read; save as safetensors"
    return "neither"


def open_update_folder(uri: str, root: Path | None) -> Path:
    """The local folder an update names, if it lies under `root` with all it holds.

    Takes absolute local paths only; without a root, none. Whatever is wrong (a hub id, a URL, traversal, a link that
    leaves the root, a missing folder), the refusal is one and the same, so that it tells nothing
    about what exists outside.
    """
    if root is None:
        raise InvalidRequest(field="uri", expected="no disk updates: no root is configured for them", actual="one")
    refusal = InvalidRequest(field="uri", expected="an absolute local folder under the allowed root", actual="another")
    if not isinstance(uri, str) or not uri.startswith("/") or "\0" in uri or re.match(r"[a-zA-Z][\w+.-]*:", uri):
        raise refusal
    path = Path(uri)
    if ".." in path.parts:
        raise refusal
    try:
        real = root.resolve(strict=True)
        if not (path.is_relative_to(root.absolute()) or path.is_relative_to(real)):
            raise refusal
        folder = path.resolve(strict=True)
        if not folder.is_relative_to(real) or not folder.is_dir():
            raise refusal
        if not all(entry.resolve(strict=True).is_relative_to(real) for entry in folder.iterdir()):
            raise refusal
    except (OSError, ValueError, RuntimeError):
        raise refusal from None
    return folder
