"""A step that speculates, from the choice of windows to what it taught.

Owns the order of things and the state that lives between steps: which slots the drafter knows, the
planner with what it reads, the draft states under the target's pages. Ignores how the target runs and
how tokens reach their samples (`engine.scheduler.loop`), and what is made of outcomes
(`engine.dspark.record`).

Life of a step: `draft` plans it and may draft; the loop runs the target over rows of 1 + drafts tokens;
`verify` says what is kept; `commit` gives the drafter every token whose target state exists now,
prompt chunks and plain rows included; `finish` takes in what became of it.

Shapes: B rows, G drafts, V vocabulary, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.dspark.acceptance import Round, verify_coupled, verify_rejection
from engine.dspark.alternation import Alternation
from engine.dspark.config import DSparkConfig, number_of_drafts
from engine.dspark.cost_model import CostModel, StepShape
from engine.dspark.draft_step import DraftStep
from engine.dspark.drafter import Committed, Drafter, DraftRows, Proposal
from engine.dspark.graph_choice import Graphs
from engine.dspark.persistence import Foresight
from engine.dspark.picks import pick_of
from engine.dspark.planner import Choice, Outlook, Planner, drafted, spend, windows
from engine.dspark.record import Record
from engine.dspark.round_noise import noise_of
from engine.dspark.scaling import SurvivalScaling, as_table, stored_scaling
from engine.dspark.told_rounds import ToldRounds
from engine.memory.transfer import send
from engine.request import Sample
from engine.sampling.sampler import Sampler
from engine.scheduler.pages import PageManager
from engine.scheduler.rows import RowColumns, Rows, drafting_first


class Speculation:
    """`context_len` is the target's. One per engine thread."""

    def __init__(
        self,
        config: DSparkConfig,
        drafter: Drafter,
        pages: PageManager,
        sampler: Sampler,
        context_len: int,
        cost: CostModel,
        device: torch.device,
    ) -> None:
        self.config = config
        self.drafter = drafter
        self.max_drafts = number_of_drafts(config, drafter.traits)
        self.scaling = SurvivalScaling(drafter.traits.max_drafts, device)
        if (stored := stored_scaling(config)) is not None:
            self.scaling.load(stored, config.rule)
        self.cost = cost
        self.record = Record(config, drafter.traits, cost, self.scaling)
        self.faulty: str | None = None
        """Why nothing is drafted until the drafter's weights are replaced."""
        self._pages = pages
        self._sampler = sampler
        self._context_len = context_len
        self._device = device
        self._planner = Planner(cost, None, probe_every=config.probe_every)
        self.by_request = False
        """Whether rounds draft blocks of different lengths, as many drafts of each row as the plan says."""
        self._foresight = Foresight()
        self._step = 0
        self._columns = RowColumns(pages.table.num_slots)
        self._keys_S = np.zeros(pages.table.num_slots, dtype=np.int64)
        """Key of the sequence that the drafter was told of by slot, 0 for none."""
        self._residents: dict[int, Sample] = {}
        self._told: dict[int, int] = {}
        """Slot -> tokens that it surely knows of it; rounds tell it more."""
        self.alternation: Alternation | None = None
        """Set by a loop that runs bursts of plain steps between planned ones."""

    # --- planning and drafting ----------------------------------------------------------------

    def draft(self, samples: list[Sample]) -> DraftStep:
        """Decide on the next step of these rows, each with room for its next token, and draft for it."""
        step, rows, most_B, proposal = self.foresee(self._columns.rows(samples))
        if step.plan.drafting:
            self._fill(step, rows, most_B, proposal)
        else:
            step.drafts, step.keep = [[] for _ in step.samples], [0] * len(step.samples)
        return step

    def foresee(self, rows: Rows) -> tuple[DraftStep, Rows, np.ndarray, Proposal | None]:
        """A step's plan without its drafts, its rows in order, the most drafts of each, and the drafts where they
        are known before the plan is made."""
        began = time.perf_counter()
        self._step += 1
        self._adopt(rows)
        most_B = self._windows(rows)
        proposal = None
        if self.drafter.traits.foreseen and most_B.any():
            drafting = np.flatnonzero(most_B)
            found = self._propose([rows.samples[b] for b in drafting.tolist()])
            most_B[drafting] = np.minimum(most_B[drafting], found.lens)
            kept = np.flatnonzero(most_B[drafting]).tolist()
            proposal = Proposal(found.ids_BG[kept], [found.lens[row] for row in kept])
        rows, most_B = drafting_first(rows, most_B)
        step, rows, most_B = self._plan(rows, most_B)
        self.record.planning_seconds += time.perf_counter() - began
        drafts = bool(most_B.any())
        if self.alternation is not None and not (drafts or self.drafter.traits.foreseen):
            self.alternation.had_no_room()
        elif self.alternation is not None:
            self.alternation.answered(step.plan.drafting, step.plan.probe, drafts)
        return step, rows, most_B, proposal

    def _adopt(self, rows: Rows) -> None:
        """Tell the drafter who came and who has gone since the last step."""
        keys_S, slots_B = np.zeros_like(self._keys_S), rows.slots_B
        keys_S[slots_B] = rows.keys_B
        came = np.flatnonzero(self._keys_S[slots_B] != rows.keys_B).tolist()
        for slot in np.flatnonzero((self._keys_S != keys_S) & (self._keys_S != 0)).tolist():
            self.drafter.release(slot)
            self.record.forget(int(self._keys_S[slot]), self._residents.pop(slot))
        for b in came:
            slot, sample = int(slots_B[b]), rows.samples[b]
            self.drafter.admit(slot, sample.tokens())
            self._residents[slot] = sample
            self._told[slot] = sample.length - 1
        self._keys_S = keys_S

    def _windows(self, rows: Rows) -> np.ndarray:
        """The most drafts each row may verify, within what it asked for, its length, the contexts and the pages
        it can get; int64 [B]."""
        traits = self.drafter.traits
        if self.faulty is not None:
            return np.zeros(len(rows), dtype=np.int64)
        context = min(traits.context_len, self._context_len, self.config.max_context or self._context_len)
        anchors_B = rows.length_B - 1
        most_B = windows(self.max_drafts, rows.remaining_B, anchors_B, self._context_len, context, traits.block)
        most_B = np.minimum(most_B, rows.most_B)
        if self.config.mode == "compact":
            most_B = np.where(self.record.allows(self._step, rows), most_B, 0)
        wanted_B = np.where(most_B > 0, anchors_B + np.maximum(traits.block, 1 + most_B), 0)
        for b in self._pages.reserve_together(rows.slots_B, wanted_B):
            if most_B[b] and not self._pages.reserve(rows.sequence(b), int(wanted_B[b])):
                room = self._pages.room(rows.sequence(b)) - int(anchors_B[b])
                most_B[b] = 0 if room < traits.block else min(most_B[b], room - 1)
        return most_B

    def least(self, rows: Rows, most_B: np.ndarray) -> np.ndarray:
        """Drafts of each row that come before all others, int64 [B]."""
        return np.minimum(np.maximum(rows.least_B, self.config.least), most_B)

    def _chances(self, rows: Rows) -> np.ndarray:
        """What is known of each row's survivals before it drafts, float64 [B, G]."""
        kinds = self.record.kinds(rows.samples)
        prior_BG = self.record.priors(rows.samples, kinds)
        return self._foresight.survivals(self._step, rows.keys_B.tolist(), kinds, prior_BG)[:, : self.max_drafts]

    def _note(self, step: int, samples: Sequence[Sample], keys: Sequence[int], survival_BG: np.ndarray) -> None:
        """What drafters were sure of, for later steps: of the first of these."""
        kinds = self.record.kinds(samples[: len(survival_BG)])
        self._foresight.note(step, keys[: len(kinds)], survival_BG * self.record.kept(kinds))

    def _plan(self, rows: Rows, most_B: np.ndarray) -> tuple[DraftStep, Rows, np.ndarray]:
        """The step without drafts, but with its budget, its rows and the most drafts of each. Where their
        number is chosen by row, those that make any come first, samples of a prompt side by side."""
        count, total, context_B = len(rows), int(most_B.sum()), rows.length_B.astype(np.float64)
        outlook = Outlook(self._chances(rows), self.least(rows, most_B), most_B, context_B, rows.distinct_tokens)
        if self.config.mode == "compact":
            choice = self._planner.choose(outlook, self.record.switch.allows(self._step, count))
        else:
            drafting = total > 0 and (self.config.max_rows is None or count <= self.config.max_rows)
            budget = total if drafting else 0
            if drafting and self.config.mode == "cap_accept":
                # Drafts are made anyway here: what must be verified is, even where plain steps would pay more.
                budget = max(self._planner.choose(outlook).budget, int(outlook.least_B.sum()))
            choice = Choice(drafting, budget, count + (total if drafting else 0), 0.0, 0.0)
        share = 1.0
        if self.by_request and choice.drafting:
            share = choice.slots / (count * self.max_drafts)
            made_B = np.minimum(most_B, choice.window) if choice.window else drafted(outlook, choice.slots)
            rows, most_B = drafting_first(rows, made_B)
        even = choice.window > 0
        step = DraftStep(
            samples=rows.samples,
            keys=rows.keys_B.tolist(),
            known=rows.known_B.tolist(),
            anchors=(rows.length_B - 1).tolist(),
            plan=choice.plan(self._step, rows.slots_B.tolist()),
            shape=StepShape(count, count, choice.drafting, outlook.tokens_read, float(context_B.sum()), share, even),
            price=choice.price,
            promised=choice.promised,
        )
        return step, rows, most_B

    def _fill(self, step: DraftStep, rows: Rows, most_B: np.ndarray, proposal: Proposal | None) -> None:
        """Draft, and spend the budget over what came of it."""
        members = int((most_B > 0).sum())
        samples = step.samples[:members]
        if proposal is None:
            proposal = self._propose(samples)
        least_B = self.least(rows, most_B)[:members]
        most = np.minimum(most_B[:members], proposal.lens).tolist()
        if proposal.confidence_BG is None:
            step.survival_BG = self.record.priors(samples, self.record.kinds(samples))
        else:
            step.survival_BG = self.scaling.survival(proposal.confidence_BG).double().cpu().numpy()
            self._note(self._step, samples, [sample.held.key for sample in samples], step.survival_BG)
        survival_BG = torch.from_numpy(step.survival_BG[:, : self.max_drafts])
        least_B = np.minimum(least_B, most)
        lens = spend(survival_BG, torch.from_numpy(least_B), torch.tensor(most), step.plan.budget).tolist()
        rest = [0] * (len(step.samples) - members)
        step.plan = step.plan.spent(lens + rest)
        step.keep = lens + rest
        verified = lens if self.config.mode == "compact" else most
        ids_BG = proposal.ids_BG.tolist()
        step.drafts = [ids[:count] for ids, count in zip(ids_BG, verified, strict=True)] + [[] for _ in rest]
        step.proposal = proposal
        counts_B = np.array([1 + len(drafts) for drafts in step.drafts])
        contexts_B = np.array([sample.length for sample in step.samples])
        # Drafters make whole blocks here, whatever the plan asked of them.
        tier, queries = int(counts_B.sum()), float((contexts_B * counts_B).sum())
        step.shape = replace(step.shape, tier=tier, context_queries=queries, share=1.0)

    def _propose(self, samples: list[Sample], device: torch.device | None = None) -> Proposal:
        traits, page_size = self.drafter.traits, self._pages.page_size
        anchors, slots = [sample.length - 1 for sample in samples], [sample.held.slot for sample in samples]
        width, device = -(-(max(anchors) + max(1, traits.block)) // page_size), device or self._device
        return self.drafter.propose(
            DraftRows(
                slots=slots,
                anchor_ids_B=send(np.array([sample.ids[-1] for sample in samples], dtype=np.int64), device),
                positions_B=send(np.array(anchors, dtype=np.int64), device),
                page_tables_BP=send(self._pages.table.pages_SP[slots, :width], device),
                pick=pick_of(self.config.rule, samples, anchors, self._sampler, self._device),
            )
        )

    # --- what the target said -----------------------------------------------------------------

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `commit` needs."""
        return self.drafter.traits.captured_layers

    def verify(self, step: DraftStep, logits_RV: torch.Tensor) -> list[int]:
        """Drafts of each row that are kept; `step.verdict` has the tokens. `logits_RV` are those of all rows'
        tokens, in order."""
        assert step.proposal is not None, "nothing was drafted"
        rows = [sample.row for sample in step.samples]
        ids_BG = step.proposal.ids_BG
        missing = len(rows) - len(ids_BG)
        if missing:
            ids_BG = torch.cat((ids_BG, ids_BG.new_zeros(missing, ids_BG.shape[1])))
        round = Round(rows, step.anchors, ids_BG, [len(drafts) for drafts in step.drafts])
        if self.config.rule == "coupled":
            step.verdict = verify_coupled(logits_RV, round, self._sampler)
        else:
            round.logits_BGV = step.proposal.logits_BGV
            step.verdict = verify_rejection(logits_RV, round, noise_of(step.samples, step.anchors, self._device))
        return [min(pair) for pair in zip(step.verdict.num_accepted, step.keep, strict=True)]

    def commit(
        self,
        batch: ForwardBatch,
        slots: Sequence[int],
        counts: Sequence[int],
        kept: Sequence[int],
        features: dict[int, torch.Tensor],
    ) -> None:
        """The first `kept[b]` of each request's `counts[b]` tokens in `batch` are part of it for good."""
        ids_T, positions_T, write_slots_T = batch.input_ids_T, batch.positions_T, batch.write_slots_T
        if list(kept) != list(counts):
            starts = np.cumsum([0, *counts[:-1]])
            places = [start + place for start, count in zip(starts, kept, strict=True) for place in range(count)]
            places_T = send(np.array(places, dtype=np.int64), self._device)
            ids_T, positions_T, write_slots_T = ids_T[places_T], positions_T[places_T], write_slots_T[places_T]
            features = {layer: value[places_T] for layer, value in features.items()}
        self.drafter.commit(Committed(slots, kept, ids_T, positions_T, write_slots_T, features))

    def finish(self, step: DraftStep, seconds: float | None) -> None:
        """The step's tokens are with their samples. `seconds` is what it took, None where it did more."""
        if self.alternation is not None and not step.drafting:
            # Plain steps run as bursts here, and their times are those of bursts.
            seconds = None
        self._complete(step)
        self.record.observe(step, seconds)

    def _complete(self, step: DraftStep) -> None:
        """What follows from its verdict, where nobody has said so."""
        if step.emitted is None:
            step.emitted = [len(sample.ids) - known for sample, known in zip(step.samples, step.known, strict=True)]
        if step.verdict is not None and step.chances_BG is None:
            step.chances_BG = as_table(step.verdict.chances[: len(step.survival_BG)], self.drafter.traits.max_drafts)

    def plan_for(
        self, tiers: Sequence[int], draft_tiers: Sequence[int] | None = None, graphs: Graphs | None = None
    ) -> None:
        """Rounds run as graphs of these numbers of verify rows and, where blocks are drafted by request, of these
        numbers of block slots; `graphs` says which of them there are."""
        self.by_request = draft_tiers is not None
        every, ragged = self.config.probe_every, self.by_request
        if self.drafter.traits.lead and ragged:
            # How many slots yield drafts is known ahead only where all do.
            draft_tiers, graphs = None, None
        self._planner = Planner(
            self.cost, tiers, probe_every=every, ragged=ragged, draft_tiers=draft_tiers, graphs=graphs
        )

    def learn(self, rounds: ToldRounds, seconds: float | None) -> None:
        """Rounds of one plan that the device decided on by itself, each as `finish`: confidences of the last one that
        had any are news too."""
        newest = rounds.newest_survivals() if rounds.outcomes.confidence_NG is not None else None
        if newest is not None:
            self._note(rounds.foreseen.plan.step, *newest)
        self.record.observe_rounds(rounds, seconds)
        plan = rounds.foreseen.plan
        if self.by_request and not plan.probe:
            self._planner.came(plan.window, *rounds.promised_and_kept())
        if not self.captured_layers:
            self._tell([sample for sample in rounds.samples if sample.sequence is not None])

    # --- plain steps in bursts ------------------------------------------------------------------

    def absorb(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        write_slots_T: torch.Tensor,
        features: dict[int, torch.Tensor],
    ) -> None:
        """Commit tokens of a burst's steps, in any order and on the device alone: what a captured graph does.
        Those that are nobody's have no slot (-1)."""
        self.drafter.commit(Committed((), (), ids_T, positions_T, write_slots_T, features))

    def burst(self, samples: list[Sample], tokens: Sequence[int], seconds: float | None) -> None:
        """A burst of plain steps has been committed: tokens of each sample, in `seconds` a step where that is
        known."""
        self.record.passed(samples, tokens)
        running = [sample for sample in samples if sample.sequence is not None]
        for sample in running:
            # Whatever was open waited for tokens that nobody looked at.
            self.record.interrupt(sample.held.key)
        if not running:
            return
        rows = self._columns.rows(running)
        if seconds is not None:
            context = float(rows.length_B.sum())
            shape = StepShape(len(running), len(running), False, rows.distinct_tokens, context)
            self.cost.observe(shape, seconds)
        if not self.captured_layers:
            self._follow(rows)

    def _follow(self, rows: Rows) -> None:
        """Tell a drafter that needs nothing but tokens of those that bursts brought, and ask for a round
        where it has found something to say."""
        self._adopt(rows)
        self._tell(rows.samples)
        if self.drafter.traits.foreseen and self.alternation is not None and self.alternation.wants_hints:
            going_on = [sample for sample in rows.samples if sample.remaining > 1]
            if going_on and any(self._propose(going_on, torch.device("cpu")).lens):
                self.alternation.hint()

    def _tell(self, samples: list[Sample]) -> None:
        for sample in samples:
            slot, start, end = sample.held.slot, self._told[sample.held.slot], sample.length - 1
            self._told[slot] = end
            new = end - start
            ids_T = torch.tensor(sample.ids[len(sample.ids) - 1 - new : len(sample.ids) - 1], dtype=torch.int64)
            positions_T = torch.arange(start, end)
            self.drafter.commit(Committed([slot], [new], ids_T, positions_T, positions_T, {}))

    def passed(self, steps: int) -> None:
        """Steps of a burst, or further rounds of the last plan, have been launched."""
        assert self.alternation is not None
        self._step += steps
        self.alternation.passed(steps)
        self._planner.passed(steps)

    # --- changes between steps ------------------------------------------------------------------

    def new_policy(self) -> None:
        """The target has other weights: what was learnt of acceptance counts for less."""
        self.record.new_policy()

    def new_drafter(self) -> None:
        """The drafter has other weights. States of cached tokens stay those of the old ones: that costs acceptance."""
        self.faulty = None
        self._foresight.renew()
        self._planner.renew()
        self.record.new_drafter()
