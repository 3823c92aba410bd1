"""What steps taught: counts, calibration, chances of acceptance, time.

Owns everything that grows from step to step and everything that is shown of it, as numerators and
denominators. Ignores how a step came about (`engine.dspark.speculation`). Nothing here depends on the
value of a draft that has not been decided yet.

Shapes: B rows, G drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.dspark.block_estimate import BlockEstimate, is_exact
from engine.dspark.config import DSparkConfig
from engine.dspark.cost_model import CostModel
from engine.dspark.drafter import DrafterTraits
from engine.dspark.reliability import Reliability
from engine.dspark.report import DraftReport, series_of
from engine.dspark.scaling import OnlineScaling, SurvivalScaling, labels_of
from engine.dspark.stats import DraftStats
from engine.dspark.survival import AcceptanceEstimate, DraftSwitch
from engine.request import Group, Sample
from engine.sampling.params import RowSampling

if TYPE_CHECKING:
    from engine.dspark.draft_step import DraftStep

_MOST_CLASSES = 64
"""Requests name their domains and policies, and every pair is a set of series in whoever collects them."""
_OTHERS = "others"
_MOST_REMEMBERED = 16
"""Requests of a step whose outcomes go into means of their own: the host has as long as a round takes."""


class Record:
    def __init__(self, config: DSparkConfig, traits: DrafterTraits, cost: CostModel, scaling: SurvivalScaling) -> None:
        self._config = config
        self._drafts = traits.max_drafts
        self._cost = cost
        self._estimate = AcceptanceEstimate(self._drafts)
        self._ceiling = BlockEstimate()
        self._online = OnlineScaling(scaling) if traits.has_confidence else None
        self._rounds = 0
        self.switch = DraftSwitch(config.max_rows)
        self._classes = {("", ""): DraftStats(self._drafts)}
        self.reliability = Reliability(self._drafts)
        self.planning_seconds = 0.0
        self.probes = 0
        self.on_round: Callable[[DraftStep], None] | None = None
        """Told of every step that verified drafts."""

    def prior(self, sample: Sample) -> np.ndarray:
        """float64 [G]: the chance that all drafts up to each position are accepted, as far as outcomes tell."""
        return self._estimate.survival(sample.group.arrival, sample.order, policy_of(sample.group))

    def allows(self, step: int, sample: Sample) -> bool:
        """Whether drafts pay at the sample's length and under its policy, as far as outcomes tell."""
        policy = policy_of(sample.group)
        return self.switch.allows_length(step, sample.length) and (
            not policy or self.switch.allows_policy(step, policy)
        )

    def observe(self, step: DraftStep, seconds: float | None) -> None:
        """A step whose tokens are with their samples."""
        if seconds is not None:
            self._cost.observe(step.shape, seconds)
        if step.verdict is None:
            self._observe_plain(step, 0)
            return
        self.probes += step.plan.probe
        drafting = len(step.survival_BG)
        if drafting < len(step.samples):
            # There was nothing to draft for.
            self._observe_plain(step, drafting)
        verified_B = np.array([len(drafts) for drafts in step.drafts[:drafting]], dtype=np.int64)
        self._observe_counts(step, verified_B)
        self._observe_chances(step, verified_B)
        if self.on_round is not None:
            self.on_round(step)

    def forget(self, key: int, sample: Sample) -> None:
        """The incarnation `key` of a sample is gone, and the sample too if it has ended."""
        self._ceiling.end(key, stopped=sample.finish == "stop")
        if sample.finish is not None:
            self._estimate.forget_request(sample.order)
            if sample.group.unfinished == 0:
                self._estimate.forget_group(sample.group.arrival)

    def interrupt(self, key: int) -> None:
        """Tokens of an incarnation have come by unseen: what waited for them is bounded as it stands."""
        self._ceiling.end(key, stopped=False)

    def refit(self) -> bool:
        """Fit the confidences' temperatures now, to what serving has shown; False where that is too little."""
        return self._online is not None and self._online.refit() is not None

    def new_policy(self) -> None:
        self.switch.renew()
        if self._online is not None:
            self._online.new_policy()

    def new_drafter(self) -> None:
        self.new_policy()
        self._estimate = AcceptanceEstimate(self._drafts)

    def report(self) -> DraftReport:
        """Sums that only grow, of now."""
        ceiling, errors = self._ceiling.sums, self._cost.errors
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
        """Plain steps of these samples that nobody planned, one for each token."""
        for sample, count in zip(samples, tokens, strict=True):
            self._stats(sample.group).plain_steps += count

    # --- rows -----------------------------------------------------------------------------------

    def _stats(self, group: Group) -> DraftStats:
        """Those of its domain and its policy; past a number of such pairs the rest share one."""
        pair = group.request.domain, policy_of(group)
        if pair not in self._classes:
            pair = pair if len(self._classes) < _MOST_CLASSES else (_OTHERS, _OTHERS)
            self._classes.setdefault(pair, DraftStats(self._drafts))
        return self._classes[pair]

    def _by_class(self, samples: Sequence[Sample]) -> list[tuple[DraftStats, slice | list[int]]]:
        """Sums that these samples go into, and which of them."""
        stats = {group: self._stats(group) for group in dict.fromkeys([sample.group for sample in samples])}
        members = {id(own): (own, []) for own in stats.values()}
        if len(members) == 1:
            return [(own, slice(None)) for own, _ in members.values()]
        for row, sample in enumerate(samples):
            members[id(stats[sample.group])][1].append(row)
        return list(members.values())

    def _observe_plain(self, step: DraftStep, first: int) -> None:
        """Rows from the `first` on, which had no drafts."""
        samples = step.samples[first:]
        for stats, own in self._by_class(samples):
            stats.plain_steps += len(samples) if isinstance(own, slice) else len(own)
        self._meet(step, range(first, len(step.samples)))

    def _meet(self, step: DraftStep, rows: Iterable[int]) -> None:
        """Show tokens of these rows to trimmed steps that wait for them."""
        if not self._ceiling.waits:
            return
        for row in rows:
            key = step.keys[row]
            if self._ceiling.is_open(key):
                for token, logprob in zip(*step.emitted_by(row), strict=True):
                    self._ceiling.plain(key, token, logprob)

    def _observe_counts(self, step: DraftStep, verified_B: np.ndarray) -> None:
        """What became of the drafts of the first requests, which all had some."""
        verdict, proposal, rows = step.verdict, step.proposal, len(verified_B)
        assert verdict is not None and proposal is not None and step.emitted is not None
        keep_B, emitted_B = np.array(step.keep[:rows]), np.array(step.emitted[:rows])
        whole_B, made_B = np.array(verdict.num_accepted[:rows]), np.array(proposal.lens)
        accepted_B = np.minimum(whole_B, keep_B)
        for stats, own in self._by_class(step.samples[:rows]):
            stats.observe(made_B[own], verified_B[own], accepted_B[own], emitted_B[own], keep_B[own])
        if self._config.mode == "cap_accept":
            stopped_B = np.array([sample.finish == "stop" for sample in step.samples[:rows]])
            whole = int(np.where(stopped_B, emitted_B, whole_B + 1).sum())
            self._ceiling.exact(int(emitted_B.sum()), whole, rows)
        else:
            self._observe_ceilings(step, accepted_B)

    def _observe_ceilings(self, step: DraftStep, accepted_B: np.ndarray) -> None:
        """What the drafts that were not verified would have added: none, in most steps."""
        assert step.proposal is not None and step.emitted is not None
        rows, steps, total = len(accepted_B), 0, 0
        turns = self._turns(rows)
        if len(turns) < rows:
            self._meet(step, sorted({*range(rows)}.difference(turns)))
        for row in turns:
            if self._unknown(step, row):
                continue
            made, verified, accepted = step.proposal.lens[row], len(step.drafts[row]), int(accepted_B[row])
            if is_exact(made, verified, accepted, step.emitted[row]) and not self._ceiling.is_open(step.keys[row]):
                steps += 1
                total += step.emitted[row]
            else:
                ids = step.proposal.ids_BG[row, :made].tolist()
                self._observe_ceiling(step, row, ids, verified, accepted)
        if steps:
            self._ceiling.exact(total, total, steps)

    def _unknown(self, step: DraftStep, row: int) -> bool:
        """Rejection that trims rows sampled from more than logits over temperature is left out: log p of a draft
        is not known there."""
        sampling = step.samples[row].row
        trims = self._config.rule == "rejection" and self._config.mode == "compact"
        return trims and not sampling.greedy and not _plain_temperature(sampling)

    def _observe_ceiling(self, step: DraftStep, row: int, ids: list[int], verified: int, accepted: int) -> None:
        sample, proposal = step.samples[row], step.proposal
        assert proposal is not None
        log_q = None
        if self._config.rule == "rejection" and not sample.row.greedy:
            log_q = [0.0] * len(ids)
            if proposal.log_q_BG is not None:
                log_q = proposal.log_q_BG[row, : len(ids)].tolist()
            elif proposal.logits_BGV is not None:
                scaled_GV = proposal.logits_BGV[row, : len(ids)].float() / sample.row.temperature
                ids_G = proposal.ids_BG[row, : len(ids)]
                log_q = torch.log_softmax(scaled_GV, -1).gather(1, ids_G[:, None])[:, 0].tolist()
        self._ceiling.step(step.keys[row], ids, log_q, verified, accepted, *step.emitted_by(row))

    def _observe_chances(self, step: DraftStep, verified_B: np.ndarray) -> None:
        verdict, proposal, chances_BG, rows = step.verdict, step.proposal, step.chances_BG, len(verified_B)
        assert verdict is not None and proposal is not None and chances_BG is not None
        labels_BG = labels_of(chances_BG, verified_B)
        self.reliability.observe(step.survival_BG, labels_BG)
        for row in self._turns(rows):
            chances = chances_BG[row, ~np.isnan(chances_BG[row])].tolist()
            if chances:
                sample = step.samples[row]
                self._estimate.observe(sample.group.arrival, sample.order, chances, policy_of(sample.group))
        spent_BG = np.arange(step.survival_BG.shape[1]) < verified_B[:, None]
        expected_B = np.where(spent_BG, step.survival_BG, 0.0).sum(1)
        self._watch(step, expected_B, np.array(verdict.num_accepted[:rows]), verified_B)
        self._rounds += 1
        if self._online is not None and proposal.confidence_BG is not None:
            self._online.observe(proposal.confidence_BG.double().cpu().numpy(), labels_BG)
            if self._config.recalibrate_every and self._rounds % self._config.recalibrate_every == 0:
                self._online.refit()

    def _turns(self, rows: int) -> range | list[int]:
        """Rows whose outcomes are remembered one by one: all of a few, of many so many a step in turn."""
        if rows <= _MOST_REMEMBERED:
            return range(rows)
        first = self._rounds * _MOST_REMEMBERED % rows
        return [(first + place) % rows for place in range(_MOST_REMEMBERED)]

    def _watch(self, step: DraftStep, expected_B: np.ndarray, accepted_B: np.ndarray, verified_B: np.ndarray) -> None:
        """Accepted drafts against those expected of verified ones: of all rows, by length and by policy."""
        rows, number = len(verified_B), step.plan.step
        if not rows:
            return
        self.switch.observe(number, float(expected_B.sum()), int(accepted_B.sum()), int(verified_B.sum()))
        # Lengths are told apart by powers of two.
        bits_B = np.frexp(np.array(step.anchors[:rows]) + 1.0)[1]
        for bits, sums in _summed(bits_B, expected_B, accepted_B, verified_B):
            self.switch.observe_length(number, (1 << bits) - 1, *sums)
        names = {group: policy_of(group) for group in dict.fromkeys([sample.group for sample in step.samples[:rows]])}
        policies = sorted({*names.values()})
        if policies != [""]:
            policy_B = np.array([policies.index(names[sample.group]) for sample in step.samples[:rows]])
            for place, sums in _summed(policy_B, expected_B, accepted_B, verified_B):
                if policies[place]:
                    self.switch.observe_policy(number, policies[place], *sums)


def _summed(
    place_B: np.ndarray, expected_B: np.ndarray, accepted_B: np.ndarray, verified_B: np.ndarray
) -> list[tuple[int, tuple[float, int, int]]]:
    """Each place that rows have, and the sums over those."""
    places = np.flatnonzero(np.bincount(place_B)).tolist()
    expected, accepted, verified = (
        np.bincount(place_B, values_B)[places].tolist() for values_B in (expected_B, accepted_B, verified_B)
    )
    return [(place, (e, int(a), int(v))) for place, e, a, v in zip(places, expected, accepted, verified, strict=True)]


def policy_of(group: Group) -> str:
    """The name of its LoRA policy, whatever the revision; empty for the base."""
    return "" if group.lease is None else group.lease.version.name


def _plain_temperature(row: RowSampling) -> bool:
    """Whether a token's log-probability is that of logits over temperature and nothing else."""
    return not (row.truncates or row.may_edit) and row.want.logprobs != "raw"
