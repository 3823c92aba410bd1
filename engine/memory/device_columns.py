"""Ring columns that only some rows want: every definition's log-probability, entropy, alternatives.

Owns their storage on the device, made when a row first asks, and which slots have alternatives.
Ignores who computes them. `generation` counts the times a buffer moved: whoever remembers addresses
starts again when it changes.

Shapes: C columns, S slots, W ring width, R rows with alternatives, K the most alternatives.
"""

from __future__ import annotations

import torch

from engine.memory.lent_rows import LentRows, grown
from engine.types import Want

COLUMNS = ("processed", "temperature", "raw", "entropy")


class DeviceColumns:
    """`values_CSW` float32 is empty until a row wants more than its own log-probability. A slot with
    `top_count_S` alternatives leaves them in row `top_row_S` of the two `top` rings: ids int32 and
    log-probabilities float32, in no order."""

    def __init__(self, num_slots: int, ring: int, device: torch.device) -> None:
        self.generation = 0
        self._rows = LentRows()
        self._row_of: dict[int, int] = {}
        self.values_CSW = torch.zeros(len(COLUMNS), 0, ring, dtype=torch.float32, device=device)
        self.top_row_S = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.top_count_S = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.top_ids_RWK = torch.zeros(0, ring, 0, dtype=torch.int32, device=device)
        self.top_logprobs_RWK = torch.zeros(0, ring, 0, dtype=torch.float32, device=device)

    def admit(self, slots: list[int], wants: list[Want]) -> None:
        self.release(slots)
        for slot, want in zip(slots, wants, strict=True):
            if (want.extra_logprobs or want.entropy) and not self.values_CSW.shape[1]:
                ring, slots_in_all = self.values_CSW.shape[2], len(self.top_row_S)
                self.values_CSW = self.values_CSW.new_zeros(len(COLUMNS), slots_in_all, ring)
                self.generation += 1
            if want.top_logprobs:
                self._row_of[slot] = self._top_row(slot, want.top_logprobs)
                self.top_row_S[slot].fill_(self._row_of[slot])
                self.top_count_S[slot].fill_(want.top_logprobs)
            elif slot in self._row_of:
                del self._row_of[slot]
                self.top_count_S[slot].fill_(0)

    def release(self, slots: list[int]) -> None:
        """Slots that nobody steps any more."""
        for slot in slots:
            self._rows.give_back(slot)

    def top_row(self, slot: int) -> int:
        """The row of a slot that asked for alternatives when it was admitted."""
        return self._row_of[slot]

    def _top_row(self, slot: int, count: int) -> int:
        row, _ = self._rows.take(slot, slot)
        rows, ring, width = self.top_ids_RWK.shape
        if self._rows.capacity > rows:
            self.top_ids_RWK = grown(self.top_ids_RWK, self._rows.capacity)
            self.top_logprobs_RWK = grown(self.top_logprobs_RWK, self._rows.capacity)
            self.generation += 1
        if count > width:
            # Results of a burst in flight may still lie here.
            wider = 1 << (count - 1).bit_length()
            for name in ("top_ids_RWK", "top_logprobs_RWK"):
                old = getattr(self, name)
                new = old.new_zeros(old.shape[0], ring, wider)
                new[:, :, :width] = old
                setattr(self, name, new)
            self.generation += 1
        return row
