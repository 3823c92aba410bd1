"""Storage for recurrent states, in slots.

Owns the tensors, copies between slots, and the newest state of each running row at a page's end: the one a
prefix cache can use, which cannot be made from a later one. Ignores who holds which slot: slot 0 is scratch
that padding may write and nobody owns.

Shapes: S slots, K a convolution's width, D hidden.
"""

from __future__ import annotations

import torch

from engine.models.shape import ModelSpec


class StatePool:
    """`layer(i)` are the states [S, ...] of model layer i. A slot with a `partner` (`pair`) is a running
    row's: whenever it stands at a page's end, `track` copies it there."""

    def __init__(
        self, spec: ModelSpec, num_slots: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        assert num_slots > 1, f"a pool of {num_slots} slots holds nothing"
        self.num_slots = num_slots
        self._page_size = page_size
        shape = (num_slots, spec.conv_width - 1, spec.hidden)
        self._layers = {
            index: torch.zeros(shape, dtype=dtype, device=device)
            for index, layer in enumerate(spec.layers)
            if layer.kind == "conv"
        }
        self._partner: dict[int, int] = {}
        self._tracked: dict[int, int] = {}

    @property
    def slot_bytes(self) -> int:
        return sum(layer[0].nbytes for layer in self._layers.values())

    def layer(self, index: int) -> torch.Tensor:
        return self._layers[index]

    def copy(self, source: int, target: int) -> None:
        for layer in self._layers.values():
            layer[target].copy_(layer[source])

    def clear(self, slot: int) -> None:
        """The state before the first token."""
        for layer in self._layers.values():
            layer[slot].zero_()

    def pair(self, slot: int, partner: int) -> None:
        """From now on `partner` receives the states of `slot` at ends of pages."""
        self._partner[slot] = partner
        self._tracked[slot] = -1

    def unpair(self, slot: int) -> int:
        """The partner, which receives nothing more."""
        del self._tracked[slot]
        return self._partner.pop(slot)

    def partner(self, slot: int) -> int:
        return self._partner[slot]

    def tracked(self, slot: int) -> int:
        """After how many tokens the state in the partner is; -1 for none yet."""
        return self._tracked[slot]

    def track(self, slots: list[int], lengths: list[int]) -> None:
        """The states in `slots` are now those after `lengths` tokens."""
        ending = [
            (slot, length)
            for slot, length in zip(slots, lengths, strict=True)
            if slot and length % self._page_size == 0
        ]
        if not ending:
            return
        device = next(iter(self._layers.values())).device
        sources = torch.tensor([slot for slot, _ in ending], device=device)
        targets = torch.tensor([self._partner[slot] for slot, _ in ending], device=device)
        for layer in self._layers.values():
            layer.index_copy_(0, targets, layer.index_select(0, sources))
        self._tracked.update(ending)
