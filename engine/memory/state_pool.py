"""Storage for recurrent states, in slots.

Owns the tensors, copies between slots, and the newest state of each running row on the grid of pages and
chunks: the one a prefix cache can use, which cannot be made from a later one. What a slot holds is the layout's
(`ModelSpec.state_layout`). Ignores who holds which slot: slot 0 is scratch
that padding may write and nobody owns.

Shapes: S slots.
"""

from __future__ import annotations

import math

import torch

from engine.memory.replay_ring import ReplayRings
from engine.models.mixers import StateLayout

UNKNOWN = -1


class StatePool:
    """A slot with a `partner` (`pair`) is a running row's: whenever it stands on the grid, `track` copies it
    there."""

    def __init__(self, layout: StateLayout, num_slots: int, page_size: int, device: torch.device | str) -> None:
        assert num_slots > 1, f"a pool of {num_slots} slots holds nothing"
        self.num_slots = num_slots
        self.layout = layout
        self.grid = math.lcm(page_size, layout.grid)
        """States are kept after multiples of this many tokens."""
        self._layers = {
            index: tuple(torch.zeros(num_slots, *each.shape, dtype=each.dtype, device=device) for each in layer)
            for index, layer in layout.layers.items()
        }
        self.tensors = [tensor for layer in self._layers.values() for tensor in layer]
        """All of them [S, ...]."""
        self.rings: ReplayRings | None = None
        """Set where drafts are verified."""
        self._partner: dict[int, int] = {}
        self._pairing: dict[int, int] = {}
        self._pairings = 0
        self._tracked: dict[int, int] = {}

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """Its tensors [S, ...], in the layout's order."""
        return self._layers[index]

    def copy(self, source: int, target: int) -> None:
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])

    def clear(self, slot: int) -> None:
        """The state before the first token."""
        for tensor in self.tensors:
            tensor[slot].zero_()

    def pair(self, slot: int, partner: int) -> None:
        """From now on `partner` receives the states of `slot` on the grid."""
        self._partner[slot] = partner
        self._tracked[slot] = UNKNOWN
        self._pairings += 1
        self._pairing[slot] = self._pairings

    def unpair(self, slot: int) -> int:
        """The partner, which receives nothing more."""
        del self._tracked[slot], self._pairing[slot]
        return self._partner.pop(slot)

    def partner(self, slot: int) -> int:
        return self._partner[slot]

    def tracked(self, slot: int) -> int:
        """After how many tokens the state in the partner is; UNKNOWN for none yet."""
        return self._tracked[slot]

    def pairing(self, slot: int) -> int:
        """What tells this pairing of the slot from any other; 0 where it has no partner."""
        return self._pairing.get(slot, 0)

    def note(self, slot: int, length: int) -> None:
        """The state in the partner is that after `length` tokens, or UNKNOWN."""
        self._tracked[slot] = length

    def track(self, slots: list[int], lengths: list[int]) -> None:
        """The states in `slots` are now those after `lengths` tokens."""
        ending = [
            (slot, length) for slot, length in zip(slots, lengths, strict=True) if slot and length % self.grid == 0
        ]
        if not ending:
            return
        device = self.tensors[0].device
        sources = torch.tensor([slot for slot, _ in ending], device=device)
        targets = torch.tensor([self._partner[slot] for slot, _ in ending], device=device)
        for tensor in self.tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        self._tracked.update(ending)
