"""What steps taught: counts, calibration, chances of acceptance, time.

Owns everything that grows from step to step and everything that is shown of it, as numerators and
denominators. Ignores how a step came about (`engine.dspark.speculation`). Nothing here depends on the
value of a draft that has not been decided yet.

Shapes: B rows, G drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.dspark.ceilings import Ceilings
from engine.dspark.config import DSparkConfig
from engine.dspark.cost_model import CostModel
from engine.dspark.drafter import DrafterTraits
from engine.dspark.kinds import Kinds
from engine.dspark.outcomes import Outcomes
from engine.dspark.promises import Promises
from engine.dspark.reliability import Reliability
from engine.dspark.report import DraftReport, series_of
from engine.dspark.scaling import OnlineScaling, SurvivalScaling, labels_of
from engine.dspark.stats import DraftStats
from engine.dspark.survival import AcceptanceEstimate, DraftSwitch
from engine.dspark.told_rounds import ToldRounds
from engine.request import Group, Sample

if TYPE_CHECKING:
    from engine.dspark.draft_step import DraftStep
    from engine.scheduler.rows import Rows

_Named = tuple[str, tuple[str, float]]
"""A request's policy and its kind."""
_MOST_CLASSES = 64
"""Requests name their domains and policies, and every pair is a set of series in whoever collects them."""
_OTHERS = "others"
_MOST_REMEMBERED = 16
"""Requests of a step whose outcomes go into means of their own: the host has as long as a round takes."""
_MOST_FITTED = 256
"""Outcomes of a batch that temperatures and shares of promises are fitted to: those come from many steps."""
_BATCH = 8
"""Steps of more requests than that are summed up together, and tell of bounds of whole windows once. Whoever reads
sums gets all of them; what is decided by them is a few steps late. Of few requests those of one launch are."""


_LEFT = 0.1
"""What outcomes of one drafter say of the next, which is often the same one after some more training."""
_CLEARLY = 0.8
"""Where first drafts bring this share of what one costs drafts are not lost, as far as alarms go: planners see to what
is not worth it behind them."""
_MOST_GONE = 64
"""Ended requests that may be in steps which are not summed up yet."""


