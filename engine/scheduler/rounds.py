"""Rounds of speculation beside bursts of plain steps in the overlapped loop.

Owns the host's two ends of rounds that the device runs by itself: what is sent when they are launched,
and how their records become tokens of samples and lessons for the planner. Ignores how rounds run
(`engine.runner.round_stepper`) and the order of work (`engine.scheduler.overlapped`).

When rounds are launched others may be in flight, so that nothing is known of a row but bounds: it stands
at least where it was committed last, and a round takes it at most a window further. The device clamps.

Shapes: B rows, G drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.adapters import slot_of
from engine.dspark.draft_step import DraftStep
from engine.dspark.drafter import Proposal
from engine.dspark.outcomes import Outcomes
from engine.dspark.speculation import Speculation
from engine.dspark.survival import carried_on
from engine.dspark.told_rounds import ToldRounds
from engine.kernels.round_commit import HEAD, PARTS
from engine.memory.device_table import BAD
from engine.metrics import EngineCounters
from engine.request import Sample, SampleState
from engine.runner.round_plan import MOST_AT_ONCE, RoundModes, RoundPlan
from engine.runner.round_stepper import RoundResult, RoundStepper
from engine.runner.stepper import HostResult, Run, StepModes
from engine.scheduler.commit import Committer
from engine.scheduler.handover import has_host_stops
from engine.scheduler.pages import PageManager
from engine.scheduler.rows import Rows

_ENOUGH_SECONDS = 0.012
"""Rounds that take this long together keep a device busy until the host comes with the next ones."""


@dataclass(slots=True)
class Planned:
    """A round of `rows` that was decided on, `most_B` drafts a row at most, and the drafts where the host made them.
    Once it runs it has a `result`, `before` which other rounds ran."""

    step: DraftStep
    rows: Rows
    most_B: np.ndarray
    proposal: Proposal | None
    result: RoundResult | None = None
    before: RoundResult | None = None


class DeviceRounds:
    """`ring` tokens a row have room on the device, for two launches."""

    def __init__(
        self,
        speculation: Speculation,
        stepper: RoundStepper,
        pages: PageManager,
        committer: Committer,
        counters: EngineCounters,
        context_len: int,
        ring: int,
    ) -> None:
        self._speculation = speculation
        self._stepper = stepper
        self._pages = pages
        self._committer = committer
        self._counters = counters
        self._context_len = context_len
        self._idle = 0.0
        """Seconds that the device waited for the rounds that were committed last."""
        self.window = 1 + speculation.max_drafts
        """Tokens that a round yields a row at most."""
        self._at_once = min(MOST_AT_ONCE, ring // (2 * self.window))
        assert self._at_once >= 1, f"a ring of {ring} cannot hold two rounds of {self.window}"

    @property
    def follows_host(self) -> bool:
        """Whether drafts come from the host, which must know all tokens for that."""
        return self._speculation.drafter.traits.foreseen

    def plan(self, rows: Rows) -> Planned | None:
        """Rounds of these rows, None where plain steps are expected to pay more."""
        step, rows, most_B, proposal = self._speculation.foresee(rows)
        return Planned(step, rows, most_B, proposal) if step.plan.drafting else None

    def rounds(self, planned: Planned, most: int) -> int:
        """How many to launch at once, of the `most` steps that would be: more of short ones, which the host cannot
        keep pace with one by one."""
        if self.follows_host or most == 1 or planned.step.plan.probe:
            return 1
        step, rows, config = planned.step, planned.rows, self._speculation.config
        verified = step.plan.budget if config.mode == "compact" else int(planned.most_B.sum())
        shape = replace(
            step.shape,
            tier=step.plan.tier if step.plan.window else self._stepper.tier(len(rows) + verified),
            context_queries=float(rows.length_B.sum() * (1 + verified / len(rows))),
        )
        (seconds,) = self._speculation.cost.predict([shape])
        return max(1, min(self._at_once, int(rows.remaining_B.max()), int(_ENOUGH_SECONDS / seconds)))

    def reserve(self, rows: Rows, ahead_B: np.ndarray) -> None:
        """Pages for `ahead_B` tokens of each row and its drafter's block behind them, as far as there are
        any: without them a row drafts less."""
        block = max(1, self._speculation.drafter.traits.block)
        ends_B = np.minimum(np.minimum(rows.length_B + ahead_B, rows.end_B) + block, self._context_len)
        for b in self._pages.reserve_together(rows.slots_B, ends_B):
            self._pages.reserve(rows.sequence(b), int(ends_B[b]))

    def launch(self, planned: Planned, rounds: int, before: Planned | None) -> RoundResult:
        """Enqueue them. Pages are reserved, and the device has the rows' state. Rounds `before` are the last thing
        that it was given."""
        step, rows, config, table = planned.step, planned.rows, self._speculation.config, self._pages.table
        slots_B = rows.slots_B
        held_B = table.num_pages_S[slots_B]
        tables_BP = table.pages_SP[:, : int(held_B.max())][slots_B]
        prior_BG = np.zeros((len(rows), self.window - 1))
        if not self._speculation.drafter.traits.has_confidence:
            record = self._speculation.record
            prior_BG = record.priors(step.samples, record.kinds(step.samples))
        drafts_BG = None
        if planned.proposal is not None:
            drafts_BG = np.zeros((len(rows), self.window - 1), dtype=np.int64)
            ids_BG = planned.proposal.ids_BG.cpu().numpy()
            drafts_BG[: len(ids_BG)] = ids_BG[:, : self.window - 1]
        tier = step.plan.tier if config.mode == "compact" else len(rows) + int(planned.most_B.sum())
        plan = RoundPlan(
            slots=slots_B,
            rounds=rounds,
            verify=tier,
            budget=step.plan.budget,
            most=planned.most_B,
            least=self._speculation.least(rows, planned.most_B),
            room=held_B * self._pages.page_size,
            modes=RoundModes(StepModes.of(rows.particular), config.rule, config.mode),
            page_tables_BP=tables_BP,
            survival_BG=prior_BG[:, : self.window - 1],
            drafts_BG=drafts_BG,
            adapters=[slot_of(sample.group.lease) for sample in rows.samples] if rows.adapted else [],
            prefixes=self._stepper.prefixes(rows, tables_BP, tier),
            capture=step.plan.capture,
            window=step.plan.window,
        )
        self._counters.device_rounds += rounds
        captures = self._counters.graph_captures
        planned.result = result = self._stepper.run(plan, step.samples)
        if before is not None and captures == self._counters.graph_captures:
            # A device that waited for a graph to be made will not again.
            planned.before = before.result
        return result

    def commit(self, planned: Planned, result: tuple[HostResult, list[np.ndarray]], seconds: float | None) -> None:
        """Give samples what rounds brought, `seconds` each where that is known and the device cannot tell better."""
        (host, records), step = result, planned.step
        assert planned.result is not None, "it ran"
        if (device := planned.result.seconds_behind(planned.before)) is not None:
            idle, busy = device
            if planned.before is not None:
                self._counters.round_idle_seconds += idle
                self._counters.round_busy_seconds += busy
            # A host that cannot keep pace is late again and again; what holds it up once says nothing of rounds.
            seconds = (busy + min(idle, self._idle)) / len(records)
            self._idle = idle
        planned.before = None
        record_RBF = np.stack(records)
        running_B = np.array(
            [
                sample.sequence is not None and sample.sequence.key == key and sample.state is SampleState.RUNNING
                for sample, key in zip(step.samples, step.keys, strict=True)
            ]
        )
        known_B = np.array([len(sample.ids) for sample in step.samples])
        windows_RB, emitted_RB = record_RBF[:, :, 0], np.where(record_RBF[:, :, 0] >= 0, record_RBF[:, :, 4], 0)
        ends_RB = known_B + np.cumsum(emitted_RB, axis=0)
        rows_M = np.flatnonzero(running_B)
        taking = [step.samples[b] for b in rows_M.tolist()]
        runs = host.runs(rows_M, known_B[rows_M], ends_RB[-1][rows_M], [sample.row.want for sample in taking])

        def taken(there_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            """Rounds of rows that end with so many tokens, with those they had before and took: later ones never
            existed."""
            took_RB = running_B & (windows_RB >= 0) & (ends_RB - emitted_RB <= there_B)
            starts_RB = np.minimum(ends_RB - emitted_RB, there_B)
            return took_RB, starts_RB, np.minimum(ends_RB, there_B) - starts_RB

        # A reply says what became of its drafts, and is sent by the commit that ends its sample. Where the host alone
        # sees ends, nobody knows before.
        by_host_B, there_B = running_B.copy(), known_B.copy()
        by_host_B[rows_M] = [sample.watcher is not None or has_host_stops(sample) for sample in taking]
        kept_M = [_kept(sample, run[0]) for sample, run in zip(taking, runs, strict=True)]
        there_B[rows_M] += np.array(kept_M, dtype=np.int64)
        took_RB, _, kept_RB = taken(there_B)
        _use(step.samples, record_RBF, took_RB & ~by_host_B, kept_RB)
        self._take(step.samples, host, rows_M, runs, ends_RB[-1])
        took_RB, starts_RB, emitted_RB = taken(np.array([len(sample.ids) for sample in step.samples]))
        if by_host_B.any():
            _use(step.samples, record_RBF, took_RB & by_host_B, emitted_RB)
        self._counters.decode_rows += int(emitted_RB[took_RB].sum())
        round_N, row_N = np.nonzero(took_RB)
        if not len(round_N):
            return
        # Those that drafted come first in their round.
        order_N = np.lexsort((windows_RB[round_N, row_N] == 0, round_N))
        took = round_N[order_N], row_N[order_N]
        told = self._told(planned, *took, record_RBF[took], starts_RB[took], emitted_RB[took])
        self._speculation.learn(told, seconds)

    def _take(
        self, samples: list[Sample], host: HostResult, rows_M: np.ndarray, runs: list[Run], ends_B: np.ndarray
    ) -> None:
        """Tokens of these rows up to number `ends_B[b]`, and the end of samples whose logits went bad behind them."""
        self._committer.commit_runs([samples[b] for b in rows_M.tolist()], runs)
        for b in rows_M[(host.finished[rows_M] == BAD) & (ends_B[rows_M] == host.new[rows_M])].tolist():
            if samples[b].state is SampleState.RUNNING:
                self._committer.fail_bad_logits(samples[b])

    def _told(
        self,
        planned: Planned,
        round_N: np.ndarray,
        row_N: np.ndarray,
        record_NF: np.ndarray,
        starts_N: np.ndarray,
        emitted_N: np.ndarray,
    ) -> ToldRounds:
        """What the device did in rounds, and what became of all their drafts. Entry n is a row in a round, with
        `starts_N[n]` new tokens before it."""
        foreseen, ran, traits = planned.step, planned.result, self._speculation.drafter.traits
        assert ran is not None, "it ran"
        drafts = ran.window or self.window - 1
        prompts_B = np.array([sample.row.prompt_len for sample in foreseen.samples])
        anchors_N = starts_N + prompts_B[row_N] - 1
        window_N, verified_N, keep_N, accepted_N, _ = record_NF[:, :HEAD].T.astype(np.int64)
        values_NPG = record_NF[:, HEAD + drafts :].view(np.float32).reshape(len(row_N), PARTS - 1, drafts)
        if drafts < traits.max_drafts:
            values_NPG = np.pad(values_NPG, ((0, 0), (0, 0), (0, traits.max_drafts - drafts)))
        # All of them, mostly.
        drew_N = window_N > 0
        drew = slice(None) if drew_N.all() else np.flatnonzero(drew_N)
        values_DPG, window_D = values_NPG[drew], window_N[drew]
        verified_D, accepted_D = verified_N[drew], accepted_N[drew]
        survival_DG = values_DPG[:, 1].astype(np.float64)
        if self._speculation.by_request and traits.has_confidence:
            survival_DG = carried_on(survival_DG, window_D)
        by_row = self.follows_host or (self._speculation.by_request and not ran.window)
        # Whoever ended before is looked at no more.
        own, sample_D = np.unique(row_N[drew], return_inverse=True)
        outcomes = Outcomes(
            made_N=window_D if by_row else np.full(len(window_D), drafts),
            verified_N=verified_D,
            keep_N=keep_N[drew],
            accepted_N=accepted_D,
            emitted_N=emitted_N[drew],
            anchors_N=anchors_N[drew],
            price_N=np.full(len(window_D), foreseen.price),
            survival_NG=survival_DG,
            chances_NG=_chances(values_DPG[:, 2], verified_D, accepted_D),
            confidence_NG=values_DPG[:, 0].astype(np.float64) if traits.has_confidence else None,
            sample_N=sample_D,
            samples=[foreseen.samples[b] for b in own.tolist()],
            step=foreseen.plan.step,
            steps=int(round_N[-1]) + 1,
        )
        share = ran.share(self.window - 1)
        return ToldRounds(
            foreseen=foreseen,
            shape=replace(foreseen.shape, rows=ran.padded, tier=ran.verify, share=share, even=bool(ran.window)),
            round_N=round_N,
            row_N=row_N,
            drew_N=drew_N,
            starts_N=starts_N,
            anchors_N=anchors_N,
            emitted_N=emitted_N,
            ids_NG=record_NF[:, HEAD : HEAD + drafts].astype(np.int64),
            verified_N=verified_N,
            keep_N=keep_N,
            accepted_N=accepted_N,
            outcomes=outcomes,
            log_q_DG=values_DPG[:, 3, :drafts] if traits.has_probabilities else None,
        )


def _kept(sample: Sample, ids: list[int]) -> int:
    """How many of these tokens it keeps: not a last one that stops it and is not wanted."""
    stopped = bool(ids) and ids[-1] in sample.row.stop_ids and not sample.row.params.keep_stop
    return len(ids) - stopped


def _use(samples: list[Sample], record_RBF: np.ndarray, took_RB: np.ndarray, emitted_RB: np.ndarray) -> None:
    """What became of the drafts of these rounds, for their samples."""
    _, verified_RB, keep_RB, accepted_RB, _ = record_RBF[:, :, :HEAD].transpose(2, 0, 1)
    verified_RB = np.where(took_RB, verified_RB, 0)
    kept_RB = np.where(took_RB, np.minimum(np.minimum(accepted_RB, keep_RB), emitted_RB), 0)
    sums = (part_RB.sum(0).tolist() for part_RB in (verified_RB > 0, verified_RB, kept_RB))
    for sample, steps, verified, kept in zip(samples, *sums, strict=True):
        if steps:
            use = sample.draft_use
            use.steps += steps
            use.verified += verified
            use.accepted += kept


def _chances(chance_MG: np.ndarray, verified_M: np.ndarray, accepted_M: np.ndarray) -> np.ndarray:
    """float64: soft where they are known, else 1 up to the first draft that was not kept and 0 there."""
    place_G = np.arange(chance_MG.shape[1])
    beyond_MG = place_G - accepted_M[:, None]
    hard_MG = np.where(beyond_MG > 0, np.nan, beyond_MG < 0)
    chances_MG = np.where(np.isnan(chance_MG[:, :1]), hard_MG, chance_MG)
    chances_MG[place_G >= verified_M[:, None]] = np.nan
    return chances_MG
