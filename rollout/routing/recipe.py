"""How to bring a fresh engine to the fleet's policy version.

Owns a spool on disk with the tensors of the last committed update. An update names every tensor
of the model, so a fresh engine starts from the model folder and replays just that one. Ignores
what the tensors mean.

Bytes are copied while an update is staged, so that a replay never depends on a folder that the
trainer may have removed or rewritten since.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.errors import InvalidRequest
from engine.types import NamedTensor, TensorSpec

BUCKET_BYTES = 64 << 20
_MAX_HEADER = 100 << 20


class PolicyRecipe:
    """The committed update, and at most one that is being collected."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._committed: dict[str, Path] = {}
        self._staged: dict[str, Path] = {}
        self._files = 0
        self._readers = 0
        self._superseded: list[dict[str, Path]] = []
        spool.mkdir(parents=True, exist_ok=True)

    @property
    def empty(self) -> bool:
        """Whether the model folder alone is the present policy."""
        return not self._committed

    def begin(self) -> None:
        self.rollback()

    def add_tensors(self, tensors: list[NamedTensor]) -> None:
        path = self._next_file()
        header, offset = {}, 0
        for tensor in tensors:
            end = offset + tensor.data.nbytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end]}
            offset = end
        encoded = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)))
            file.write(encoded)
            for tensor in tensors:
                file.write(np.ascontiguousarray(tensor.data).data)
        self._staged.update({tensor.name: path for tensor in tensors})

    def add_folder(self, folder: Path) -> None:
        """Copy the safetensors files of `folder`."""
        for source in sorted(folder.glob("*.safetensors")):
            path = self._next_file()
            shutil.copyfile(source, path)
            self._staged.update({name: path for name in read_header(path)})

    def commit(self) -> None:
        self._superseded.append(self._committed)
        self._committed, self._staged = self._staged, {}
        self._remove_superseded()

    def rollback(self) -> None:
        staged, self._staged = self._staged, {}
        _remove(staged)

    @contextlib.contextmanager
    def reading(self) -> Iterator[CommittedUpdate]:
        """The update committed now; its files stay until the reader is through, whatever is
        committed meanwhile."""
        self._readers += 1
        try:
            yield CommittedUpdate(sorted(set(self._committed.values())))
        finally:
            self._readers -= 1
            self._remove_superseded()

    def _remove_superseded(self) -> None:
        while self._superseded and not self._readers:
            _remove(self._superseded.pop())

    def _next_file(self) -> Path:
        self._files += 1
        return self._spool / f"{self._files:08d}.safetensors"


class CommittedUpdate:
    """One committed update, as it is sent again."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def manifest(self) -> list[TensorSpec]:
        return [
            TensorSpec(name=name, dtype=entry["dtype"], shape=entry["shape"])
            for path in self._paths
            for name, entry in read_header(path).items()
        ]

    def buckets(self, limit: int = BUCKET_BYTES) -> Iterator[list[NamedTensor]]:
        """The tensors, at most `limit` bytes at a time (or one tensor, if larger)."""
        bucket: list[NamedTensor] = []
        size = 0
        for path in self._paths:
            for tensor in read_tensors(path):
                if bucket and size + tensor.data.nbytes > limit:
                    yield bucket
                    bucket, size = [], 0
                bucket.append(tensor)
                size += tensor.data.nbytes
        if bucket:
            yield bucket


def read_header(path: Path) -> dict[str, dict]:
    """The tensor table of a safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (_MAX_HEADER + 1,)
        encoded = file.read(length) if length <= _MAX_HEADER else b""
    if len(encoded) != length:
        size = path.stat().st_size
        raise InvalidRequest(field=path.name, expected="a whole safetensors file", actual=f"{size} bytes")
    header = json.loads(encoded)
    header.pop("__metadata__", None)
    return header


def read_tensors(path: Path) -> Iterator[NamedTensor]:
    """Raw tensors of a safetensors file, one read each."""
    header = read_header(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            data = np.fromfile(file, np.uint8, end - start)
            yield NamedTensor(name=name, dtype=entry["dtype"], shape=entry["shape"], data=data)


def _remove(files: dict[str, Path]) -> None:
    for path in set(files.values()):
        path.unlink(missing_ok=True)
