"""Drafts from a request's own past, for models without a neural drafter.

Owns one table per slot from runs of ids to where they were last followed. Ignores probabilities: there
are none, so its drafts are verified against the target alone.

Shapes: B rows, G drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.dspark.drafter import Committed, DrafterTraits, DraftRows, Proposal


class _History:
    """Ids of one request, and for every run of `shortest` to `longest` ids where its last continuation
    starts. The run that ends the history is not in the table yet: it has none."""

    def __init__(self, shortest: int, longest: int) -> None:
        self.ids: list[int] = []
        self._lengths = range(longest, shortest - 1, -1)
        self._next: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        for length in self._lengths:
            if len(self.ids) >= length:
                self._next[tuple(self.ids[-length:])] = len(self.ids)
        self.ids.append(token)

    def continuation(self, anchor: int, most: int) -> list[int]:
        """What followed the longest run that ends with `anchor`; nothing where no run is known."""
        tail = [*self.ids[-self._lengths[0] :], anchor]
        for length in self._lengths:
            if len(tail) < length:
                continue
            run = tail[-length:]
            # The run that ends the history is followed by the anchor itself.
            start = len(self.ids) if self.ids[-length:] == run else self._next.get(tuple(run))
            if start is not None:
                known = [*self.ids[start:], anchor]
                # Where the past ends, what was proposed goes on repeating it.
                return [known[place % len(known)] for place in range(most)]
        return []


class NgramDrafter:
    """Looks for runs of `longest` ids first, then shorter ones down to `shortest`."""

    def __init__(self, max_drafts: int, shortest: int = 2, longest: int = 4) -> None:
        assert 1 <= shortest <= longest and max_drafts >= 1, "an n-gram drafter needs runs and drafts"
        self.traits = DrafterTraits(name="ngram", max_drafts=max_drafts, foreseen=True)
        self._bounds = (shortest, longest)
        self._histories: dict[int, _History] = {}

    def admit(self, slot: int, ids: np.ndarray) -> None:
        """All ids but the last, which is the first anchor, are history whether cached or not."""
        history = self._histories[slot] = _History(*self._bounds)
        for token in ids[:-1].tolist():
            history.append(token)

    def release(self, slot: int) -> None:
        self._histories.pop(slot, None)

    def commit(self, committed: Committed) -> None:
        ids, positions, start = committed.ids_T.tolist(), committed.positions_T.tolist(), 0
        for slot, count in zip(committed.slots, committed.counts, strict=True):
            history = self._histories.get(slot)
            for place in range(start, start + count):
                # Tokens given at admission come again as their state is computed.
                if history is not None and positions[place] == len(history.ids):
                    history.append(ids[place])
            start += count

    def propose(self, rows: DraftRows) -> Proposal:
        most = self.traits.max_drafts
        ids_BG = torch.zeros(len(rows.slots), most, dtype=torch.int64)
        lens = []
        for row, (slot, anchor) in enumerate(zip(rows.slots, rows.anchor_ids_B.tolist(), strict=True)):
            drafts = self._histories[slot].continuation(anchor, most)
            ids_BG[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
            lens.append(len(drafts))
        return Proposal(ids_BG.to(rows.anchor_ids_B.device), lens)
