"""How to bring a fresh engine to the fleet's LoRA policies.

Owns a spool on disk with one file for every revision that requests may still ask for. Ignores what the
tensors mean.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.types import AdapterUpdate
from rollout.codec import decode, encode
from rollout.routing.replica import AdapterKey
from rollout.wire_limits import DEFAULT_LIMITS

_OWN = replace(DEFAULT_LIMITS, body_bytes=2**40)
"""Files of our own were within the limits when they came, in however many bodies."""


class AdapterStore:
    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._files: dict[AdapterKey, Path] = {}
        self._count = 0
        spool.mkdir(parents=True, exist_ok=True)

    def put(self, update: AdapterUpdate) -> None:
        assert update.rev is not None, "a revision is numbered before it is kept"
        self._count += 1
        path = self._spool / f"{self._count:08d}.adapter"
        path.write_bytes(encode(update))
        self._files[update.name, update.rev] = path

    def get(self, key: AdapterKey) -> AdapterUpdate | None:
        """None for a revision that was dropped meanwhile."""
        path = self._files.get(key)
        try:
            return None if path is None else decode(path.read_bytes(), AdapterUpdate, _OWN)
        except FileNotFoundError:
            return None

    def drop(self, key: AdapterKey) -> None:
        path = self._files.pop(key, None)
        if path is not None:
            path.unlink(missing_ok=True)
