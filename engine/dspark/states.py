"""What the target knew at every token, kept beside the drafter's context.

Owns where captured states lie and how a request's are read. They take further layers of the drafter's
pool, under the target's page ids: whatever brings a drafter its context (a cached prefix, a fork, a resumed
sample, a captured step) brings them along, and they are of the policy version that the pages are of.
Ignores what is learnt from them (`trainer_bridge.drafter`).

Shapes: T tokens, M states a token, D hidden, P page-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.memory.kv_pool import KVPool
from engine.models.spec import ModelSpec


def with_states(drafter: ModelSpec, hidden: int, count: int) -> ModelSpec:
    """The shape of a pool that holds a drafter's keys and values and `count` states of `hidden` numbers."""
    return replace(drafter, num_layers=drafter.num_layers + _extra_layers(drafter, hidden, count))


class StateStore:
    """The part of `pool` behind the drafter's own layers. `layers` are the target layers whose outputs are
    kept, in order."""

    def __init__(self, pool: KVPool, drafter: ModelSpec, hidden: int, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._pool, self._first, self._hidden = pool, drafter.num_layers, hidden
        self._extra = _extra_layers(drafter, hidden, len(self.layers))
        assert pool.num_layers == self._first + self._extra, "the pool was made for these states"

    def write(self, slots_T: torch.Tensor, features: dict[int, torch.Tensor]) -> None:
        """Outputs [T, D] of each layer at write slots. Launches copies alone."""
        width = 2 * self._pool.num_kv_heads * self._pool.head_dim
        flat_TE = torch.cat([features[layer] for layer in self.layers], dim=1)
        padding = self._extra * width - flat_TE.shape[1]
        if padding:
            flat_TE = torch.nn.functional.pad(flat_TE, (0, padding))
        for place in range(self._extra):
            part_TW = flat_TE[:, place * width : (place + 1) * width]
            heads = part_TW.unflatten(1, (2 * self._pool.num_kv_heads, self._pool.head_dim))
            self._pool.write(self._first + place, slots_T, heads)

    def read(self, pages_P: torch.Tensor, count: int) -> torch.Tensor:
        """A copy [T, M, D] of the first `count` tokens that lie in these pages."""
        size = self._pool.page_size
        places_T = torch.arange(count, device=pages_P.device)
        slots_T = pages_P[places_T // size].long() * size + places_T % size
        parts = [self._pool.tokens(self._first + place)[slots_T].flatten(1) for place in range(self._extra)]
        flat_TE = torch.cat(parts, dim=1)[:, : len(self.layers) * self._hidden]
        return flat_TE.unflatten(1, (len(self.layers), self._hidden))


def _extra_layers(drafter: ModelSpec, hidden: int, count: int) -> int:
    return -(-count * hidden // (2 * drafter.num_kv_heads * drafter.head_dim))
