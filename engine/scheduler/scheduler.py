"""Who runs next: starting of samples, growth and retraction.

Owns the decisions of a step over the queues (`engine.scheduler.queues`); who is admitted is
`engine.scheduler.admitter`'s. Ignores tensors and sampling (`engine.scheduler.loop`), and how pages change
hands (`engine.scheduler.pages`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.adapters import Adapters
from engine.cache.key import Namespace
from engine.config import SchedulerConfig
from engine.metrics import EngineCounters
from engine.request import Group, Sample, SampleState
from engine.scheduler.admitter import Admitter
from engine.scheduler.pages import PageManager, Sequence
from engine.scheduler.prefill import Prefill, ScoreTask
from engine.scheduler.queues import Queues
from engine.scheduler.rows import Rows


class Scheduler(Queues):
    """The queues, and what happens to who is in them from step to step."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageManager,
        counters: EngineCounters,
        namespace_of: Callable[[Group], Namespace],
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__(config)
        self.pages = pages
        self.counters = counters
        self._admitter = Admitter(self, pages, counters, namespace_of, adapters)

    # --- entering -------------------------------------------------------------------------

    def add(self, samples: list[Sample]) -> None:
        for sample in samples:
            self.enqueue(sample)
        self._admitter.ahead(samples[:1])

    def add_scoring(self, tasks: list[ScoreTask]) -> None:
        self.scoring.extend(tasks)

    # --- one step's decisions ---------------------------------------------------------------

    def start_ready(self) -> list[tuple[Sample, Prefill]]:
        """Start samples of finished prefills as far as there is room, oldest first."""
        started = []
        for prefill in [p for p in self.prefills if p.done]:
            started += self.start_samples(prefill)
        self.pages.copy_forked()
        return started

    def start_samples(self, prefill: Prefill) -> list[tuple[Sample, Prefill]]:
        """Fork the finished prefill for its samples; the last one takes its pages over. `pages.copy_forked` follows."""
        started: list[tuple[Sample, Prefill]] = []
        while prefill.samples and len(self.running) < self.max_running:
            sample = prefill.samples[0]
            target = self.target_length(sample)
            if len(prefill.samples) == 1:
                if not self.pages.reserve(prefill.sequence, target) and self.running:
                    break
                sequence = prefill.sequence
            else:
                sequence = self.pages.fork(prefill.sequence, target, self.spare)
                if sequence is None and not self.running:
                    # Nobody will ever make room: the first goes on with the pages at hand, the
                    # rest come back to the queue and find the prompt in the cache.
                    sequence = prefill.sequence
                    self.requeue(prefill.samples[1:])
                    del prefill.samples[1:]
                elif sequence is None:
                    break
            prefill.samples.pop(0)
            self._begin(sample, sequence, prefill, first=not started)
            started.append((sample, prefill))
        if not prefill.samples:
            self.prefills.remove(prefill)
        return started

    def admit(self) -> None:
        """Turn waiting samples into prefills while rows, pages, adapters and the queue's order allow."""
        self._admitter.admit()

    def grow(self) -> None:
        """Make sure every running sample has room for its next token, retracting the youngest
        when pages run out. It cannot fail: admission bounds each sample by the pool."""
        for sample in list(self.running):
            if sample.state is SampleState.RUNNING:
                self._make_room(sample)

    def reserve_ahead(self, rows: Rows, steps_B: np.ndarray) -> bool:
        """Room for each row's next `steps_B` tokens, never beyond its end. False if there is
        not enough; what was reserved stays with its rows."""
        ends_B = np.minimum(rows.length_B + steps_B, rows.end_B)
        lacking = self.pages.reserve_together(rows.slots_B, ends_B)
        return all(self.pages.reserve(rows.sequence(b), int(ends_B[b])) for b in lacking)

    def chunks(self) -> list[tuple[Prefill, int]]:
        """Prefills to work on in this step and how many tokens of each."""
        chosen = self._chunks()
        while not (chosen or self.running) and self._drop_prefill():
            chosen = self._chunks()
        return chosen

    def _chunks(self) -> list[tuple[Prefill, int]]:
        budget = self.prefill_tokens
        chosen = []
        for prefill in self.prefills:
            if prefill.done or budget <= 0:
                continue
            count = self.pages.prefillable(prefill.sequence, prefill.chunk(budget), self.spare)
            if count:
                chosen.append((prefill, count))
                budget -= count
        return chosen

    # --- leaving ------------------------------------------------------------------------------

    def retract(self, sample: Sample, publish: bool = True) -> None:
        """Back to the queue; what it computed goes to the cache so that resuming is a hit."""
        self._leave(sample, publish)
        sample.state = SampleState.WAITING
        sample.mixed_kv = False
        sample.retractions += 1
        self.counters.retractions += 1
        self.enqueue(sample)

    def remove(self, sample: Sample) -> None:
        """Take a sample out wherever it stands; its computed tokens are published."""
        if sample.state is SampleState.WAITING:
            self.waiting.remove(sample)
        elif sample.state is SampleState.PREFILLING:
            prefill = next(p for p in self.prefills if sample in p.samples)
            prefill.samples.remove(sample)
            if not prefill.samples:
                self.prefills.remove(prefill)
                self.pages.close(prefill.sequence, prefill.tokens)
        elif sample.state is SampleState.RUNNING:
            self._leave(sample, publish=True)
        sample.state = SampleState.FINISHED

    def finish_scoring(self, prefill: Prefill) -> None:
        self.prefills.remove(prefill)
        self.pages.close(prefill.sequence, prefill.tokens)

    def reset_prefills(self, which: Callable[[Prefill], bool] = lambda prefill: True) -> None:
        """Forget all prefills, or some: their pages or logits belong to a version that ends. What they were
        for goes back to the queue."""
        for prefill in [p for p in self.prefills if which(p)]:
            self._requeue(prefill)

    # --- inside ---------------------------------------------------------------------------------

    def _begin(self, sample: Sample, sequence: Sequence, prefill: Prefill, first: bool) -> None:
        group = sample.group
        prompt_tokens = len(group.prompt)
        if sample.cached_tokens is None:
            computed_it = first and prefill.group is group and group.hit is None
            own = computed_it or bool(sample.ids)
            sample.cached_tokens = min(prefill.hit.usable, prompt_tokens) if own else prompt_tokens
            self.counters.prompt_tokens += prompt_tokens
            self.counters.cached_tokens += sample.cached_tokens
        if group.hit is None:
            group.hit = prefill.hit
        sample.sequence, sample.mixed_kv = sequence, False
        self.set_running(sample)

    def _leave(self, sample: Sample, publish: bool) -> None:
        assert sample.sequence is not None
        self.running.remove(sample)
        self.pages.close(sample.sequence, sample.tokens() if publish else None)
        sample.sequence = None

    def _make_room(self, sample: Sample) -> None:
        sequence, pages = sample.sequence, self.pages
        assert sequence is not None
        if pages.has_room(sequence, sample.length):
            return
        # Several pages at once, so that a sample's pages tend to be neighbours.
        plenty = pages.allocator.num_free > len(self.running) + self.lookahead
        if plenty and pages.reserve(sequence, self.target_length(sample)):
            return
        while not pages.reserve(sequence, sample.length):
            if self._drop_ready():
                continue
            victim = self.running[-1]
            if victim is self.running[0] and self._drop_prefill(keep=0):
                continue
            self.retract(victim)
            if victim is sample:
                return

    def _drop_ready(self) -> bool:
        """Give back the pages of the youngest finished prefill that still holds samples."""
        for prefill in reversed(self.prefills):
            if prefill.done and prefill.samples:
                self._requeue(prefill)
                return True
        return False

    def _drop_prefill(self, keep: int = 1) -> bool:
        """Give back the pages of the youngest prefill under way, unless only `keep` are."""
        unfinished = [prefill for prefill in self.prefills if not prefill.done]
        if len(unfinished) <= keep:
            return False
        self._requeue(unfinished[-1])
        return True

    def _requeue(self, prefill: Prefill) -> None:
        self.prefills.remove(prefill)
        self.pages.close(prefill.sequence, prefill.tokens)
        self.requeue(prefill.samples)
        if prefill.task is not None:
            self.scoring.appendleft(prefill.task)
