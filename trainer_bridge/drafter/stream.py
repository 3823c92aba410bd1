"""Examples on their way to the trainer, in bounded memory.

Owns the order of training, who of several ranks gets what, and fetching ahead. `FeatureSource` is the
seam: states come from disk (`FeatureCache`), from memory (`KeptFeatures`), from the engine when asked for
(`LiveFeatures`), or from another process (`recipes.train_drafter.remote`). The trainer sees no difference.

A train_step's examples follow from its number alone, so a resumed run needs no position to go on from.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.features import FeatureExample, FeatureScorer

T = TypeVar("T")


class FeatureSource(Protocol):
    """A set of examples with states; `fetch` may be called from one thread other than its maker's."""

    def __len__(self) -> int: ...

    def fetch(self, places: Sequence[int]) -> list[FeatureExample]: ...


class KeptFeatures:
    """States that lie in memory already."""

    def __init__(self, items: Sequence[FeatureExample]) -> None:
        self._items = list(items)

    def __len__(self) -> int:
        return len(self._items)

    def fetch(self, places: Sequence[int]) -> list[FeatureExample]:
        return [self._items[place] for place in places]


class LiveFeatures:
    """States computed when they are needed, kept nowhere."""

    def __init__(self, scorer: FeatureScorer, examples: Sequence[DraftExample]) -> None:
        self._scorer, self._examples = scorer, list(examples)

    def __len__(self) -> int:
        return len(self._examples)

    def fetch(self, places: Sequence[int]) -> list[FeatureExample]:
        return self._scorer.score([self._examples[place] for place in places])


@dataclass(frozen=True, slots=True)
class ExampleOrder:
    """Every epoch is a permutation of its own; a train_step takes the next `batch` places, an epoch's last
    step what is left. Ranks take turns within a step."""

    num_examples: int
    batch: int
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_examples // self.batch)

    def at(self, train_step: int) -> list[int]:
        """This rank's places in a step; may be empty."""
        epoch, step = divmod(train_step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_examples)
        return order[step * self.batch : (step + 1) * self.batch][self.rank :: self.world_size].tolist()


def stream(
    source: FeatureSource,
    order: ExampleOrder,
    start: int,
    stop: int,
    prepare: Callable[[list[FeatureExample], int], T],
    ahead: int = 2,
) -> Iterator[T]:
    """`prepare(examples, step)` of steps [start, stop), of which at most `ahead` wait while one is worked on. What
    fetching and preparing raise is raised here; leaving early ends them."""
    waiting: queue.Queue[T | BaseException] = queue.Queue(maxsize=max(1, ahead))
    ended = threading.Event()
    # A thread's device is the first one, whichever its maker's is.
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def put(value: T | BaseException) -> bool:
        while not ended.is_set():
            try:
                waiting.put(value, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def fetch() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            for step in range(start, stop):
                if not put(prepare(source.fetch(order.at(step)), step)):
                    return
        except BaseException as error:  # handed to the consumer's thread, which raises it
            put(error)

    thread = threading.Thread(target=fetch, name="drafter-features", daemon=True)
    thread.start()
    try:
        for _ in range(start, stop):
            value = waiting.get()
            if isinstance(value, BaseException):
                raise value
            yield value
    finally:
        ended.set()
        thread.join()
