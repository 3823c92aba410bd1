"""Memory that can be given back between rollouts.

Owns which tags are resident and the moves between. Ignores who asks and whether the engine is
idle.

Parameters keep their identity; their storage goes and comes. Buffers that no checkpoint holds
(rotary tables) are small and always stay, so that nothing can be forgotten on return.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.cache.prefix_cache import PrefixCache
from engine.errors import InvalidRequest
from engine.memory.kv_pool import KVPool

TAGS = ("weights", "kv")
LEVELS = ("offload", "discard")


class MemoryTags:
    """`missing` names what must come back before the engine may serve: released tags, and
    "weights" for as long as discarded ones have not been replaced by an update."""

    def __init__(self, model: nn.Module, pool: KVPool, cache: PrefixCache) -> None:
        self._model = model
        self._pool = pool
        self._cache = cache
        self._released: set[str] = set()
        self._offloaded: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[torch.Size, torch.device]] = {}
        self._unfilled = False

    @property
    def missing(self) -> set[str]:
        return self._released | ({"weights"} if self._unfilled else set())

    @property
    def weights_resident(self) -> bool:
        """Whether parameters have storage, filled or not: an update may be staged."""
        return "weights" not in self._released

    def bytes(self) -> dict[str, int]:
        weights = sum(param.nbytes for param in self._model.parameters())
        return {"weights": weights, "kv": self._pool.bytes}

    def release(self, tags: list[str], level: str) -> tuple[dict[str, int], dict[str, int]]:
        self._check(tags)
        if level not in LEVELS:
            raise InvalidRequest(field="level", expected=f"one of {LEVELS}", actual=level)
        before = self.bytes()
        for tag in tags:
            if tag in self._released:
                continue
            if tag == "kv":
                self._cache.reset()
                self._pool.release()
            else:
                self._release_weights(level)
            self._released.add(tag)
        self._return_to_driver()
        return before, self.bytes()

    def resume(self, tags: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        self._check(tags)
        before = self.bytes()
        for tag in tags:
            if tag not in self._released:
                continue
            if tag == "kv":
                self._pool.restore()
            else:
                self._restore_weights()
            self._released.discard(tag)
        return before, self.bytes()

    def weights_filled(self) -> None:
        """A full update has been committed."""
        self._unfilled = False

    def _release_weights(self, level: str) -> None:
        self._shapes = {name: (param.shape, param.device) for name, param in self._model.named_parameters()}
        for name, param in self._model.named_parameters():
            if level == "offload":
                self._offloaded[name] = param.data.to("cpu")
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
        self._unfilled = self._unfilled or level == "discard"

    def _restore_weights(self) -> None:
        for name, param in self._model.named_parameters():
            shape, device = self._shapes[name]
            kept = self._offloaded.pop(name, None)
            if kept is not None:
                param.data = kept.to(device)
            else:
                # NaN, so that a parameter which no update filled can never pass for a weight.
                param.data = torch.full(shape, float("nan"), dtype=param.dtype, device=device)

    def _check(self, tags: list[str]) -> None:
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown or not tags:
            raise InvalidRequest(field="tags", expected=f"some of {TAGS}", actual=unknown or tags)

    def _return_to_driver(self) -> None:
        if self._pool.device.type == "cuda":
            torch.cuda.empty_cache()
