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
import torch

from engine.dspark.block_estimate import BlockEstimate, is_exact
from engine.dspark.config import DSparkConfig
from engine.dspark.cost_model import CostModel
from engine.dspark.drafter import DrafterTraits
from engine.dspark.reliability import Reliability
from engine.dspark.report import DraftReport, series_of
from engine.dspark.scaling import OnlineScaling, SurvivalScaling, survival_labels
from engine.dspark.stats import DraftStats
from engine.dspark.survival import AcceptanceEstimate, DraftSwitch
from engine.request import Sample
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
        return self._estimate.survival(sample.group.arrival, sample.order, policy_of(sample))

    def allows(self, step: int, sample: Sample) -> bool:
        """Whether drafts pay at the sample's length and under its policy, as far as outcomes tell."""
        policy = policy_of(sample)
        return self.switch.allows_length(step, sample.length) and (
            not policy or self.switch.allows_policy(step, policy)
        )

    def observe(self, step: DraftStep, seconds: float | None) -> None:
        """A step whose tokens are with their samples."""
        if seconds is not None:
            self._cost.observe(step.shape, seconds)
        if step.verdict is None:
            for row in range(len(step.samples)):
                self._observe_plain(step, row)
            return
        self.probes += step.plan.probe
        drafting = len(step.survival_BG)
        for row in range(drafting, len(step.samples)):
            # There was nothing to draft for.
            self._observe_plain(step, row)
        self._observe_counts(step, drafting)
        self._observe_chances(step)
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
            self._stats(sample).plain_steps += count

    # --- rows -----------------------------------------------------------------------------------

    def _stats(self, sample: Sample) -> DraftStats:
        """Those of its domain and its policy; past a number of such pairs the rest share one."""
        pair = sample.group.request.domain, policy_of(sample)
        if pair not in self._classes:
            pair = pair if len(self._classes) < _MOST_CLASSES else (_OTHERS, _OTHERS)
            self._classes.setdefault(pair, DraftStats(self._drafts))
        return self._classes[pair]

    def _observe_plain(self, step: DraftStep, row: int) -> None:
        sample = step.samples[row]
        self._stats(sample).plain_steps += 1
        for token, logprob in zip(*step.emitted_by(row), strict=True):
            self._ceiling.plain(step.keys[row], token, logprob)

    def _observe_counts(self, step: DraftStep, rows: int) -> None:
        """What became of the first `rows` requests' drafts, which all had some."""
        verdict, proposal = step.verdict, step.proposal
        assert verdict is not None and proposal is not None and step.emitted is not None
        verified = [len(drafts) for drafts in step.drafts[:rows]]
        emitted = step.emitted[:rows]
        accepted = [min(pair) for pair in zip(verdict.num_accepted[:rows], step.keep, strict=False)]
        members: dict[int, tuple[DraftStats, list[int]]] = {}
        for row, sample in enumerate(step.samples[:rows]):
            stats = self._stats(sample)
            members.setdefault(id(stats), (stats, []))[1].append(row)
        for stats, own in members.values():
            parts = proposal.lens, verified, accepted, emitted, step.keep
            stats.observe(*([part[row] for row in own] for part in parts))
        if self._config.mode == "cap_accept":
            for sample, count, whole in zip(step.samples[:rows], emitted, verdict.num_accepted, strict=False):
                self._ceiling.exact(count, count if sample.finish == "stop" else whole + 1)
        else:
            self._observe_ceilings(step, verified, accepted, emitted)

    def _observe_ceilings(self, step: DraftStep, verified: list[int], accepted: list[int], emitted: list[int]) -> None:
        """What the drafts that were not verified would have added: none, in most steps."""
        assert step.proposal is not None
        steps, total, open_rows = 0, 0, []
        for row, parts in enumerate(zip(step.proposal.lens, verified, accepted, emitted, strict=False)):
            if self._unknown(step, row):
                continue
            if is_exact(*parts) and not self._ceiling.is_open(step.keys[row]):
                steps += 1
                total += emitted[row]
            else:
                open_rows.append(row)
        if steps:
            self._ceiling.exact(total, total, steps)
        for row in open_rows:
            ids = step.proposal.ids_BG[row, : step.proposal.lens[row]].tolist()
            self._observe_ceiling(step, row, ids, verified[row], accepted[row])

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

    def _observe_chances(self, step: DraftStep) -> None:
        verdict, proposal, rows = step.verdict, step.proposal, len(step.survival_BG)
        assert verdict is not None and proposal is not None
        verified, chances = [len(drafts) for drafts in step.drafts[:rows]], verdict.chances[:rows]
        labels_BG = survival_labels(chances, verified, self._drafts)
        self.reliability.observe(step.survival_BG, labels_BG)
        for row in self._turns(rows):
            if chances[row]:
                sample = step.samples[row]
                self._estimate.observe(sample.group.arrival, sample.order, chances[row], policy_of(sample))
        spent_BG = np.arange(step.survival_BG.shape[1]) < np.asarray(verified)[:, None]
        expected = np.where(spent_BG, step.survival_BG, 0.0).sum(1).tolist()
        self._watch(step, list(zip(expected, verdict.num_accepted[:rows], verified, strict=True)))
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

    def _watch(self, step: DraftStep, outcomes: list[tuple[float, int, int]]) -> None:
        """Accepted drafts against those expected of verified ones: of all rows, by length and by policy."""
        if not outcomes:
            return
        number = step.plan.step
        self.switch.observe(number, *_summed(outcomes))
        lengths: dict[int, list[tuple[float, int, int]]] = {}
        policies: dict[str, list[tuple[float, int, int]]] = {}
        for b, outcome in enumerate(outcomes):
            # Lengths are told apart by powers of two.
            lengths.setdefault((step.anchors[b] + 1).bit_length(), []).append(outcome)
            policy = policy_of(step.samples[b])
            if policy:
                policies.setdefault(policy, []).append(outcome)
        for bits, members in lengths.items():
            self.switch.observe_length(number, (1 << bits) - 1, *_summed(members))
        for policy, members in policies.items():
            self.switch.observe_policy(number, policy, *_summed(members))


def _summed(outcomes: list[tuple[float, int, int]]) -> tuple[float, int, int]:
    expected, accepted, verified = zip(*outcomes, strict=True)
    return sum(expected), sum(accepted), sum(verified)


def policy_of(sample: Sample) -> str:
    """The name of its LoRA policy, whatever the revision; empty for the base."""
    lease = sample.group.lease
    return "" if lease is None else lease.version.name


def _plain_temperature(row: RowSampling) -> bool:
    """Whether a token's log-probability is that of logits over temperature and nothing else."""
    return not (row.truncates or row.may_edit) and row.want.logprobs != "raw"
