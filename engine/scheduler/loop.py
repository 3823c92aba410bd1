"""One step after another: the serial loop.

Owns the order of a step: start, admit, grow, draft, forward, verify or sample, commit. Ignores policy
in each. Everything a step decides is visible when it returns; an overlapped loop will promise the same.
"""

from __future__ import annotations

import time

import torch

from engine.batch import ForwardBatch
from engine.dspark.draft_step import DraftStep
from engine.dspark.speculation import Speculation
from engine.metrics import EngineCounters
from engine.request import Sample
from engine.runner.model_runner import ModelRunner
from engine.sampling.columns import SampleResult
from engine.sampling.sampler import Sampler
from engine.scheduler.batching import BatchBuilder
from engine.scheduler.commit import Committer
from engine.scheduler.prefill import Prefill
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scoring import score_chunk

_NOTHING = torch.empty(0)
"""Stands in a capture until the layer has run."""


class SerialLoop:
    """Runs the scheduler's choices to their end before making new ones. With a `speculation` every step
    passes by it, whether it drafts or not."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        sampler: Sampler,
        committer: Committer,
        counters: EngineCounters,
        speculation: Speculation | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._sampler = sampler
        self._committer = committer
        self._counters = counters
        self._speculation = speculation
        self._held: tuple[list[Sample], SampleResult] | None = None

    in_flight = False
    """Nothing is ever left uncommitted between steps."""

    def step(self) -> bool:
        """Advance every running sample by a token and some prefills by a chunk. False if there
        was nothing to do."""
        return self._run(decode=True)

    def prefill(self) -> bool:
        """The part of a step that is not decoding: chunks of prefills and first tokens.

        First tokens are committed when the next chunk is under way, so that the device does not wait
        for the host; `settle` commits the last ones.
        """
        return self._run(decode=False)

    def settle(self) -> bool:
        """Make the host's view whole: commit first tokens still held. Whether there were any."""
        held, self._held = self._held, None
        if held is not None:
            self._committer.commit(*held)
        return held is not None

    def _run(self, decode: bool) -> bool:
        began = time.perf_counter()
        scheduler = self._scheduler
        started = scheduler.start_ready()
        scheduler.admit()
        rows: list[Sample] = []
        if decode:
            scheduler.grow()
            # `grow` may have sent somebody just started back to the queue.
            started = [pair for pair in started if pair[0].sequence is not None]
            fresh = {id(sample) for sample, _ in started}
            rows = [sample for sample in scheduler.running if id(sample) not in fresh]
        chunks = scheduler.chunks()
        if not (rows or chunks or started):
            return False
        draft = self._draft(rows)
        if draft is not None:
            rows = draft.samples
        logits_RV = self._forward(rows, chunks, draft) if rows or chunks else None
        self.settle()
        done = [prefill for prefill, _ in chunks if prefill.done]
        alone = not (chunks or started)
        for prefill in done:
            started += self._complete(prefill)
        scheduler.pages.copy_forked()
        if draft is not None and draft.verdict is not None:
            self._commit_rounds(draft)
            self._sample([], started, None, hold=False)
        else:
            self._sample(rows, started, logits_RV, hold=not decode)
        if draft is not None:
            going_on = [sample.sequence for sample in rows if sample.sequence is not None]
            scheduler.pages.fold(going_on)
        self._counters.steps += 1
        seconds = time.perf_counter() - began
        self._counters.step_seconds += seconds
        if draft is not None and self._speculation is not None:
            self._speculation.finish(draft, seconds if alone else None)
        return True

    def _draft(self, rows: list[Sample]) -> DraftStep | None:
        return None if self._speculation is None or not rows else self._speculation.draft(rows)

    def _feeds(self, draft: DraftStep | None) -> list[list[int]] | None:
        """What rows feed where they verify drafts, or run as chunks because those are faster here."""
        if draft is None:
            return None
        as_chunks = self._runner.replays_chunks and not self._builder.verify_as_decode
        return draft.tokens() if draft.drafting or as_chunks else None

    def _forward(
        self, decode: list[Sample], chunks: list[tuple[Prefill, int]], draft: DraftStep | None
    ) -> torch.Tensor:
        """Logits of decode rows, one each; where drafts were verified the verdict is with `draft`."""
        feeds = self._feeds(draft)
        batch = self._builder.build(decode, chunks, feeds)
        features = {} if self._speculation is None else dict.fromkeys(self._speculation.captured_layers, _NOTHING)
        hidden_TD = self._runner.hidden(batch, features or None)
        rows_R = batch.logit_rows_R
        wanted_RD = hidden_TD if len(rows_R) == batch.num_tokens else hidden_TD[rows_R]
        logits_RV = self._runner.logits(wanted_RD, batch.logit_adapters)
        counts = [1] * len(decode) if feeds is None else [len(feed) for feed in feeds]
        offset = row = sum(counts)
        self._counters.decode_rows += offset
        kept = counts
        if draft is not None and self._speculation is not None and draft.drafting:
            kept = [drafts + 1 for drafts in self._speculation.verify(draft, logits_RV[:offset])]
        else:
            for sample in decode:
                assert sample.sequence is not None
                sample.sequence.computed += 1
        self._commit_context(batch, decode, counts, kept, chunks, features)
        for prefill, count in chunks:
            start = prefill.sequence.computed
            if prefill.scorer is not None:
                score_chunk(self._runner, prefill, hidden_TD[offset : offset + count], start, self._builder.adapters)
            prefill.sequence.computed += count
            offset += count
            self._counters.computed_tokens += count
            self._scheduler.pages.publish(prefill.sequence, prefill.tokens, prefill.keeps_state)
            if prefill.done and prefill.samples:
                prefill.logits_1V = logits_RV[row : row + 1]
                row += 1
        return logits_RV[: len(decode)]

    def _commit_context(
        self,
        batch: ForwardBatch,
        decode: list[Sample],
        counts: list[int],
        kept: list[int],
        chunks: list[tuple[Prefill, int]],
        features: dict[int, torch.Tensor],
    ) -> None:
        """Give the drafter every token that is part of a request now, before anybody may share its page."""
        if self._speculation is None:
            return
        sequences = [sample.sequence for sample in decode] + [prefill.sequence for prefill, _ in chunks]
        slots = [sequence.slot for sequence in sequences if sequence is not None]
        lengths = [count for _, count in chunks]
        self._speculation.commit(batch, slots, counts + lengths, kept + lengths, features)

    def _commit_rounds(self, draft: DraftStep) -> None:
        assert draft.verdict is not None
        verdict = draft.verdict
        kept = [min(pair) for pair in zip(verdict.num_accepted, draft.keep, strict=True)]
        verified = [len(drafts) for drafts in draft.drafts]
        self._committer.commit_rounds(draft.samples, kept, verified, verdict.num_accepted, verdict.emitted)

    def _complete(self, prefill: Prefill) -> list[tuple[Sample, Prefill]]:
        """A prefill's last token has run: hand out scores, start as many samples as fit."""
        scorer, group = prefill.scorer, prefill.group
        if prefill.task is not None:
            self._scheduler.finish_scoring(prefill)
            prefill.task.on_scored(prefill)
            return []
        if scorer is not None and group is not None:
            group.prompt_logprobs = scorer.column()
        started = self._scheduler.start_samples(prefill)
        if prefill.samples:
            # Those left over start in a later step, when this step's logits are gone.
            assert prefill.logits_1V is not None
            prefill.logits_1V = prefill.logits_1V.clone()
        return started

    def _sample(
        self, decode: list[Sample], started: list[tuple[Sample, Prefill]], logits_RV: torch.Tensor | None, hold: bool
    ) -> None:
        samples = decode + [sample for sample, _ in started]
        if not samples:
            return
        parts = [logits_RV] if decode and logits_RV is not None else []
        for _, prefill in started:
            assert prefill.logits_1V is not None
            parts.append(prefill.logits_1V)
        logits_SV = parts[0] if len(parts) == 1 else torch.cat(parts)
        result = self._sampler.sample(logits_SV, [s.row for s in samples], [s.length for s in samples])
        self._held = samples, result
        if not hold:
            self.settle()
