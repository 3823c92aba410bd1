"""How many drafts are worth verifying.

Owns a step's budget and how it is spent. Ignores where survivals come from (`engine.dspark.survival`)
and how time is predicted (`engine.dspark.cost_model`).

Verification is exact only while the admission of a draft does not depend on its own value or on any
later one of its request. Confidence k + 1 reads draft k, so the *budget* comes from what was known two
steps ago, never from this step's confidences; *spending* it goes down the fresh survivals, where a
request's later drafts never outrank its earlier ones, and ties are broken by position, then by
request, never by token.

Shapes: B requests, G drafts a request, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
import torch

from engine.dspark.cost_model import CostModel, StepShape
from engine.dspark.graph_choice import GraphChoice, Graphs
from engine.dspark.reckoning import Reckoning

_MOST_WAITS = 4
"""Times `probe_every` steps that pass at most between two probes."""
_NEAR = 0.95
"""Of what drafts yield, what plain steps must be thought to, to be tried again."""
_FORCED = 2.0
_BARRED = -1.0


class StepPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One step, as rank 0 sends it to the others: a whole, so that no rank can hold half of it.

    `slots` are the rows in order. `drafting` says whether the drafter runs; `budget` is how many drafts
    are verified over all rows, at most, and `tier` the verify rows of the step with padding. With a `window` every
    row drafts so many, as far as it may, and all are verified. `lens` are
    the drafts verified by row; a plan made before drafting has none yet (`spent` fills them in). A
    `probe` drafts although it is not expected to pay. Without `capture` a graph that is there has to do.
    """

    step: int
    slots: list[int]
    drafting: bool
    budget: int
    tier: int
    lens: list[int]
    probe: bool = False
    capture: bool = True
    window: int = 0

    def spent(self, lens: Sequence[int]) -> StepPlan:
        assert sum(lens) <= self.budget and len(lens) == len(self.slots), f"{sum(lens)} drafts over {self.budget}"
        return msgspec.structs.replace(self, lens=list(lens))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> StepPlan:
        return msgspec.msgpack.decode(data, type=StepPlan)


