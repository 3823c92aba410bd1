"""Tensors through a folder that both sides can read.

The folder holds safetensors shards and the usual index, so that it is at the same time a weight
folder any Hugging Face loader reads. It appears under its final name whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from engine.errors import InvalidRequest
from engine.types import UpdateProgress
from trainer_bridge.control import UpdateControl
from trainer_bridge.tensors import num_bytes


class DiskTransport:
    """`root` must be one the server allows. With `keep` false a folder is removed as soon as its
    transaction has ended: the engine has read it into staging by then."""

    name = "disk"
    digests = True

    def __init__(self, root: Path, *, keep: bool = False, shard_bytes: int = 2 * 2**30) -> None:
        self.root = Path(root).resolve()
        self.keep = keep
        self.shard_bytes = shard_bytes
        self._folders: dict[str, Path] = {}

    def stage(
        self, control: UpdateControl, txn: str, new_version: int, tensors: Mapping[str, Tensor]
    ) -> UpdateProgress:
        folder = self.root / f"policy-{new_version:08d}-{txn}"
        self._folders[txn] = folder
        write_folder(folder, tensors, self.shard_bytes)
        return control.update_disk(txn, str(folder))

    def release(self, txn: str) -> None:
        folder = self._folders.pop(txn, None)
        if folder is not None and not self.keep:
            shutil.rmtree(folder, ignore_errors=True)


def write_folder(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int = 2 * 2**30) -> None:
    """Writes shards and index beside `folder`, makes them durable, then renames.

    Raises `InvalidRequest` if `folder` is already there: a published folder never changes.
    """
    if folder.exists():
        raise InvalidRequest(field="uri", expected="a new folder", actual=folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    shards = _shards(tensors, shard_bytes)
    index: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name].cpu().contiguous() for name in names}, partial / file_name, {"format": "pt"})
        index.update(dict.fromkeys(names, file_name))
    total = sum(num_bytes(name, tensor) for name, tensor in tensors.items())
    body = {"metadata": {"total_size": total}, "weight_map": index}
    (partial / "model.safetensors.index.json").write_text(json.dumps(body, indent=1))
    for path in partial.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, folder)


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = num_bytes(name, tensor)
        if shards[-1] and used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards
