"""Memory that can be given back between rollouts.

Owns which tags are resident and the moves between. Ignores who asks and whether the engine is
idle.

Weights, keys, states and adapters come back at the addresses they had, so that captured graphs outlive them; graphs
themselves are dropped and captured anew when first needed. Adapters are copied from the host again when
somebody needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.cache.prefix_cache import PrefixCache
from engine.errors import InvalidRequest
from engine.weights.arena import WeightArena

TAGS = ("weights", "kv", "graphs", "adapters")
LEVELS = ("offload", "discard")


class GraphOwner(Protocol):
    @property
    def graph_bytes(self) -> int:
        """Device memory that captured graphs hold."""
        ...

    def forget(self) -> None:
        """Drop all graphs."""
        ...


class AdapterMemory(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes held now; 0 while released, and before there is any adapter."""
        ...

    def release(self) -> None:
        """Give the memory back. What was there is on the host too."""
        ...

    def restore(self) -> None: ...


class CacheMemory(Protocol):
    """What pages or slots of the prefix cache lie in."""

    device: torch.device

    @property
    def bytes(self) -> int:
        """Bytes held now; 0 while released."""
        ...

    def release(self) -> None: ...

    def restore(self) -> None:
        """Empty, at the same addresses. Idempotent."""
        ...


class MemoryTags:
    """`pools` are all that "kv" stands for: a drafter's keys and recurrent states too. `missing` names what must
    come back before the engine may serve: released tags, and "weights" for as long as discarded ones have not been
    replaced by an update. Whoever captures `graphs` joins their owners. A drafter's weights come and go with the
    target's, but are always kept: updates bring the policy's alone."""

    def __init__(
        self,
        arena: WeightArena,
        pools: Sequence[CacheMemory],
        cache: PrefixCache,
        adapters: AdapterMemory,
        draft_arena: WeightArena | None = None,
    ) -> None:
        self._arena = arena
        self._pools = pools
        self._cache = cache
        self._adapters = adapters
        self._draft_arena = draft_arena
        self.graphs: list[GraphOwner] = []
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
        graphs = sum(owner.graph_bytes for owner in self.graphs)
        draft = 0 if self._draft_arena is None else self._draft_arena.num_bytes
        return {
            "weights": self._arena.num_bytes + draft,
            "kv": sum(pool.bytes for pool in self._pools),
            "graphs": graphs,
            "adapters": self._adapters.num_bytes,
        }

    def release(self, tags: list[str], level: str) -> tuple[dict[str, int], dict[str, int]]:
        self._check(tags)
        if level not in LEVELS:
            raise InvalidRequest(field="level", expected=f"one of {LEVELS}", actual=level)
        before = self.bytes()
        for tag in tags:
            if tag not in self._released:
                self._release(tag, keep_weights=level == "offload")
                self._released.add(tag)
        if any(pool.device.type == "cuda" for pool in self._pools):
            torch.cuda.empty_cache()
        return before, self.bytes()

    def resume(self, tags: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Raises `TooLarge` where memory is short; tags before the one it fails at are back then."""
        self._check(tags)
        before = self.bytes()
        for tag in tags:
            if tag == "kv":
                for pool in self._pools:
                    pool.restore()
            elif tag == "adapters":
                self._adapters.restore()
            elif tag == "weights":
                self._arena.restore()
                if self._draft_arena is not None:
                    self._draft_arena.restore()
            self._released.discard(tag)
        return before, self.bytes()

    def weights_filled(self) -> None:
        """A full update has been committed."""
        self._unfilled = False

    def _release(self, tag: str, keep_weights: bool) -> None:
        if tag == "kv":
            self._cache.reset()
            for pool in self._pools:
                pool.release()
        elif tag == "weights":
            # What was never filled since it was discarded is not worth keeping.
            self._arena.release(keep_weights and not self._unfilled)
            self._unfilled = self._unfilled or not keep_weights
            if self._draft_arena is not None:
                self._draft_arena.release(keep=True)
        elif tag == "adapters":
            self._adapters.release()
        else:
            for owner in self.graphs:
                owner.forget()

    def _check(self, tags: list[str]) -> None:
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown or not tags:
            raise InvalidRequest(field="tags", expected=f"some of {TAGS}", actual=unknown or tags)
