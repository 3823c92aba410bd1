"""Reading one safetensors file without mapping it into memory.

Owns the header's checks and plain reads of tensor bytes. Ignores which tensors a model wants.
Files are read, not mapped: a mapped file that another process cuts short kills the reader with
a bus error, where a short read is an ordinary refusal.

Format: u64 little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the tensors' bytes without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import Conflict, InvalidRequest

WEIGHT_DTYPES: dict[str, torch.dtype] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""What a parameter may be sent or stored as."""

ITEM_SIZES: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
_MAX_HEADER = 100 * 2**20
_MAX_READ = 2**30


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor's bytes lie: absolute file offset and length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsFile:
    """An open file whose header has been checked against its length. Close it after use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise InvalidRequest(field=path.name, expected="a readable safetensors file", actual=error) from error
        try:
            self._identity = _identity(os.fstat(self._fd))
            self.tensors = self._read_header(os.fstat(self._fd).st_size)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """The tensor's bytes as uint8 [num_bytes] on the CPU."""
        buffer = torch.empty(stored.num_bytes, dtype=torch.uint8)
        self._read_into(buffer.numpy().data, stored.offset)
        return buffer

    def verify_unchanged(self) -> None:
        """Refuse what was read if the file was written, replaced or removed since it was opened."""
        try:
            same = _identity(os.fstat(self._fd)) == self._identity == _identity(os.stat(self.path))
        except OSError:
            same = False
        if not same:
            raise Conflict(f"{self.path.name} changed while it was read; nothing was taken from it")

    def _read_into(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done : done + _MAX_READ]], offset + done)
            except OSError as error:
                raise InvalidRequest(field=self.path.name, expected="a readable file", actual=error) from error
            if count == 0:
                raise self._malformed(f"{len(view)} bytes at {offset}", f"the file's end after {done}")
            done += count

    def _read_header(self, file_size: int) -> dict[str, StoredTensor]:
        if file_size < 8:
            raise self._malformed("a header of at least 8 bytes", f"{file_size} bytes")
        prefix = bytearray(8)
        self._read_into(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > min(_MAX_HEADER, file_size - 8):
            raise self._malformed(f"a header within the file's {file_size} bytes", f"one of {length} bytes")
        raw = bytearray(length)
        self._read_into(memoryview(raw), 8)
        try:
            header = json.loads(raw, object_pairs_hook=_unique)
            assert isinstance(header, dict)
            header.pop("__metadata__", None)
            tensors = [self._parse_entry(name, entry, 8 + length) for name, entry in header.items()]
        except (ValueError, AssertionError, RecursionError) as error:
            raise self._malformed("a safetensors JSON header", error) from error
        expected = 8 + length
        for stored in sorted(tensors, key=lambda t: (t.offset, t.num_bytes)):
            if stored.offset != expected:
                raise self._malformed(f"tensor {stored.name!a} at offset {expected}", stored.offset)
            expected += stored.num_bytes
        if expected != file_size:
            raise self._malformed(f"{expected} bytes", f"{file_size} bytes")
        return {stored.name: stored for stored in tensors}

    def _parse_entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        where = f"{self.path.name}: tensor {name[:120]!a}"
        fields = (entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else ()
        match fields:
            case (str(dtype), [*shape], [begin, end]) if all(
                type(n) is int and 0 <= n < 2**62 for n in (*shape, begin, end)
            ):
                if dtype not in ITEM_SIZES:
                    raise InvalidRequest(field=where, expected=f"a dtype of {sorted(ITEM_SIZES)}", actual=dtype)
                if end - begin != math.prod(shape) * ITEM_SIZES[dtype]:
                    raise InvalidRequest(
                        field=where, expected=f"{math.prod(shape) * ITEM_SIZES[dtype]} bytes", actual=end - begin
                    )
                return StoredTensor(name, dtype, tuple(shape), data_start + begin, end - begin)
        raise InvalidRequest(field=where, expected="dtype, shape and data_offsets", actual=entry)

    def _malformed(self, expected: str, actual: object) -> InvalidRequest:
        return InvalidRequest(field=self.path.name, expected=expected, actual=actual)


def _identity(stat: os.stat_result) -> tuple[int, int, int, int]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table
