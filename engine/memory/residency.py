"""Memory that can be given back between rollouts.

Owns which tags are resident and the moves between. Ignores who asks and whether the engine is
idle.

Weights and keys come back at the addresses they had, so that captured graphs outlive both; graphs
themselves are dropped and captured anew when first needed.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.cache.prefix_cache import PrefixCache
from engine.errors import InvalidRequest
from engine.memory.kv_pool import KVPool
from engine.weights.arena import WeightArena

TAGS = ("weights", "kv", "graphs")
LEVELS = ("offload", "discard")


class GraphOwner(Protocol):
    @property
    def graph_bytes(self) -> int:
        """Device memory that captured graphs hold."""
        ...

    def forget(self) -> None:
        """Drop all graphs."""
        ...


class MemoryTags:
    """`missing` names what must come back before the engine may serve: released tags, and
    "weights" for as long as discarded ones have not been replaced by an update. `graphs` is set
    once there is a loop that captures any."""

    def __init__(self, arena: WeightArena, pool: KVPool, cache: PrefixCache) -> None:
        self._arena = arena
        self._pool = pool
        self._cache = cache
        self.graphs: GraphOwner | None = None
        self._released: set[str] = set()
        self._unfilled = False

    @property
    def missing(self) -> set[str]:
        return self._released | ({"weights"} if self._unfilled else set())

    @property
    def weights_resident(self) -> bool:
        """Whether parameters have storage, filled or not: an update may be staged."""
        return "weights" not in self._released

    def bytes(self) -> dict[str, int]:
        graphs = 0 if self.graphs is None else self.graphs.graph_bytes
        return {"weights": self._arena.num_bytes, "kv": self._pool.bytes, "graphs": graphs}

    def release(self, tags: list[str], level: str) -> tuple[dict[str, int], dict[str, int]]:
        self._check(tags)
        if level not in LEVELS:
            raise InvalidRequest(field="level", expected=f"one of {LEVELS}", actual=level)
        before = self.bytes()
        for tag in tags:
            if tag not in self._released:
                self._release(tag, keep_weights=level == "offload")
                self._released.add(tag)
        if self._pool.device.type == "cuda":
            torch.cuda.empty_cache()
        return before, self.bytes()

    def resume(self, tags: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Raises `TooLarge` where memory is short; tags before the one it fails at are back then."""
        self._check(tags)
        before = self.bytes()
        for tag in tags:
            if tag == "kv":
                self._pool.restore()
            elif tag == "weights":
                self._arena.restore()
            self._released.discard(tag)
        return before, self.bytes()

    def weights_filled(self) -> None:
        """A full update has been committed."""
        self._unfilled = False

    def _release(self, tag: str, keep_weights: bool) -> None:
        if tag == "kv":
            self._cache.reset()
            self._pool.release()
        elif tag == "weights":
            # What was never filled since it was discarded is not worth keeping.
            self._arena.release(keep_weights and not self._unfilled)
            self._unfilled = self._unfilled or not keep_weights
        elif self.graphs is not None:
            self.graphs.forget()

    def _check(self, tags: list[str]) -> None:
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown or not tags:
            raise InvalidRequest(field="tags", expected=f"some of {TAGS}", actual=unknown or tags)
