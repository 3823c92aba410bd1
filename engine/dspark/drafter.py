"""What a drafter is.

Owns the protocol that fits a block drafter, an n-gram table and a chain of prediction layers, and
the records that pass between a drafter and the loops. Ignores how drafts are verified
(`engine.dspark.acceptance`) and how many of them are worth it (`engine.dspark.planner`).

Life of a request: `admit` when it takes a slot, `commit` for every token whose target state has been
computed since (prompt chunks, plain steps, verified steps alike, so that drafting may begin at any
step), `propose` in steps that draft, `release` when the slot is given back.

Shapes: B rows, G drafts a row, V vocabulary, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.models.spec import ModelSpec

Pick = Callable[[int, torch.Tensor], torch.Tensor]
"""(draft number k, logits_BV of that draft) -> ids int64 [B]. May edit the logits in place; what it
leaves there is what it drew from, and what the acceptance test reads."""


@dataclass(frozen=True, slots=True)
class DrafterTraits:
    """What the engine must know before it runs a drafter.

    `max_drafts` is the most drafts a round yields. `captured_layers` are the target layers whose
    outputs `commit` needs. `kv` is the shape of the states it keeps under the target's page ids, None
    for none. A round writes states at `block` positions from the anchor on; a row whose block would pass
    position `context_len` is not drafted for. `foreseen`: drafts follow from what is committed at hardly
    any cost, so that a step may be planned knowing them.
    """

    name: str
    max_drafts: int
    captured_layers: tuple[int, ...] = ()
    kv: ModelSpec | None = None
    block: int = 0
    context_len: int = 2**31
    foreseen: bool = False
    has_probabilities: bool = False
    has_confidence: bool = False

    @property
    def lead(self) -> int:
        """Slots of a block before the first that yields a draft."""
        return max(0, self.block - self.max_drafts)


@dataclass(slots=True)
class Committed:
    """Tokens whose target state exists now, of all rows back to back.

    `counts[b]` tokens belong to the request in `slots[b]`, in sequence order. Token t is `ids_T[t]` at
    `positions_T[t]`; its state lies at `write_slots_T[t]`, page * page size + offset, -1 for what is nobody's.
    `features` holds the output [T, D] of each captured layer.
    """

    slots: Sequence[int]
    counts: Sequence[int]
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    write_slots_T: torch.Tensor
    features: dict[int, torch.Tensor]


@dataclass(slots=True)
class DraftRows:
    """The rows of one round.

    `anchor_ids_B` are the last committed tokens, at `positions_B`; their own target state does not exist
    yet. `page_tables_BP` int32 must have room for the block's slots. `pick` chooses drafts from
    logits; drafters without probabilities never call it.
    """

    slots: Sequence[int]
    anchor_ids_B: torch.Tensor
    positions_B: torch.Tensor
    page_tables_BP: torch.Tensor
    pick: Pick


@dataclass(slots=True)
class Proposal:
    """`ids_BG` int64, of which the first `lens[b]` are drafts. Without probabilities `logits_BGV` is
    None; else it holds the very logits that `pick` drew from. `confidence_BG` are uncalibrated
    logits of "accepted, given that those before were", None where the drafter has none. `log_q_BG` float32 is
    given instead of logits by who knows only the drafts' own.
    """

    ids_BG: torch.Tensor
    lens: list[int]
    logits_BGV: torch.Tensor | None = None
    confidence_BG: torch.Tensor | None = None
    log_q_BG: np.ndarray | None = None


class Drafter(Protocol):
    traits: DrafterTraits

    def admit(self, slot: int, ids: np.ndarray) -> None:
        """A request takes `slot` with these tokens, some of which may come from the cache."""
        ...

    def commit(self, committed: Committed) -> None:
        """Take in tokens; only their order within a request matters."""
        ...

    def propose(self, rows: DraftRows) -> Proposal:
        """Drafts for positions after each anchor. Changes no state that outlives the round."""
        ...

    def release(self, slot: int) -> None: ...
