"""Engines that speculate, for tests: with tiny random drafters, n-grams, or a scripted one.

Owns their making. A scripted drafter knows what the target will say and errs where its script tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from engine import Engine
from engine.build import load_parts, make_speculation
from engine.dspark.config import DSparkConfig
from engine.dspark.drafter import Committed, DrafterTraits, DraftRows, Proposal
from engine.dspark.speculation import Speculation
from tests.support import VOCAB, make_config
from tests.unit.dspark.drafters import checkpoint, drafter_config, random_drafter, save_drafter

SHAPE = dict(num_target_layers=2, target_layer_ids=[0])


def save_random(folder: Path, seed: int = 0, **overrides) -> Path:
    """D-RAND for T-FULL as a checkpoint."""
    overrides = SHAPE | overrides
    return save_drafter(folder, drafter_config(**overrides), checkpoint(random_drafter(seed, **overrides)))


def dspark(drafter: str | Path = "ngram", **fields) -> DSparkConfig:
    """Whole windows in every step, unless told: what a test wants to see exercised."""
    return DSparkConfig(drafter=str(drafter), **({"mode": "static", "sweep_seconds": 0.0} | fields))


def timeless(engine: Engine) -> Speculation:
    """Have it take no notice of step times: then every draft is worth its while, however busy the machine."""
    speculation = engine._parts.speculation
    assert speculation is not None
    speculation.cost.observe = lambda *measured: None
    return speculation


class Scripted:
    """D-SCRIPT: drafts are `say(tokens so far)`, the true continuation, changed from number `right(round)`
    on. Every round counts, by slot."""

    def __init__(
        self,
        say: Callable[[list[int], int], list[int]],
        right: Callable[[int, int], int],
        max_drafts: int = 4,
    ) -> None:
        self.traits = DrafterTraits(name="scripted", max_drafts=max_drafts)
        self.texts: dict[int, list[int]] = {}
        self.rounds: dict[int, int] = {}
        self._say, self._right = say, right

    def admit(self, slot: int, ids: np.ndarray) -> None:
        self.texts[slot] = ids[:-1].tolist()
        self.rounds[slot] = 0

    def release(self, slot: int) -> None:
        del self.texts[slot], self.rounds[slot]

    def commit(self, committed: Committed) -> None:
        ids, start = committed.ids_T.tolist(), 0
        for slot, count in zip(committed.slots, committed.counts, strict=True):
            positions = committed.positions_T[start : start + count].tolist()
            for position, token in zip(positions, ids[start : start + count], strict=True):
                if slot in self.texts and position == len(self.texts[slot]):
                    self.texts[slot].append(token)
            start += count

    def propose(self, rows: DraftRows) -> Proposal:
        drafts = []
        for slot, anchor in zip(rows.slots, rows.anchor_ids_B.tolist(), strict=True):
            right = self._right(slot, self.rounds[slot])
            self.rounds[slot] += 1
            true = self._say([*self.texts[slot], anchor], self.traits.max_drafts)
            drafts.append([token if k < right else (token + 1) % VOCAB for k, token in enumerate(true)])
        return Proposal(torch.tensor(drafts), [self.traits.max_drafts] * len(drafts))


class Oracle:
    """What a model says next, from whole forward passes, each text computed once."""

    def __init__(self, folder: Path) -> None:
        from tests.support import reference_logits

        self.logits = lambda ids: reference_logits(folder, ids)
        self._next: dict[tuple[int, ...], int] = {}

    def __call__(self, tokens: Sequence[int], count: int) -> list[int]:
        said: list[int] = []
        for _ in range(count):
            key = (*tokens, *said)
            if key not in self._next:
                self._next[key] = int(self.logits(key)[-1].argmax())
            said.append(self._next[key])
        return said


def scripted_engine(folder: Path, drafter, **fields) -> Engine:
    settings = dspark("ngram", **fields.pop("dspark", {}))
    config = make_config(dspark=settings, **fields)
    parts = load_parts(folder, config)
    parts.speculation = make_speculation(parts.config, drafter, parts.pages, parts.runner, parts.sampler)
    return Engine(parts)
