"""One step after another: the serial loop.

Owns the order of a step: start, admit, grow, forward, sample, commit. Ignores policy in each.
Everything a step decides is visible when it returns; an overlapped loop will promise the same.
"""

from __future__ import annotations

import time

import torch

from engine.metrics import EngineCounters
from engine.request import Sample
from engine.runner.model_runner import ModelRunner
from engine.sampling.sampler import Sampler, SampleResult
from engine.scheduler.batching import BatchBuilder
from engine.scheduler.commit import Committer
from engine.scheduler.prefill import Prefill
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scoring import score_chunk


class SerialLoop:
    """Runs the scheduler's choices to their end before making new ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        builder: BatchBuilder,
        runner: ModelRunner,
        sampler: Sampler,
        committer: Committer,
        counters: EngineCounters,
    ) -> None:
        self._scheduler = scheduler
        self._builder = builder
        self._runner = runner
        self._sampler = sampler
        self._committer = committer
        self._counters = counters
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
        logits_RV = self._forward(rows, chunks) if rows or chunks else None
        self.settle()
        for prefill, _ in chunks:
            if prefill.done:
                started += self._complete(prefill)
        self._sample(rows, started, logits_RV, hold=not decode)
        self._counters.steps += 1
        self._counters.decode_rows += len(rows)
        self._counters.step_seconds += time.perf_counter() - began
        return True

    def _forward(self, decode: list[Sample], chunks: list[tuple[Prefill, int]]) -> torch.Tensor:
        batch = self._builder.build(decode, chunks)
        hidden_TD = self._runner.hidden(batch)
        rows_R = batch.logit_rows_R
        logits_RV = self._runner.logits(hidden_TD if len(rows_R) == batch.num_tokens else hidden_TD[rows_R])
        for sample in decode:
            assert sample.sequence is not None
            sample.sequence.computed += 1
        offset, row = len(decode), len(decode)
        for prefill, count in chunks:
            start = prefill.sequence.computed
            if prefill.scorer is not None:
                score_chunk(self._runner, prefill, hidden_TD[offset : offset + count], start)
            prefill.sequence.computed += count
            offset += count
            self._counters.computed_tokens += count
            self._scheduler.pages.publish(prefill.sequence, prefill.tokens)
            if prefill.done and prefill.samples:
                prefill.logits_1V = logits_RV[row : row + 1]
                row += 1
        return logits_RV[: len(decode)]

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
