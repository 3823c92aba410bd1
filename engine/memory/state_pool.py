"""Storage for recurrent states, in slots.

Owns the tensors, copies between slots, and the newest state of each running row on the grid of pages and
chunks: the one a prefix cache can use, which cannot be made from a later one. What a slot holds is the layout's
(`ModelSpec.state_layout`). Ignores who holds which slot: slot 0 is scratch
that padding may write and nobody owns. Rings, where there are any, come and go with the states.

Shapes: S slots.
"""

from __future__ import annotations

import math

import torch

from engine.errors import Paused
from engine.memory.replay_ring import ReplayRings
from engine.memory.slab import SlabTensors
from engine.models.mixers import StateLayout

UNKNOWN = -1


class StatePool:
    """A slot with a `partner` (`pair`) is a running row's: whenever it stands on the grid, `track` copies it
    there. All tensors are parts of one slab. `generation` rises whenever contents change other than by slots."""

    def __init__(self, layout: StateLayout, num_slots: int, page_size: int, device: torch.device | str) -> None:
        assert num_slots > 1, f"a pool of {num_slots} slots holds nothing"
        self.num_slots = num_slots
        self.device = torch.device(device)
        self.layout = layout
        self.grid = math.lcm(page_size, layout.grid)
        """States are kept after multiples of this many tokens."""
        kinds = [((num_slots, *each.shape), each.dtype) for layer in layout.layers.values() for each in layer]
        self._memory = SlabTensors(kinds, device, "states")
        self.tensors = self._memory.tensors
        """All of them [S, ...]."""
        left = iter(self.tensors)
        self._layers = {index: tuple(next(left) for _ in layer) for index, layer in layout.layers.items()}
        self.rings: ReplayRings | None = None
        """Set where drafts are verified."""
        self.generation = 0
        self._partner: dict[int, int] = {}
        self._pairing: dict[int, int] = {}
        self._pairings = 0
        self._tracked: dict[int, int] = {}

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """Its tensors [S, ...], in the layout's order."""
        self._require()
        return self._layers[index]

    @property
    def bytes(self) -> int:
        """Bytes held now, rings included; 0 while released."""
        return self._memory.bytes + (0 if self.rings is None else self.rings.bytes)

    @property
    def released(self) -> bool:
        return self._memory.released

    def release(self) -> None:
        """Give the memory back, when no slot is anybody's. Idempotent; using states raises `Paused` until
        `restore`."""
        assert not self._partner, f"states in slots {list(self._partner)} are in use"
        if self.rings is not None:
            self.rings.release()
        self._memory.release()
        self.generation += 1

    def restore(self) -> None:
        """Take memory again, zeros, at the same addresses. Idempotent."""
        if self.rings is not None:
            self.rings.restore()
        if self.released:
            self._memory.restore()
            self.generation += 1

    def fill(self, value: float) -> None:
        """Set every element, scratch and rings included: tests poison what nobody has written."""
        self._require()
        for tensor in self.tensors:
            tensor.fill_(value)
        if self.rings is not None:
            self.rings.fill(value)
        self.generation += 1

    def copy(self, source: int, target: int) -> None:
        self._require()
        for tensor in self.tensors:
            tensor[target].copy_(tensor[source])

    def clear(self, slot: int) -> None:
        """The state before the first token."""
        self._require()
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
        sources = torch.tensor([slot for slot, _ in ending], device=self.device)
        targets = torch.tensor([self._partner[slot] for slot, _ in ending], device=self.device)
        for tensor in self.tensors:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        self._tracked.update(ending)

    def _require(self) -> None:
        if self.released:
            raise Paused("the states are released; resume memory first")
