"""What rounds of speculation need to be told.

Owns the value that one process sends and others follow: rows, budget, bounds of windows and tier, as a
whole. Ignores the decision (`engine.dspark.planner`) and how rounds run
(`engine.runner.round_stepper`).

Shapes: B rows, G drafts a row, P page-table columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.batch import SharedPrefix
from engine.dspark.config import Mode, Rule
from engine.runner.stepper import StepModes
from lora.device_pool import BASE

MOST_AT_ONCE = 8
"""Rounds launched at once, at most: their budget is as old as the first of them."""


@dataclass(frozen=True, slots=True)
class RoundModes:
    """What a round's graph computes: `edges` as in plain steps, the rule of acceptance, and how windows are
    spent."""

    step: StepModes
    rule: Rule
    mode: Mode


Column = Sequence[int] | np.ndarray
"""A number of each row."""

COLUMNS = ("slots", "most", "least", "room", "order", "adapters")
"""Of a message, each as long as its tier; then come the budget, survivals and drafts."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundPlan:
    """`rounds` rounds of the rows in `slots`, each verifying at most `budget` drafts over `verify` rows.

    Row b drafts at most `most[b]` and at least `least[b]` where the device finds room for them in the
    pages of `page_tables_BP`; `room[b]` are the tokens that these hold. Where blocks are
    drafted by request, `most` decides which graph runs. `survival_BG` float32 is what the
    budget is spent on where the drafter has no confidence, `drafts_BG` int64 what is verified where the
    host drafts. `adapters` are the slots of the rows' adapters, empty where all are the base's.
    `prefixes` are what rows share of their pages and read once. With a `window` every row drafts as many as it may of
    so many, and all are verified. Without `capture` a larger graph that is
    there serves rather than one that has to be made.
    """

    slots: Column
    rounds: int
    verify: int
    budget: int
    most: Column
    least: Column
    room: Column
    modes: RoundModes
    page_tables_BP: np.ndarray
    survival_BG: np.ndarray
    drafts_BG: np.ndarray | None = None
    adapters: list[int] = field(default_factory=list)
    prefixes: list[SharedPrefix] = field(default_factory=list)
    capture: bool = True
    window: int = 0

    @property
    def rows(self) -> int:
        return len(self.slots)

    def message(self, tier: int) -> np.ndarray:
        """int32: all that changes between rounds of one graph but the page tables, for `tier` rows; padding
        is slot -1. `RoundInputs` has the views of it."""
        rows, drafts = self.survival_BG.shape
        message = np.zeros(message_size(tier, drafts), dtype=np.int32)
        message[:tier] = -1
        order_B, adapters_B = np.arange(tier), np.full(tier, BASE, dtype=np.int32)
        if self.adapters:
            adapters_B[: len(self.adapters)] = self.adapters
            order_B = np.argsort(adapters_B, kind="stable")
        columns = (self.slots, self.most, self.least, self.room, order_B, adapters_B[order_B])
        for place, values in enumerate(columns):
            message[place * tier : place * tier + len(values)] = values
        at = len(COLUMNS) * tier
        message[at] = self.budget
        at += 1
        message[at : at + rows * drafts] = self.survival_BG.astype(np.float32).view(np.int32).ravel()
        at += tier * drafts
        if self.drafts_BG is not None:
            message[at : at + rows * drafts] = self.drafts_BG.ravel()
        return message


def message_size(tier: int, drafts: int) -> int:
    return len(COLUMNS) * tier + 1 + 2 * tier * drafts


def tiers_of_rows(most: int) -> list[int]:
    """Rows that rounds are captured for: powers of two and what lies halfway from 16 on."""
    tiers, size = [], 1
    while size < most:
        tiers += [size, size + size // 2] if size >= 16 else [size]
        size *= 2
    return [tier for tier in tiers if tier < most] + [most]


MOST_VERIFY_ROWS = 1024
"""Verify rows of a tier, unless two a row are more: a device is saturated by then."""


def tiers_of_verify_rows(most_rows: int, drafts: int, whole: bool = False) -> list[int]:
    """Verify rows that rounds are captured for: four to an octave, at least two apart. Where windows are
    verified `whole`, nobody plans for the largest of these tiers, so every row's window must fit."""
    most = most_rows * (1 + drafts)
    if not whole:
        most = min(most, max(MOST_VERIFY_ROWS, 2 * most_rows))
    return _octaves(most)


def tiers_of_draft_tokens(most_rows: int, block: int) -> list[int]:
    """Slots of blocks drafted by request that rounds are captured for, up to whole blocks of all rows."""
    return _octaves(most_rows * block)


def _octaves(most: int) -> list[int]:
    tiers, size = [2, 4, 6], 8
    while size <= most:
        tiers += [size + part * size // 4 for part in range(4)]
        size *= 2
    return [tier for tier in tiers if tier < most] + [most]