@dataclass
class Outlook:
    """What is known of a step's requests before it drafts.

    `survival_BG`: chance that drafts up to each position are accepted, from old confidences or priors.
    Between `least_B` and `most_B` drafts of each request are verified; `context_B` are its tokens.
    `tokens_read` counts distinct tokens of all contexts.
    """

    survival_BG: np.ndarray
    least_B: np.ndarray
    most_B: np.ndarray
    context_B: np.ndarray
    tokens_read: float

    @cached_property
    def falling_BG(self) -> np.ndarray:
        """Survivals that never grow along a row; what is no number is none."""
        # fmax takes the number where the other is none.
        return np.minimum.accumulate(np.minimum(np.fmax(self.survival_BG, 0.0), 1.0), axis=1)

    @cached_property
    def ranking(self) -> Ranking:
        return Ranking.of(self)

    @cached_property
    def even(self) -> np.ndarray:
        """float64 [3, G]: where every request has a window of so many drafts, as far as it may, the drafts of all,
        those that are expected to be kept, and the tokens that they attend to."""
        place_G = np.arange(self.survival_BG.shape[1])
        within_BG = place_G < self.most_B[:, None]
        kept_BG = np.where(within_BG, self.falling_BG, 0.0)
        return np.stack((within_BG.sum(0), kept_BG.sum(0), self.context_B @ within_BG)).cumsum(axis=1)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Drafts of all requests in the order that a budget is spent in: the requests `row_M` they are of, and their
    survivals. None is beyond what its request may have."""

    row_M: np.ndarray
    survival_M: np.ndarray

    @staticmethod
    def of(outlook: Outlook) -> Ranking:
        values_BG = outlook.falling_BG
        rows, drafts = values_BG.shape
        place_G = np.arange(drafts)
        keys_BG = values_BG
        if outlook.least_B.any():
            keys_BG = np.where(place_G < outlook.least_B[:, None], _FORCED, values_BG)
        flat = np.where(place_G[:, None] < outlook.most_B, keys_BG.T, _BARRED).ravel()
        order = np.argsort(-flat, kind="stable")[: int((flat >= 0.0).sum())]
        return Ranking(order % rows, values_BG.T.ravel()[order])


@dataclass(frozen=True, slots=True)
class Choice:
    """`tokens` expected over `seconds` predicted. `slots` drafts are made, of which `budget` are verified: with a
    `window`, so many of every row.
    `capture`: by a graph that may have to be made for it. `price`: the tokens that each draft has to bring for the
    step to bring as much as steps without drafts in its time. `promised`: the drafts that survivals say will be kept,
    before anybody reckons with what came of such promises."""

    drafting: bool
    budget: int
    tier: int
    tokens: float
    seconds: float
    probe: bool = False
    slots: int = 0
    capture: bool = True
    price: float = math.inf
    window: int = 0
    promised: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def plan(self, step: int, slots: list[int]) -> StepPlan:
        return StepPlan(
            step=step,
            slots=slots,
            drafting=self.drafting,
            budget=self.budget,
            tier=self.tier,
            lens=[0] * len(slots),
            probe=self.probe,
            capture=self.capture,
            window=self.window,
        )


class Planner:
    """`tiers` are the verify-row counts that graphs exist for, ascending; None where every count is one
    (no graphs). `ragged`: the drafter makes as many drafts of each request as it is asked for, and is asked
    for those that the old survivals rank highest, a few more than are verified (`drafted`); else it always
    makes all. `draft_tiers` are the numbers of drafts that graphs exist for then, ascending; what one has room for
    is made. A choice is kept while it is within `hysteresis` of the best. After `probe_every` steps
    in a row without drafts the best choice with drafts is taken once, so that conditions are seen to
    change; after every such probe that nothing comes of, twice as many steps pass until the next. After as many
    with drafts plain steps run once where those are thought to be nearly as good, which only they can tell. What
    rounds promised is reckoned with as far as it came (`came`).

    Making a graph stops everything for as long as some steps take. With `graphs`, one is made when the steps
    that ran as a worse one have lost as much time as that takes: at most twice what knowing the future would
    have cost, as long as rounds are of one kind; the first graph of a kind is made at once."""

    def __init__(
        self,
        cost: CostModel,
        tiers: Sequence[int] | None,
        hysteresis: float = 0.01,
        probe_every: int = 64,
        ragged: bool = False,
        draft_tiers: Sequence[int] | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self._cost = cost
        self._reckoning = Reckoning()
        self._choice = GraphChoice(cost, tiers, ragged, draft_tiers, graphs)
        self._hysteresis = hysteresis
        self._probe_every = probe_every
        self._graphs = graphs
        self._lost = 0.0
        """Seconds, for want of a graph."""
        self._losing = 0.0
        """The same of each step as the last one."""
        self._last: tuple[bool, int] | None = None
        self._without = self._with = 0
        """Steps in a row without drafts, or with."""
        self._patience = probe_every

    def choose(self, outlook: Outlook, allowed: bool = True) -> Choice:
        """The budget and tier of most expected tokens per predicted second, drafting nothing included.

        `allowed` false (an off-switch) leaves only that, except when a probe is due.
        """
        plain = self._plain(outlook)
        due = self._without >= self._patience
        chosen, probe, self._losing = plain, False, 0.0
        if allowed or due:
            best, ready = self._drafting(outlook, plain)
            if due:
                chosen, probe = ready or best or plain, True
            elif best is not None and (self._with < self._probe_every or plain.rate < _NEAR * best.rate):
                chosen = self._affordable(plain, best, ready)
        self._last = (chosen.drafting, chosen.tier)
        if not chosen.drafting:
            self._without, self._with = self._without + 1, 0
        else:
            self._without, self._with = 0, self._with + 1
            self._patience = min(2 * self._patience, _MOST_WAITS * self._probe_every) if probe else self._probe_every
        rows, further = len(outlook.most_B), chosen.seconds / plain.seconds - 1.0
        return replace(chosen, probe=probe and chosen.drafting, price=rows * further / max(1, chosen.budget))

    def came(self, window: int, promised: float, kept: float) -> None:
        """Drafts that were kept in rounds of a choice, of those that it promised."""
        self._reckoning.observe(window, promised, kept)

    def passed(self, steps: int) -> None:
        """Further steps of the last choice."""
        self._reckoning.passed(steps)
        self._lost += steps * self._losing
        if self._last is None or not self._last[0]:
            self._without += steps
        else:
            self._with += steps

    def renew(self) -> None:
        """The drafter is another one: how it fares is seen at once."""
        self._reckoning.renew()
        self._patience = self._probe_every
        self._without = self._patience

    def _plain(self, outlook: Outlook) -> Choice:
        rows = len(outlook.most_B)
        tier = self._choice.tier(rows)
        shape = StepShape(rows, tier, False, outlook.tokens_read, float(outlook.context_B.sum()))
        (seconds,) = self._cost.predict([shape])
        return Choice(False, 0, tier, float(rows), float(seconds))

    def _drafting(self, outlook: Outlook, plain: Choice) -> tuple[Choice | None, Choice | None]:
        """The best tier, and the best graph that is there."""
        rows, whole = outlook.survival_BG.shape
        ranking = outlook.ranking
        most, least = len(ranking.row_M), max(1, int(np.minimum(outlook.least_B, outlook.most_B).sum()))
        graphs = self._choice.candidates(rows, whole, least, most) if most >= least else None
        if graphs is None:
            return None, None
        tiers_C, budgets_C, evens = graphs.tiers_C, graphs.budgets_C, graphs.evens
        kept_C = ranking.survival_M.cumsum()[budgets_C - 1]
        context_C = outlook.context_B[ranking.row_M].cumsum()[budgets_C - 1]
        if len(evens):
            budgets_C = budgets_C.copy()
            budgets_C[evens], kept_C[evens], context_C[evens] = outlook.even[:, graphs.windows_C[evens] - 1]
        promised_C, kept_C = kept_C, kept_C * self._reckoning.shares(graphs.windows_C)
        tokens_C, context_C = rows + kept_C, outlook.context_B.sum() + context_C
        seconds_C = self._cost.times(graphs.weights, outlook.tokens_read, context_C)
        seconds_C = np.maximum(seconds_C, plain.seconds + self._cost.least_extra)
        rates_C = tokens_C / seconds_C
        places_C = np.arange(len(tiers_C))
        if len(evens) and outlook.least_B.any():
            # Who wants more than the window of all gets it.
            short = graphs.windows_C[evens] < np.minimum(outlook.least_B, outlook.most_B).max()
            places_C = np.delete(places_C, evens[short])
        places, others = np.split(places_C, [np.searchsorted(places_C, graphs.reachable)])

        def best(places: np.ndarray, capture: bool) -> Choice | None:
            if not len(places):
                return None
            place = int(places[self._kept(tiers_C[places], rates_C[places])])
            return Choice(
                drafting=True,
                budget=int(budgets_C[place]),
                tier=int(tiers_C[place]),
                tokens=float(tokens_C[place]),
                seconds=float(seconds_C[place]),
                slots=min(int(graphs.slots_C[place]), most),
                capture=capture,
                window=int(graphs.windows_C[place]),
                promised=float(promised_C[place]),
            )

        return best(places, True), best(others, False)

    def _kept(self, tiers_C: np.ndarray, rates_C: np.ndarray) -> int:
        """The best, or the last step's tier where it is hardly worse."""
        best = int(rates_C.argmax())
        if self._last is not None and self._last[0]:
            same_C = rates_C * (tiers_C == self._last[1])
            same = int(same_C.argmax())
            if same_C[same] >= (1 - self._hysteresis) * rates_C[best]:
                return same
        return best

    def _affordable(self, plain: Choice, best: Choice, ready: Choice | None) -> Choice:
        """What is best of what is there, until doing without the best has cost as much as its graph."""
        if self._graphs is None or ready is None:
            return self._better(plain, best)
        chosen = self._better(plain, ready)
        self._losing = max(0.0, chosen.seconds * (1.0 - chosen.rate / best.rate))
        self._lost += self._losing
        if self._lost < self._graphs.capture_seconds:
            return chosen
        self._lost = self._losing = 0.0
        return self._better(plain, best)

    def _better(self, plain: Choice, drafting: Choice) -> Choice:
        """What was done last is done again where the other is hardly better."""
        rates = plain.rate, drafting.rate
        keep = 1 - self._hysteresis
        if self._last == (False, plain.tier):
            return plain if rates[0] >= keep * rates[1] else drafting
        if self._last == (True, drafting.tier):
            return drafting if rates[1] >= keep * rates[0] else plain
        return drafting if rates[1] > rates[0] else plain


