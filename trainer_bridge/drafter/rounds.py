"""Full-window rounds: what a drafter achieves where every draft is verified.

Owns a small loop over an engine's runner in which every sample drafts a whole block in every step, the
target verifies all of it, and both outcome and confidences are kept. Calibration needs exactly this:
labels of trimmed windows are cut off. Everything that decides is the engine's: runner, drafter, picks,
verification. Ignores planning, scheduling and what is made of the log.

The engine must be idle: both use the same pages in the same thread.

Shapes: B rows, G drafts, T tokens, N rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.registry import make_attention
from engine.batch import ForwardBatch
from engine.build import Parts
from engine.config import number
from engine.dspark.acceptance import Round, Verdict, verify_coupled, verify_rejection
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import BlockDrafterModel, shared_ends
from engine.dspark.drafter import Committed, DraftRows
from engine.dspark.picks import CoupledPick, RejectionPick
from engine.dspark.round_noise import RoundNoise
from engine.dspark.scaling import Rule, survival_labels
from engine.dspark.stats import DraftStats
from engine.errors import TooLarge
from engine.memory.allocator import PRIVATE
from engine.memory.kv_pool import KVPool
from engine.sampling.params import RowSampling
from engine.scheduler.windows import refuse_windows
from engine.types import SamplingParams, Want


@dataclass(slots=True)
class RoundLog:
    """What rounds yielded. `logits` holds raw confidence logits [G] by round (empty where the drafter has no
    confidence head), `chances` how probable each draft's acceptance was, as `Verdict` has them, and `verified`
    how many drafts of the round have a label: those after a drafted end of the answer would never be
    emitted, and nothing was trained there."""

    drafts: int
    stats: dict[str, DraftStats] = field(default_factory=dict)
    logits: list[np.ndarray] = field(default_factory=list)
    chances: list[list[float]] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    texts: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def labels(self) -> np.ndarray:
        """Survival labels float64 [N, G]."""
        known = [chances[:count] for chances, count in zip(self.chances, self.verified, strict=True)]
        return survival_labels(known, self.verified, self.drafts)

    def confidences(self) -> np.ndarray:
        """Raw confidence logits float64 [N, G]."""
        return np.asarray(self.logits, np.float64).reshape(len(self.logits), self.drafts)

    def add(self, other: RoundLog) -> None:
        for domain, stats in other.stats.items():
            self.stats.setdefault(domain, DraftStats(self.drafts)).add(stats)
        for domain, texts in other.texts.items():
            self.texts.setdefault(domain, []).extend(texts)
        self.logits += other.logits
        self.chances += other.chances
        self.verified += other.verified
        self.domains += other.domains


@dataclass(slots=True, eq=False)
class _Row:
    """One sample: its tokens, where its pages are listed, and how it samples."""

    domain: str
    prompt_len: int
    tokens: list[int]
    table: int
    sampling: RowSampling
    ended: bool = False


class FullWindowRounds:
    """Plays rounds of `model` against the target of `parts`. Draft states lie under the target's page ids."""

    def __init__(self, parts: Parts, model: BlockDrafterModel, rule: Rule = "rejection") -> None:
        refuse_windows(parts.pages, "rounds of full windows")
        pool, backbone = parts.pages.pool, model.spec.backbone
        drafts = KVPool(backbone, pool.num_pages, pool.page_size, model.dtype, parts.device)
        backend = make_attention("auto", backbone, parts.device, dtype=model.dtype)
        self._drafter = BlockDrafter(model, shared_ends(parts.model), drafts, backend)
        self._parts, self._block, self._rule = parts, model.spec.block, rule
        self._tables_BP = torch.empty(0)
        self._keys = -(1 << 20)

    @torch.no_grad()
    def play(
        self, prompts: Sequence[tuple[str, np.ndarray]], params: SamplingParams, batch: int = 32, seed: int = 0
    ) -> RoundLog:
        """Rounds of samples after (domain, prompt ids) until each has `params.max_new` tokens or ends; `batch`
        of them side by side. Each has a seed of its own, from `seed` and its place."""
        log = RoundLog(self._drafter.traits.max_drafts)
        for start in range(0, len(prompts), batch):
            seeds = [(seed << 32) + start + place for place in range(batch)]
            self._play(prompts[start : start + batch], seeds, params, log)
        return log

    def _play(
        self, prompts: Sequence[tuple[str, np.ndarray]], seeds: list[int], params: SamplingParams, log: RoundLog
    ) -> None:
        limit = min(self._parts.limits.context_len, self._drafter.traits.context_len)
        eos = self._parts.model.spec.eos_ids
        rows = []
        for table, (domain, ids) in enumerate(prompts):
            if len(ids) + self._block >= limit:
                raise TooLarge(field=f"prompts[{table}]", expected=f"below {limit - self._block}", actual=len(ids))
            rows.append(
                _Row(domain, len(ids), ids.tolist(), table, RowSampling(params, Want(), seeds[table], ids, eos))
            )
        new = params.max_new
        lengths = [min(limit, row.prompt_len + new + 2 * self._block) for row in rows]
        counts = [self._parts.pages.pages_for(length) for length in lengths]
        taken = self._take_pages(sum(counts))
        try:
            tables_BP = np.zeros((len(rows), max(counts)), np.int32)
            for place, part in enumerate(np.split(taken, np.cumsum(counts)[:-1])):
                tables_BP[place, : len(part)] = part
            self._tables_BP = torch.from_numpy(tables_BP).to(self._parts.device)
            self._start(rows)
            while live := [row for row in rows if not self._done(row, new, limit)]:
                self._round(live, new, log)
        finally:
            self._parts.pages.allocator.free(taken, PRIVATE)
        for row in rows:
            log.texts.setdefault(row.domain, []).append(np.asarray(row.tokens[row.prompt_len :], np.uint32))

    def _done(self, row: _Row, new: int, limit: int) -> bool:
        return row.ended or len(row.tokens) - row.prompt_len >= new or len(row.tokens) - 1 + self._block > limit

    def _start(self, rows: list[_Row]) -> None:
        """Prompts in portions of the engine's budget, then every row's first token."""
        budget = number(self._parts.config.scheduler.prefill_tokens)
        last = []
        for row in rows:
            for start in range(0, row.prompt_len, budget):
                piece = row.tokens[start : min(start + budget, row.prompt_len)]
                hidden_TD, committed = self._forward([row], [piece], [start])
                self._drafter.commit(committed)
            last.append(hidden_TD[-1])
        logits_BV = self._parts.runner.logits(torch.stack(last))
        samplings = [row.sampling for row in rows]
        drawn = self._parts.sampler.sample(logits_BV, samplings, [row.prompt_len for row in rows])
        for row, token in zip(rows, drawn.ids.tolist(), strict=True):
            self._take(row, [token])

    def _round(self, rows: list[_Row], new: int, log: RoundLog) -> None:
        anchors = [len(row.tokens) - 1 for row in rows]
        samplings = [row.sampling for row in rows]
        noise = RoundNoise([s.seed for s in samplings], [row.table for row in rows], anchors, self._parts.device)
        rejecting = self._rule == "rejection"
        sampler = self._parts.sampler
        pick = RejectionPick(samplings, anchors, noise) if rejecting else CoupledPick(samplings, anchors, sampler)
        device = self._parts.device
        last_B = torch.tensor([row.tokens[-1] for row in rows], device=device)
        tables_BP = self._tables_BP[[row.table for row in rows]]
        proposal = self._drafter.propose(
            DraftRows(range(len(rows)), last_B, torch.tensor(anchors, device=device), tables_BP, pick)
        )
        pieces = [[row.tokens[-1], *ids] for row, ids in zip(rows, proposal.ids_BG.tolist(), strict=True)]
        hidden_TD, committed = self._forward(rows, pieces, anchors)
        logits_RV = self._parts.runner.logits(hidden_TD)
        played = Round(samplings, anchors, proposal.ids_BG, proposal.lens, proposal.logits_BGV if rejecting else None)
        verdict = (
            verify_rejection(logits_RV, played, noise) if rejecting else verify_coupled(logits_RV, played, sampler)
        )
        self._drafter.commit(_kept(committed, [kept + 1 for kept in verdict.num_accepted]))
        log.verified += [_before_end(row, piece[1:]) for row, piece in zip(rows, pieces, strict=True)]
        self._record(rows, verdict, proposal.confidence_BG, new, log)

    def _record(
        self, rows: list[_Row], verdict: Verdict, confidence_BG: torch.Tensor | None, new: int, log: RoundLog
    ) -> None:
        ids, start = verdict.emitted.ids.tolist(), 0
        for b, (row, kept) in enumerate(zip(rows, verdict.num_accepted, strict=True)):
            left = new - (len(row.tokens) - row.prompt_len)
            emitted = self._take(row, ids[start : start + kept + 1][:left])
            start += kept + 1
            stats = log.stats.setdefault(row.domain, DraftStats(log.drafts))
            stats.observe([log.drafts], [log.drafts], [kept], [emitted])
            log.chances.append(verdict.chances[b])
            log.domains.append(row.domain)
        if confidence_BG is not None:
            log.logits += list(confidence_BG.float().cpu().numpy())

    @staticmethod
    def _take(row: _Row, ids: list[int]) -> int:
        """Append up to and including the first that ends the sample; how many that was."""
        for place, token in enumerate(ids, 1):
            row.tokens.append(token)
            row.sampling.observe(token)
            if token in row.sampling.stop_ids:
                row.ended = True
                return place
        return len(ids)

    def _forward(self, rows: list[_Row], pieces: list[list[int]], starts: list[int]) -> tuple[torch.Tensor, Committed]:
        """Final states of all tokens, and what `commit` needs of them."""
        device, page = self._parts.device, self._parts.pages.page_size
        counts = [len(piece) for piece in pieces]
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        positions_T = torch.from_numpy(positions).to(device)
        tables_BP = self._tables_BP[[row.table for row in rows]].contiguous()
        rows_T = torch.from_numpy(np.repeat(np.arange(len(rows)), counts)).to(device)
        slots_T = tables_BP[rows_T, positions_T // page].long() * page + positions_T % page
        ids_T = torch.tensor([token for piece in pieces for token in piece], device=device)
        self._keys -= len(rows)
        batch = ForwardBatch(
            input_ids_T=ids_T,
            positions_T=positions_T,
            write_slots_T=slots_T,
            query_lens=counts,
            seq_lens=[s + n for s, n in zip(starts, counts, strict=True)],
            page_tables_BP=tables_BP,
            row_keys=list(range(self._keys, self._keys + len(rows))),
            num_decode=0,
            logit_rows_R=torch.empty(0, dtype=torch.int64, device=device),
        )
        features = {layer: torch.empty(0) for layer in self._drafter.traits.captured_layers}
        hidden_TD = self._parts.runner.hidden(batch, features)
        return hidden_TD, Committed(range(len(rows)), counts, ids_T, positions_T, slots_T, features)

    def _take_pages(self, count: int) -> np.ndarray:
        allocator = self._parts.pages.allocator
        taken = allocator.alloc(count)
        if taken is None:
            self._parts.cache.flush("all")
            taken = allocator.alloc(count)
        if taken is None:
            raise TooLarge(field="cache.kv_tokens", expected=f"{count} free pages", actual=allocator.num_free)
        return taken


def _before_end(row: _Row, drafts: list[int]) -> int:
    """Drafts up to the first that would end the sample, that one among them."""
    return next((k for k, token in enumerate(drafts, 1) if token in row.sampling.stop_ids), len(drafts))


def _kept(committed: Committed, keep: list[int]) -> Committed:
    """The first `keep[b]` tokens of every row."""
    starts = np.cumsum([0, *committed.counts[:-1]])
    places = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, keep, strict=True)])
    places_T = torch.from_numpy(places).to(committed.ids_T.device)
    features = {layer: value[places_T] for layer, value in committed.features.items()}
    ids, positions, slots = committed.ids_T, committed.positions_T, committed.write_slots_T
    return Committed(committed.slots, keep, ids[places_T], positions[places_T], slots[places_T], features)
