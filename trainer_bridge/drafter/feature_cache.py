"""Target states on disk, so that many epochs and many drafters read what was computed once.

Owns the layout: safetensors shards, each with every tensor of some examples, and a manifest that says
what they were made with. A shard appears whole or not at all and the manifest is written after it, so a
build that was cut short goes on from its last shard. Ignores who computes states.

Stored per example `key`: `key/ids`, `key/mask`, `key/features` [T, M, D] and `key/last` [T, D], the final
state after the last norm (not logits, which are V / D times as large).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.errors import InvalidRequest
from engine.models.spec import DTYPES
from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.features import FeatureExample

MANIFEST = "manifest.json"
OPEN_SHARDS = 64
_TOKEN_BYTES = 5
"""An id of 4 bytes and a mask of 1."""


class CacheOrigin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the states are of. Two caches of equal origin hold the same numbers for the same ids."""

    target_digest: str
    layers: tuple[int, ...]
    hidden: int
    dtype: str


class StoredShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    file: str
    num_bytes: int
    keys: list[str]
    domains: list[str]
    tokens: list[int]
    policy_versions: list[int]


class Manifest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: int = 1
    origin: CacheOrigin
    shards: list[StoredShard] = msgspec.field(default_factory=list)


def cache_bytes(tokens: int, origin: CacheOrigin) -> int:
    """What so many tokens take on disk, headers aside."""
    return tokens * ((len(origin.layers) + 1) * origin.hidden * DTYPES[origin.dtype].itemsize + _TOKEN_BYTES)


class FeatureCache:
    """Reads by example. Opened shards are memory maps, of which the last `OPEN_SHARDS` stay open: what is asked
    for is all that is read."""

    def __init__(self, folder: Path, origin: CacheOrigin) -> None:
        """Raises `InvalidRequest` naming the field where the folder holds other states than these."""
        self.folder = folder
        self.manifest = _read_manifest(folder)
        for field in CacheOrigin.__struct_fields__:
            expected, actual = getattr(origin, field), getattr(self.manifest.origin, field)
            if expected != actual:
                raise InvalidRequest(field=f"{folder / MANIFEST} {field}", expected=expected, actual=actual)
        self._open: dict[str, Any] = {}
        self._places = [(shard, number) for shard in self.manifest.shards for number in range(len(shard.keys))]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def keys(self) -> list[str]:
        return [shard.keys[number] for shard, number in self._places]

    @property
    def num_tokens(self) -> int:
        return sum(sum(shard.tokens) for shard in self.manifest.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.manifest.shards)

    def fetch(self, places: Sequence[int]) -> list[FeatureExample]:
        """The examples at these places, in order."""
        return [self._read(*self._places[place]) for place in places]

    def _read(self, shard: StoredShard, number: int) -> FeatureExample:
        key, path = shard.keys[number], self.folder / shard.file
        try:
            file = self._opened(path)
            ids, mask, features_TMD, last_TD = (
                file.get_tensor(f"{key}/{part}") for part in ("ids", "mask", "features", "last")
            )
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(field=f"{path} {key}", expected="its tensors", actual=error) from error
        example = DraftExample(
            key, shard.domains[number], ids.numpy().astype(np.uint32), mask.numpy(), shard.policy_versions[number]
        )
        return FeatureExample(example, features_TMD, last_TD)

    def _opened(self, path: Path) -> Any:
        file = self._open.pop(path.name, None)
        if file is None:
            file = safe_open(path, framework="pt")
            if len(self._open) >= OPEN_SHARDS:
                self._open.pop(next(iter(self._open)))
        self._open[path.name] = file
        return file


class FeatureCacheWriter:
    """Adds examples to a cache, in shards of about `shard_bytes`; `close` writes the last one. `keys` are those
    that are safe on disk."""

    def __init__(self, folder: Path, origin: CacheOrigin, shard_bytes: int = 256 << 20) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shard_bytes = folder, shard_bytes
        if (folder / MANIFEST).exists():
            self._manifest = FeatureCache(folder, origin).manifest
        else:
            self._manifest = Manifest(origin=origin)
        self.keys = {key for shard in self._manifest.shards for key in shard.keys}
        self._waiting: list[FeatureExample] = []
        self._size = 0

    def append(self, items: Sequence[FeatureExample]) -> None:
        """A key that is there already is not stored again."""
        waiting = {item.example.key for item in self._waiting}
        for item in items:
            if item.example.key in self.keys or item.example.key in waiting:
                continue
            if item.last_TD is None:
                raise InvalidRequest(field=item.example.key, expected="final states", actual=None)
            self._waiting.append(item)
            waiting.add(item.example.key)
            self._size += cache_bytes(item.example.num_tokens, self._manifest.origin)
            if self._size >= self._shard_bytes:
                self.flush()
                waiting.clear()

    def flush(self) -> None:
        """Write what waits as one shard."""
        if not self._waiting:
            return
        origin, name = self._manifest.origin, f"shard-{len(self._manifest.shards):06d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for item in self._waiting:
            assert item.last_TD is not None
            key, dtype = item.example.key, DTYPES[origin.dtype]
            tensors[f"{key}/ids"] = torch.from_numpy(item.example.ids.astype(np.int32))
            tensors[f"{key}/mask"] = torch.from_numpy(item.example.mask.astype(bool))
            tensors[f"{key}/features"] = item.features_TMD.to("cpu", dtype).contiguous()
            tensors[f"{key}/last"] = item.last_TD.to("cpu", dtype).contiguous()
        partial = self._folder / f".{name}.partial"
        save_file(tensors, partial)
        os.replace(partial, self._folder / name)
        examples = [item.example for item in self._waiting]
        self._manifest.shards.append(
            StoredShard(
                file=name,
                num_bytes=(self._folder / name).stat().st_size,
                keys=[example.key for example in examples],
                domains=[example.domain for example in examples],
                tokens=[example.num_tokens for example in examples],
                policy_versions=[example.policy_version for example in examples],
            )
        )
        partial = self._folder / f".{MANIFEST}.partial"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self._manifest), indent=1))
        os.replace(partial, self._folder / MANIFEST)
        self.keys |= {example.key for example in examples}
        self._waiting, self._size = [], 0

    close = flush


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(field=str(path), expected="a manifest of cached states", actual=error) from error
    if manifest.format != 1:
        raise InvalidRequest(field=f"{path} format", expected=1, actual=manifest.format)
    return manifest
