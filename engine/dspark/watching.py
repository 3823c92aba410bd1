"""What a trainer in the same process is told of rounds and samples.

Owns the interface. Ignores what becomes of it (`trainer_bridge.drafter.recorder`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from engine.dspark.states import StateStore
from engine.request import Sample
from engine.scheduler.pages import PageManager

if TYPE_CHECKING:
    from engine.dspark.speculation import DraftStep


class DraftWatcher(Protocol):
    """Called on the engine's thread, between a step's results and the next step. No method may raise."""

    def on_round(self, step: DraftStep) -> None:
        """A step that verified drafts; its tokens are with their samples."""
        ...

    def on_sample(self, sample: Sample, states_TMD: torch.Tensor) -> None:
        """A sample ends. `states_TMD` are the watcher's own: of all its tokens but the last, whose state
        nobody needed; M as `StateStore.layers`."""
        ...


def hand_over(watcher: DraftWatcher, states: StateStore, pages: PageManager, sample: Sample) -> None:
    sequence, count = sample.sequence, sample.length - 1
    assert sequence is not None
    pages_P = torch.from_numpy(pages.table.pages(sequence.slot, 0, pages.pages_for(count)))
    watcher.on_sample(sample, states.read(pages_P.to(pages.pool.device), count))
