"""Graphs that a step of rounds could run as.

Owns which there are to choose from, as columns, and how many drafts each has room for. Ignores what they are
worth (`engine.dspark.planner`), what they cost (`engine.dspark.cost_model`) and how they are made
(`engine.runner.round_stepper`).

Shapes: C candidates.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.dspark.cost_model import CostModel, StepWeights

_SPARE = 1.1
"""Drafts made for each one verified where drafts are made by request: fresh confidences choose among them."""
_WANTED_LOW = np.array([1, 1, -1, 1])
"""Of a graph's rows, verify rows, drafts verified and slots of blocks, only drafts are better more."""


class Graphs(Protocol):
    """Those that rounds run as."""

    @property
    def capture_seconds(self) -> float:
        """What making one more takes."""
        ...

    @property
    def changes(self) -> int:
        """Grows when `ready` may say something else."""
        ...

    def row_tier(self, rows: int) -> int:
        """Rows of one that is made for so many requests."""
        ...

    @property
    def windows(self) -> Sequence[int]:
        """Drafts that a graph may make and verify of every row, instead of others of each."""
        ...

    def ready(self, rows: int) -> Sequence[tuple[int, int, int, int]]:
        """(rows, verify rows, drafts made, 0 for all, window, 0 for one of each row's own) of those there are for so
        many requests: the same for all numbers that a graph would be made for with as many rows."""
        ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """Verify rows of graphs, `budgets_C` of which are drafts at most, the slots of their blocks, and the windows of
    those that give all rows the same one, at `evens`; what their times are made of (`CostModel.weights`). The first
    `reachable` could be made, the others are there."""

    tiers_C: np.ndarray
    budgets_C: np.ndarray
    slots_C: np.ndarray
    windows_C: np.ndarray
    evens: np.ndarray
    weights: StepWeights
    reachable: int


