"""What a trainer in the same process is told of rounds and samples, and what it may do about drafts.

Owns the interface. Ignores what becomes of it (`trainer_bridge.drafter.recorder`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from engine.dspark.states import StateStore
from engine.errors import Unsupported
from engine.request import Sample
from engine.scheduler.commit import Committer
from engine.scheduler.pages import PageManager

if TYPE_CHECKING:
    from engine.dspark.draft_step import DraftStep
    from engine.dspark.speculation import Speculation


class DraftWatcher(Protocol):
    """Called on the engine's thread, between a step's results and the next step. No method may raise."""

    def on_round(self, step: DraftStep) -> None:
        """A step that verified drafts; its tokens are with their samples."""
        ...

    def wants(self, sample: Sample) -> bool:
        """A sample ends: whether to be told of it."""
        ...

    def on_sample(self, sample: Sample, states_TMD: torch.Tensor) -> None:
        """It does. The device may be busy: whoever waits for it here, decoding waits for. `states_TMD` are the
        watcher's own: of all its tokens but the last, whose state nobody needed; M as `StateStore.layers`."""
        ...


class Drafting:
    """What the owner of an engine may do about its drafts between steps. `settle` commits what is in flight."""

    def __init__(
        self,
        speculation: Speculation | None,
        pages: PageManager,
        committer: Committer,
        settle: Callable[[], object],
    ) -> None:
        self._speculation = speculation
        self._pages = pages
        self._committer = committer
        self._settle = settle

    def watch(self, watcher: DraftWatcher | None) -> None:
        """Tell `watcher` of rounds and of finished samples with their states. Raises `Unsupported` where the
        engine keeps none (`dspark.keep_states`)."""
        states = None if self._speculation is None else getattr(self._speculation.drafter, "states", None)
        if watcher is not None and states is None:
            raise Unsupported(field="dspark.keep_states", expected="true, to watch drafts", actual=False)
        on_finish = None if watcher is None or states is None else partial(_hand_over, watcher, states, self._pages)
        self._committer.on_finish = on_finish
        if self._speculation is not None:
            self._speculation.record.on_round = None if watcher is None else watcher.on_round

    def refit(self) -> bool:
        """Fit the temperatures of confidences to what serving has shown; False where that is too little."""
        return self._speculation is not None and self._speculation.record.refit()

    def stop(self, reason: str) -> None:
        """Nothing is drafted until the drafter gets other weights."""
        if self._speculation is not None:
            self._settle()
            self._speculation.faulty = reason


def _hand_over(watcher: DraftWatcher, states: StateStore, pages: PageManager, sample: Sample) -> None:
    sequence, count = sample.sequence, sample.length - 1
    assert sequence is not None
    if watcher.wants(sample):
        held = pages.table.pages(sequence.slot, 0, pages.pages_for(count))
        watcher.on_sample(sample, states.read(held, count))
