"""What the target knew at every token, kept beside the drafter's context.

Owns where captured states lie and how a request's are read. They lie beside the keys and values of the drafter's
pool, under the target's page ids: whatever brings a drafter its context (a cached prefix, a fork, a resumed
sample, a captured step) brings them along, and they are of the policy version that the pages are of.
Ignores what is learnt from them (`trainer_bridge.drafter`).

Shapes: T tokens, M states a token, D hidden, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.memory.kv_pool import KVPool
from engine.memory.transfer import send
from engine.models.spec import ModelSpec


def with_states(drafter: ModelSpec, hidden: int, count: int) -> ModelSpec:
    """The shape of a pool that holds a drafter's keys and values and `count` states of `hidden` numbers."""
    return replace(drafter, beside=count * hidden)


class StateStore:
    """A part of `pool`. `layers` are the target layers whose outputs are kept, in order."""

    def __init__(self, pool: KVPool, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._pool = pool
        kept = pool.pages()[pool.num_layers :]
        made = len(kept) == 1 and kept[0].shape[-1] % len(self.layers) == 0
        assert made, "the pool was made for these states"

    def write(self, slots_T: torch.Tensor, features: dict[int, torch.Tensor]) -> None:
        """Outputs [T, D] of each layer at write slots, none below 0: two launches."""
        flat_TE = torch.cat([features[layer] for layer in self.layers], dim=1)
        self._pool.beside.index_copy_(0, slots_T, flat_TE)

    def read(self, pages_P: np.ndarray, count: int) -> torch.Tensor:
        """A copy [T, M, D] of the first `count` tokens that lie in these pages. The device may be busy."""
        size, slots_PS = self._pool.page_size, pages_P.astype(np.int64)[:, None]
        slots_T = (slots_PS * size + np.arange(size)).reshape(-1)[:count]
        flat_TE = self._pool.beside.index_select(0, send(slots_T, self._pool.device))
        return flat_TE.unflatten(1, (len(self.layers), -1))