class Record:
    def __init__(self, config: DSparkConfig, traits: DrafterTraits, cost: CostModel, scaling: SurvivalScaling) -> None:
        self._config = config
        self._drafts = traits.max_drafts
        self._cost = cost
        self._estimate = AcceptanceEstimate(self._drafts)
        self._promises = Promises(self._drafts)
        self._ceilings = Ceilings(config)
        self._online = OnlineScaling(scaling) if traits.has_confidence else None
        self._rounds = 0
        self._waiting: list[Outcomes] = []
        """What became of drafts, as far as it is not in the sums yet, of `_steps` steps."""
        self._steps = 0
        self._names: dict[Group, _Named] = {}
        """Policies and kinds of groups whose samples run."""
        self._gone: dict[Sample, None] = {}
        """Requests that are over, or will be: the last tokens of some are on their way."""
        self._batches = 0
        self.switch = DraftSwitch(config.max_rows)
        self._classes = {("", ""): DraftStats(self._drafts)}
        self.reliability = Reliability(self._drafts)
        self.planning_seconds = 0.0
        self.probes = 0
        self.on_round: Callable[[DraftStep], None] | None = None
        """Told of every step that verified drafts."""

    def priors(self, samples: Sequence[Sample], kinds: Kinds[_Named]) -> np.ndarray:
        """float64 [B, G]: the chance that all drafts up to each position are accepted, as far as outcomes tell."""
        arrivals, orders = [sample.group.arrival for sample in samples], [sample.order for sample in samples]
        return self._estimate.survivals(arrivals, orders, kinds)

    def kept(self, kinds: Kinds[_Named]) -> np.ndarray:
        """float64 [B, G]: of the survivals that drafters promise such requests, what is kept, as far as outcomes
        tell."""
        return self._promises.kept(kinds)

    def kinds(self, samples: Sequence[Sample]) -> Kinds[_Named]:
        """Policy and kind of each."""
        groups, names = [sample.group for sample in samples], self._names
        for group in dict.fromkeys(groups):
            if group not in names:
                names[group] = policy_of(group), kind_of(group)
        return Kinds.of([names[group] for group in groups])

    def allows(self, step: int, rows: Rows) -> np.ndarray:
        """Whether drafts pay at each row's length and under its policy, as far as outcomes tell; bool [B]."""
        barred = self.switch.barred(step)
        if not barred:
            return np.ones(len(rows), dtype=bool)
        allowed_B = np.array([octave not in barred for octave in _octaves(rows.length_B).tolist()])
        if rows.adapted:
            allowed_B &= np.array([policy_of(sample.group) not in barred for sample in rows.samples])
        return allowed_B

    def observe(self, step: DraftStep, seconds: float | None) -> None:
        """A step whose tokens are with their samples, and what it took."""
        if seconds is not None:
            self._cost.observe(step.shape, seconds)
        # Those beyond had nothing to draft for.
        drafting = 0 if step.verdict is None else len(step.survival_BG)
        for stats, own in self._by_class(step.samples[drafting:]):
            stats.plain_steps += len(step.samples) - drafting if isinstance(own, slice) else len(own)
        turns = self._looks_at(drafting)
        self._ceilings.observe(step, drafting, turns)
        if step.verdict is None:
            self._estimate.passed(1)
            self._take_in()
            return
        self.probes += step.plan.probe
        self._rounds += 1
        self._wait(Outcomes.of(step), urgent=step.plan.probe)
        if self.on_round is not None:
            self.on_round(step)

    def observe_rounds(self, rounds: ToldRounds, seconds: float | None) -> None:
        """Rounds of one plan whose tokens are with their samples, and what each took."""
        if seconds is not None:
            self._cost.observe(rounds.mean_shape(), seconds, len(rounds))
        self.probes += rounds.foreseen.plan.probe * len(rounds)
        for sample, count in rounds.without_drafts():
            self._stats(sample.group).plain_steps += count
        for number in range(len(rounds)):
            drafting = rounds.drawing(number)
            turns = self._looks_at(drafting)
            if turns or (drafting and self._config.mode == "cap_accept"):
                self._ceilings.observe(rounds.step(number), drafting, turns)
            else:
                self._ceilings.pass_by(rounds, number)
            self._rounds += 1
        self._wait(rounds.outcomes, urgent=rounds.foreseen.plan.probe)
        if self.on_round is not None:
            for step in rounds:
                self.on_round(step)

    def _wait(self, outcomes: Outcomes, urgent: bool) -> None:
        """Outcomes that are summed up with the next ones, unless few or `urgent`: the next plan is made of what a probe
        taught."""
        self._waiting.append(outcomes)
        self._steps += outcomes.steps
        if self._online is not None:
            self._online.advance()
        many = len(outcomes.sample_N) > _MOST_REMEMBERED * outcomes.steps
        may_wait = many and self._online is not None and self._config.mode == "compact" and not urgent
        if not may_wait or self._steps >= _BATCH:
            self._take_in()

    def forget(self, key: int, sample: Sample) -> None:
        """The incarnation `key` of a sample is gone, and the sample too if it has ended."""
        self._ceilings.end(key, stopped=sample.finish == "stop")
        self._gone[sample] = None
        if not self._waiting or len(self._gone) > _MOST_GONE:
            self._take_in()

    def interrupt(self, key: int) -> None:
        """Tokens of an incarnation have come by unseen: what waited for them is bounded as it stands."""
        self._ceilings.end(key, stopped=False)

    def refit(self) -> bool:
        """Fit the confidences' temperatures now, to what serving has shown; False where that is too little."""
        self._take_in()
        return self._online is not None and self._online.refit() is not None

    def new_policy(self) -> None:
        self._take_in()
        self.switch.renew()
        if self._online is not None:
            self._online.new_policy()

    def new_drafter(self) -> None:
        self.new_policy()
        self._estimate.renew(_LEFT)
        self._promises.renew(_LEFT)

    def report(self) -> DraftReport:
        """Sums that only grow, of now."""
        self._take_in()
        ceiling, errors = self._ceilings.sums, self._cost.errors
        others = {
            "probes": self.probes,
            "ceiling_steps": ceiling.steps,
            "ceiling_emitted": ceiling.emitted,
            "ceiling_lower": ceiling.lower,
            "ceiling_upper": ceiling.upper,
            "cost_steps": errors.steps,
            "cost_outliers": errors.outliers,
            "cost_predicted_seconds": errors.predicted,
            "cost_measured_seconds": errors.measured,
            "cost_absolute_error_seconds": errors.absolute,
            "planning_seconds": self.planning_seconds,
        }
        return DraftReport.of(series_of(self._classes, self.reliability, others))

    def passed(self, samples: Sequence[Sample], tokens: Sequence[int]) -> None:
        """Plain steps of these samples that nobody planned, one for each token: all that there were."""
        for sample, count in zip(samples, tokens, strict=True):
            self._stats(sample.group).plain_steps += count
        self._estimate.passed(max(tokens, default=0))

    # --- rows -----------------------------------------------------------------------------------

    def _stats(self, group: Group) -> DraftStats:
        return self._classes[self._pair(group)]

    def _pair(self, group: Group) -> tuple[str, str]:
        """The class of its domain and its policy; past a number of such pairs the rest share one."""
        pair = group.request.domain, policy_of(group)
        if pair not in self._classes:
            pair = pair if len(self._classes) < _MOST_CLASSES else (_OTHERS, _OTHERS)
            self._classes.setdefault(pair, DraftStats(self._drafts))
        return pair

    def _by_class(
        self, samples: Sequence[Sample], sample_N: np.ndarray | slice = slice(None)
    ) -> list[tuple[DraftStats, slice | np.ndarray]]:
        """Sums that rows go into, which are of these of the samples, and which rows."""
        groups = [sample.group for sample in samples]
        pairs = {group: self._pair(group) for group in dict.fromkeys(groups)}
        rows = Kinds.of([pairs[group] for group in groups]).take(sample_N)
        return [(self._classes[pair], own) for pair, own in rows.members()]

    def _take_in(self) -> None:
        """Add to the sums what waits, then forget whose last outcomes those were."""
        waiting, self._waiting, self._steps = self._waiting, [], 0
        parts = [part for part in waiting if len(part.sample_N)]
        if parts:
            self._add(Outcomes.joined(parts), sum(part.steps for part in waiting))
        for sample in [sample for sample in self._gone if sample.finish is not None]:
            del self._gone[sample]
            self._estimate.forget_request(sample.order)
            if sample.group.unfinished == 0:
                self._estimate.forget_group(sample.group.arrival)
                self._names.pop(sample.group, None)

    def _add(self, outcomes: Outcomes, steps: int) -> None:
        samples, sample_N = outcomes.samples, outcomes.sample_N
        made_N, verified_N, emitted_N, keep_N = (
            outcomes.made_N,
            outcomes.verified_N,
            outcomes.emitted_N,
            outcomes.keep_N,
        )
        kept_N = np.minimum(outcomes.accepted_N, keep_N)
        for stats, own in self._by_class(samples, sample_N):
            stats.observe(made_N[own], verified_N[own], kept_N[own], emitted_N[own], keep_N[own])
        labels_NG = labels_of(outcomes.chances_NG, verified_N)
        self.reliability.observe(outcomes.survival_NG, labels_NG)
        names = self.kinds(samples).take(sample_N)
        rows = len(sample_N)
        some = slice(None, None, -(-rows // _MOST_FITTED))
        few = names.take(some)
        self._promises.observe(few, outcomes.survival_NG[some], labels_NG[some])
        self._estimate.observe_kinds(few, outcomes.chances_NG[some], steps, rows / len(few))
        turns = self._turns(rows, self._batches)
        for place, chances_G in zip(sample_N[turns].tolist(), outcomes.chances_NG[turns].tolist(), strict=True):
            # All but NaN.
            chances = [chance for chance in chances_G if chance == chance]
            if chances:
                group = samples[place].group
                self._estimate.observe(group.arrival if group.request.n > 1 else None, samples[place].order, chances)
        self._batches += 1
        self._watch(outcomes, names)
        if self._online is not None and outcomes.confidence_NG is not None:
            self._online.observe(outcomes.confidence_NG[some], labels_NG[some])
            every = self._config.recalibrate_every
            if every and self._rounds // every > (self._rounds - steps) // every:
                self._online.begin()

    def _looks_at(self, drafting: int) -> list[int]:
        """Rows with drafts of this round that are looked at one by one."""
        if drafting > _MOST_REMEMBERED and self._rounds % _BATCH:
            return []
        return self._turns(drafting, self._rounds // _BATCH)

    def _turns(self, rows: int, number: int) -> list[int]:
        """Rows whose outcomes are looked at one by one: all of a few, of many so many in turn."""
        if rows <= _MOST_REMEMBERED:
            return list(range(rows))
        first = number * _MOST_REMEMBERED % rows
        return [(first + place) % rows for place in range(_MOST_REMEMBERED)]

    def _watch(self, outcomes: Outcomes, names: Kinds[_Named]) -> None:
        """Accepted drafts against those expected of verified ones, as promises of their kind are kept, and the first
        drafts that were missing for those not to lose clearly, by predicted times, as a hiccup is no drift: of all
        rows, and by class. Texts change as they go on, so that whoever is barred for what just pays no more misses what
        will; and where windows are too long shorter ones are the answer."""
        number, accepted_N, verified_N = outcomes.step, outcomes.accepted_N, outcomes.verified_N
        spent_NG = np.arange(outcomes.survival_NG.shape[1]) < verified_N[:, None]
        expected_N = np.where(spent_NG, outcomes.survival_NG * self.kept(names), 0.0).sum(1)
        lost_N = np.where(verified_N > 0, _CLEARLY * outcomes.price_N, 0.0) - np.minimum(accepted_N, 1)
        columns = expected_N, accepted_N, verified_N, lost_N
        classes = [*_summed(_octaves(outcomes.anchors_N + 1), *columns)]
        policies = Kinds.of([policy for policy, _ in names.names])
        if policies.names != [""]:
            sums = _summed(policies.place_N[names.place_N], *columns)
            classes += [(policies.names[place], of) for place, of in sums if policies.names[place]]
        if not any([self.switch.observe_class(number, name, *sums) for name, sums in classes]):
            self.switch.observe(number, *(part_N.sum().item() for part_N in columns))


def _octaves(length_N: np.ndarray) -> np.ndarray:
    """Lengths as they are told apart, int64."""
    return np.frexp(length_N.astype(np.float64))[1].astype(np.int64)


def _summed(
    place_N: np.ndarray, expected_N: np.ndarray, accepted_N: np.ndarray, verified_N: np.ndarray, lost_N: np.ndarray
) -> list[tuple[int, tuple[float, int, int, float]]]:
    """Each place that rows have, and the sums over those."""
    places = np.flatnonzero(np.bincount(place_N)).tolist()
    columns = [np.bincount(place_N, part_N)[places] for part_N in (expected_N, accepted_N, verified_N, lost_N)]
    sums = zip(*(part.tolist() for part in columns), strict=True)
    return [(place, (e, int(a), int(v), lost)) for place, (e, a, v, lost) in zip(places, sums, strict=True)]


def policy_of(group: Group) -> str:
    """The name of its LoRA policy, whatever the revision; empty for the base."""
    return "" if group.lease is None else group.lease.version.name


def kind_of(group: Group) -> tuple[str, float]:
    """What a request says of itself that drafts fare differently by: its domain, and about how hot it samples."""
    request = group.request
    return request.domain, round(request.sampling.temperature, 1)
