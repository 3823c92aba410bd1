"""Where the tensors of a LoRA policy's revision come from.

Owns reading a folder, uploads that take several bodies, and the rule that a source is one of the two.
Ignores what an adapter computes: engines check that.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from engine.adapters import translated
from engine.errors import InvalidRequest, NotFound, TooLarge
from engine.types import AdapterUpdate, NamedTensor, UpdateProgress
from engine.weights.folder import open_update_folder
from engine.weights.safetensors_file import SafetensorsFile
from lora.folder import read_config, weights_file
from rollout.protocol import AdapterSource

SILENCE_S = 60.0
"""An upload that nobody adds to for so long is dropped."""
UPLOAD_BYTES = 4 * 2**30
"""All uploads together."""


@dataclass(slots=True)
class _Upload:
    tensors: list[NamedTensor] = field(default_factory=list)
    size: int = 0
    last: float = 0.0


class AdapterSources:
    """`root` is the only folder that adapters may be read from (None: none are)."""

    def __init__(self, root: Path | None, silence_s: float = SILENCE_S) -> None:
        self._root = root
        self._silence_s = silence_s
        self._uploads: dict[str, _Upload] = {}

    def add(self, upload: str, tensors: list[NamedTensor]) -> UpdateProgress:
        """Keep tensors until a source names the upload."""
        self._drop_silent()
        more = sum(tensor.data.nbytes for tensor in tensors)
        held = sum(kept.size for kept in self._uploads.values())
        if held + more > UPLOAD_BYTES:
            raise TooLarge(field="upload", expected=f"at most {UPLOAD_BYTES} bytes of uploads", actual=held + more)
        kept = self._uploads.setdefault(upload, _Upload())
        kept.tensors += tensors
        kept.size += more
        kept.last = time.monotonic()
        return UpdateProgress(txn=upload, staged=len(kept.tensors), announced=0, staged_bytes=kept.size)

    async def read(self, source: AdapterSource) -> AdapterUpdate:
        """The whole revision. An upload is used up."""
        if (source.uri is None) == (source.config is None):
            named = "both" if source.uri is not None else "neither"
            raise InvalidRequest(field="adapter", expected="either uri, or config and tensors", actual=named)
        if source.uri is not None:
            if source.tensors or source.upload is not None:
                raise InvalidRequest(field="adapter.tensors", expected="none beside uri", actual="some")
            folder = open_update_folder(source.uri, self._root)
            return await asyncio.to_thread(read_adapter, folder, source.name, source.rev)
        assert source.config is not None
        tensors = [*self._take(source.upload), *source.tensors]
        return AdapterUpdate(name=source.name, config=source.config, tensors=tensors, rev=source.rev)

    def _take(self, upload: str | None) -> list[NamedTensor]:
        if upload is None:
            return []
        self._drop_silent()
        if upload not in self._uploads:
            raise NotFound(field="adapter.upload", expected=f"an upload of the last {self._silence_s} s", actual=upload)
        return self._uploads.pop(upload).tensors

    def _drop_silent(self) -> None:
        limit = time.monotonic() - self._silence_s
        self._uploads = {name: kept for name, kept in self._uploads.items() if kept.last >= limit}


def read_adapter(folder: Path, name: str, rev: int | None = None) -> AdapterUpdate:
    """The adapter that peft saved in a folder. Nothing is unpickled."""
    with translated():
        config, path = read_config(folder), weights_file(folder)
    file = SafetensorsFile(path)
    try:
        tensors = [
            NamedTensor(name=stored.name, dtype=stored.dtype, shape=list(stored.shape), data=file.read(stored).numpy())
            for stored in file.tensors.values()
        ]
        file.verify_unchanged()
    finally:
        file.close()
    return AdapterUpdate(name=name, config=config, tensors=tensors, rev=rev)