class GraphChoice:
    """`tiers`, `ragged`, `draft_tiers` and `graphs` as the planner's."""

    def __init__(
        self,
        cost: CostModel,
        tiers: Sequence[int] | None,
        ragged: bool,
        draft_tiers: Sequence[int] | None,
        graphs: Graphs | None,
    ) -> None:
        assert tiers is None or list(tiers) == sorted(set(tiers)), "tiers ascend"
        self._cost = cost
        self._tiers = None if tiers is None else np.array(tiers)
        self._every = list(tiers or ())
        self._ragged = ragged
        self._draft_tiers = None if draft_tiers is None else np.array(draft_tiers)
        self._graphs = graphs
        self._asked: tuple[int, int, int, int, int] | None = None
        """What candidates were last asked for, and how often graphs had changed."""
        self._found: Candidates | None = None
        self._weighed: tuple[int, np.ndarray, StepWeights] | None = None
        """The most drafts of each request, rows, verify rows, slots and windows of the graphs that were weighed last,
        and what came of it: numbers of requests that differ by a few have the same graphs."""
        self._known: tuple[int, int] | None = None
        """Rows of a graph for the requests that `_there_C4` is for, and how often graphs had changed."""
        self._there_C4 = np.empty((0, 4), dtype=np.int64)
        """Rows, verify rows, drafts made and windows of graphs that are there."""

    def candidates(self, rows: int, whole: int, least: int, most: int) -> Candidates | None:
        """Those for `least` to `most` drafts of so many requests, `whole` of each at most; None where there are none.
        Padding is filled with drafts, so a tier's budget is all it holds."""
        asked = rows, whole, least, most, 0 if self._graphs is None else self._graphs.changes
        if asked != self._asked:
            self._found, self._asked = self._find(rows, whole, least, most), asked
        return self._found

    def tier(self, rows: int) -> int:
        """Verify rows that so many steps without drafts are padded to."""
        if self._tiers is None:
            return rows
        place = bisect_left(self._every, rows)
        assert place < len(self._every), f"{rows} rows, the largest tier holds {self._every[-1]}"
        return self._every[place]

    def _find(self, rows: int, whole: int, least: int, most: int) -> Candidates | None:
        # Columns: rows and verify rows of the graph, drafts verified, slots of blocks, windows.
        reachable_C5 = self._reachable(rows, least, most)
        graphs_C5 = np.concatenate((reachable_C5, self._ready(rows, least, most)))
        if not len(graphs_C5):
            return None
        _, tiers_C, budgets_C, slots_C, windows_C = graphs_C5.T
        weights = self._weights(whole, graphs_C5[:, [0, 1, 3, 4]])
        evens = np.flatnonzero(windows_C)
        return Candidates(tiers_C, budgets_C, slots_C, windows_C, evens, weights, len(reachable_C5))

    def _weights(self, whole: int, graphs_C4: np.ndarray) -> StepWeights:
        if self._weighed is None or self._weighed[0] != whole or not np.array_equal(self._weighed[1], graphs_C4):
            padded_C, tiers_C, slots_C, windows_C = graphs_C4.T
            shares_C = slots_C / (padded_C * whole) if self._ragged else np.ones(len(padded_C))
            self._weighed = whole, graphs_C4, self._cost.weights(padded_C, tiers_C, shares_C, windows_C > 0)
        return self._weighed[2]

    def _reachable(self, rows: int, least: int, most: int) -> np.ndarray:
        """Those that could be made, up to the first that holds all."""
        if self._tiers is None:
            tiers_C = np.arange(rows + least, rows + most + 1)
        else:
            first, last = bisect_left(self._every, rows + least), bisect_left(self._every, rows + most)
            tiers_C = self._tiers[first : last + 1]
        padded = rows if self._graphs is None else self._graphs.row_tier(rows)
        budgets_C = np.minimum(tiers_C - rows, most)
        graphs_C5 = np.zeros((len(tiers_C), 5), dtype=np.int64)
        graphs_C5[:, 0], graphs_C5[:, 1], graphs_C5[:, 2] = padded, tiers_C, budgets_C
        graphs_C5[:, 3] = self._slots(budgets_C, most) if self._ragged else most
        windows = [] if self._graphs is None or self._tiers is None else self._graphs.windows
        fitting = [w for w in windows if padded * (1 + w) <= self._every[-1] and rows * w >= least]
        evens_W5 = [(padded, padded * (1 + w), min(rows * w, most), padded * w, w) for w in fitting]
        return np.concatenate((graphs_C5, np.array(evens_W5, dtype=np.int64).reshape(-1, 5)))

    def _ready(self, rows: int, least: int, most: int) -> np.ndarray:
        """Those that are there, but for what another outdoes."""
        if self._graphs is not None and (known := (self._graphs.row_tier(rows), self._graphs.changes)) != self._known:
            self._there_C4 = np.array(self._graphs.ready(rows), dtype=np.int64).reshape(-1, 4)
            self._known = known
        padded_C, tiers_C, slots_C, windows_C = self._there_C4.T
        slots_C = np.where(slots_C > 0, slots_C, np.where(windows_C > 0, padded_C * windows_C, most))
        budgets_C = np.minimum(np.minimum(tiers_C - rows, most), slots_C)
        budgets_C = np.where(windows_C > 0, np.minimum(rows * windows_C, most), budgets_C)
        graphs_C5 = np.stack((padded_C, tiers_C, budgets_C, slots_C, windows_C), axis=1)
        outdone_C = windows_C < 0
        own = np.flatnonzero(windows_C == 0)
        outdone_C[own] = _outdone(graphs_C5[own, :4] * _WANTED_LOW)
        return graphs_C5[(budgets_C >= least) & ~outdone_C]

    def _slots(self, budgets_C: np.ndarray, most: int) -> np.ndarray:
        """Drafts to make where so many are verified: of blocks that graphs have room for, where those are known."""
        slots_C = np.minimum(np.ceil(budgets_C * _SPARE), most).astype(np.int64)
        if self._draft_tiers is None:
            return slots_C
        places_C = np.searchsorted(self._draft_tiers, slots_C)
        return self._draft_tiers[np.minimum(places_C, len(self._draft_tiers) - 1)]


def _outdone(costs_CN: np.ndarray) -> np.ndarray:
    """Whether another is nowhere more and somewhere less, bool [C]: a fit that has seen neither is not asked."""
    no_more_CC = np.logical_and.reduce([cost_C <= cost_C[:, None] for cost_C in costs_CN.T])
    # Who is nowhere more is less somewhere, unless the same holds the other way round.
    return np.any(no_more_CC & ~no_more_CC.T, axis=1)


def slots_for(budget: int, most: int) -> int:
    """Drafts to make so that `budget` of them are verified."""
    return min(math.ceil(budget * _SPARE), most)