def drafted(outlook: Outlook, slots: int) -> np.ndarray:
    """Drafts to make of each request, int64 [B], `slots` in all: a prefix of each, by the survivals that the
    budget was chosen from, so that neither depends on a draft of this step."""
    return np.bincount(outlook.ranking.row_M[:slots], minlength=len(outlook.most_B))


def spend(
    survival_BG: torch.Tensor, least_B: torch.Tensor, most_B: torch.Tensor, budget: int | torch.Tensor
) -> torch.Tensor:
    """Drafts to verify by request, int64 [B], summing to at most `budget`; on the device of its arguments,
    without synchronising.

    The `budget` highest fresh survivals win. Each request's first `least_B` come before all others; none
    beyond `most_B` are taken.
    """
    rows, drafts = survival_BG.shape
    values_BG = torch.cummin(survival_BG.float().nan_to_num(0.0).clamp(0.0, 1.0), dim=1).values
    place_G = torch.arange(drafts, device=values_BG.device)
    values_BG = torch.where(place_G < least_B[:, None], _FORCED, values_BG)
    values_BG = torch.where(place_G < most_B[:, None], values_BG, _BARRED)
    flat, order = torch.sort(values_BG.T.flatten(), descending=True, stable=True)
    taken = (torch.arange(rows * drafts, device=flat.device) < budget) & (flat >= 0.0)
    lens_B = torch.zeros(rows, dtype=torch.int64, device=flat.device)
    return lens_B.index_add_(0, order % rows, taken.to(torch.int64))


def windows(
    max_drafts: int,
    remaining_B: np.ndarray,
    anchors_B: np.ndarray,
    context_len: int,
    drafter_context: int,
    block: int,
) -> np.ndarray:
    """The most drafts each request may verify, int64 [B]: what it may still emit beside the token after them, what
    fits its context, and none where the drafter's block would pass its own context."""
    room_B = np.minimum(np.minimum(remaining_B - 1, context_len - 2 - anchors_B), max_drafts)
    return np.where(anchors_B + block <= drafter_context, np.maximum(room_B, 0), 0)
