"""Drafts through recurrent layers: verified beside the state, kept ones replayed into it.

Owns both passes in terms of `Mixer.decode`, so that a kept token's output and what it does to the state have
the bits of a plain step, whatever kind the mixer is. Ignores which tokens are kept (`engine.scheduler.states`)
and whose a ring is (`engine.memory.replay_ring`).

All runs of a pass go token by token together. One that has ended goes on with what is at hand, where nobody reads
it: in a copy of its state while verifying, in scratch while replaying.

Shapes: T tokens of rows that verify, B rows, J tokens of the longest, I inputs, O outputs, S slots, R rings, C
tokens of a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.memory.replay_ring import ReplayRings, Run
from engine.memory.transfer import send

if TYPE_CHECKING:
    from engine.layers.mixer import Mixer, States


@dataclass(slots=True)
class VerifyStep:
    """Rows that verify drafts, which are a step's first `num_tokens` tokens. Token j of row b is number
    `tokens_JB[j, b]` of the step; token t is token `places_T[t]` of row `rows_T[t]` and goes to ring
    `rings_T[t]`."""

    rings: ReplayRings
    num_rows: int
    num_tokens: int
    slots_B: torch.Tensor
    tokens_JB: torch.Tensor
    rows_T: torch.Tensor
    rings_T: torch.Tensor
    places_T: torch.Tensor

    @staticmethod
    def of(batch: ForwardBatch, rings: ReplayRings) -> VerifyStep | None:
        """Lends rings to the batch's provisional rows; None where it has none. Neighbouring rows with one slot are
        tokens of one request."""
        assert batch.state_slots is not None, "rows of a recurrent model have states"
        slots: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        for row in range(batch.provisional):
            slot, count = batch.state_slots[row], batch.query_lens[row]
            if slot and slots and slots[-1] == slot:
                counts[-1] += count
            else:
                slots.append(slot)
                starts.append(batch.seq_lens[row] - count)
                counts.append(count)
        if not slots:
            return None
        lent = [rings.open(*row) for row in zip(slots, starts, counts, strict=True)]
        counts_B = np.array(counts)
        firsts_B = np.cumsum(counts_B) - counts_B
        rows_T = np.repeat(np.arange(len(slots)), counts_B)
        places_T = np.arange(len(rows_T)) - firsts_B[rows_T]
        tokens_JB = firsts_B + np.minimum(np.arange(counts_B.max())[:, None], counts_B - 1)
        parts = [np.array(slots), tokens_JB, rows_T, np.array(lent)[rows_T], places_T]
        on_device = [send(part.astype(np.int64), batch.input_ids_T.device) for part in parts]
        return VerifyStep(rings, len(slots), len(rows_T), *on_device)


def verify(mixer: Mixer, inputs_TI: torch.Tensor, states: States, step: VerifyStep) -> torch.Tensor:
    """out_TO of rows that verify drafts. Their states stay as they are, and their inputs go to their rings."""
    step.rings.layer(mixer.layer)[step.rings_T, step.places_T] = inputs_TI
    copies = tuple(state.index_select(0, step.slots_B) for state in states)
    own_B = torch.arange(step.num_rows, device=inputs_TI.device)
    outputs = [mixer.decode(inputs_TI[tokens_B], copies, own_B) for tokens_B in step.tokens_JB]
    return torch.stack(outputs)[step.places_T, step.rows_T]


@dataclass(slots=True)
class ReplayStep:
    """Tokens to replay: number j of run b is token `places_JB[j, b]` of ring `rings_B[b]`, and goes to the state
    in `slots_JB[j, b]`, which is scratch behind the run's end."""

    rings: ReplayRings
    rings_B: torch.Tensor
    places_JB: torch.Tensor
    slots_JB: torch.Tensor

    @staticmethod
    def of(runs: Sequence[Run], rings: ReplayRings, device: torch.device) -> ReplayStep:
        slots_B, rings_B, firsts_B, lasts_B = np.array(runs, dtype=np.int64).T
        places_JB = firsts_B + np.arange((lasts_B - firsts_B).max())[:, None]
        slots_JB = np.where(places_JB < lasts_B, slots_B, 0)
        parts = rings_B, np.minimum(places_JB, lasts_B - 1), slots_JB
        return ReplayStep(rings, *(send(part, device) for part in parts))


def replay(mixer: Mixer, states: States, step: ReplayStep) -> None:
    """Bring the states forward by what their rings hold, as plain steps would have."""
    inputs_RCI = step.rings.layer(mixer.layer)
    for places_B, slots_B in zip(step.places_JB, step.slots_JB, strict=True):
        mixer.decode(inputs_RCI[step.rings_B, places_B], states, slots_B)
