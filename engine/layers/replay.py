"""Drafts through recurrent layers: verified beside the state, kept ones replayed into it.

Owns both passes, each a `Mixer.steps` over rows of several tokens, so that a kept token's output and what it
does to the state have the bits of a plain step, whatever kind the mixer is; and `steps` in terms of `decode`.
Ignores which tokens are kept (`engine.scheduler.states`) and whose a ring is (`engine.memory.replay_ring`).

Shapes: T tokens of R rows back to back, J tokens of the longest row, I inputs, O outputs, C tokens of a ring.
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


class StepRows:
    """Rows of several tokens: tokens [ends_R1[r], ends_R1[r + 1]) belong to the state in `slots_R[r]`, and token t
    is number `places_T[t]` of row `rows_T[t]`. All int64 on the device."""

    def __init__(self, slots: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, device: torch.device):
        self._slots_R, self._counts_R = np.array(slots, dtype=np.int64), np.array(counts, dtype=np.int64)
        ends_R1 = np.append(0, np.cumsum(self._counts_R))
        rows_T = np.repeat(np.arange(len(self._counts_R)), self._counts_R)
        self._starts_R = ends_R1[:-1]
        parts = self._slots_R, ends_R1, rows_T, np.arange(len(rows_T)) - self._starts_R[rows_T]
        self.slots_R, self.ends_R1, self.rows_T, self.places_T = (send(part, device) for part in parts)
        self._columns: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows side by side: which token is number j of each row, and its state's slot, [J, R] each. A row that
        has ended goes on with its last token, in scratch."""
        if self._columns is None:
            place_J1 = np.arange(self._counts_R.max())[:, None]
            tokens_JR = self._starts_R + np.minimum(place_J1, self._counts_R - 1)
            slots_JR = np.where(place_J1 < self._counts_R, self._slots_R, 0)
            device = self.slots_R.device
            self._columns = send(tokens_JR, device), send(slots_JR, device)
        return self._columns


def steps_of_decode(mixer: Mixer, inputs_TI: torch.Tensor, states: States, rows: StepRows, keep: bool) -> torch.Tensor:
    """`Mixer.steps`: all rows go token by token together, in copies of their states where those stay."""
    tokens_JR, slots_JR = rows.columns
    if not keep:
        states = tuple(state.index_select(0, rows.slots_R) for state in states)
        slots_JR = torch.arange(len(rows.slots_R), device=inputs_TI.device).expand_as(slots_JR)
    columns = zip(tokens_JR, slots_JR, strict=True)
    out_JRO = torch.stack([mixer.decode(inputs_TI[tokens_R], states, slots_R) for tokens_R, slots_R in columns])
    return out_JRO[rows.places_T, rows.rows_T]


@dataclass(slots=True)
class VerifyStep:
    """Rows that verify drafts, which are a step's first `num_tokens` tokens; token t goes to ring `rings_T[t]`."""

    rings: ReplayRings
    rows: StepRows
    rings_T: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.rings_T)

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
        device = batch.input_ids_T.device
        return VerifyStep(rings, StepRows(slots, counts, device), send(np.repeat(lent, counts), device))


def verify(mixer: Mixer, inputs_TI: torch.Tensor, states: States, step: VerifyStep) -> torch.Tensor:
    """out_TO of rows that verify drafts. Their states stay as they are, and their inputs go to their rings."""
    step.rings.layer(mixer.layer)[step.rings_T, step.rows.places_T] = inputs_TI
    return mixer.steps(inputs_TI, states, step.rows, keep=False)


@dataclass(slots=True)
class ReplayStep:
    """Tokens to replay: token t is number `places_T[t]` of ring `rings_T[t]`."""

    rings: ReplayRings
    rows: StepRows
    rings_T: torch.Tensor
    places_T: torch.Tensor

    @staticmethod
    def of(runs: Sequence[Run], rings: ReplayRings, device: torch.device) -> ReplayStep:
        slots_R, rings_R, firsts_R, lasts_R = np.array(runs, dtype=np.int64).T
        counts_R = lasts_R - firsts_R
        rows = StepRows(slots_R, counts_R, device)
        rings_T, firsts_T = (send(np.repeat(part, counts_R), device) for part in (rings_R, firsts_R))
        return ReplayStep(rings, rows, rings_T, firsts_T + rows.places_T)


def replay(mixer: Mixer, states: States, step: ReplayStep) -> None:
    """Bring the states forward by what their rings hold, as plain steps would have."""
    inputs_TI = step.rings.layer(mixer.layer)[step.rings_T, step.places_T]
    mixer.steps(inputs_TI, states, step.rows, keep=True)
