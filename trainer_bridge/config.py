"""Settings of training a policy: its loss and its optimiser.

Owns the values and what they may be. Ignores what is done with them (`losses.policy`, `trainer`); loads
without torch, so that a command line can show and refuse settings at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import InvalidRequest

LossKind = Literal["grpo", "dr_grpo", "dapo"]
FLOOR = 0.1
"""Share of the learning rate that a decay ends at."""


@dataclass(frozen=True, slots=True)
class LossConfig:
    """`clip_high` above `clip_low` is DAPO's asymmetric clip. `is_cap` None switches the behaviour
    correction off. `kl_coef` weighs k3 = exp(q - p) - (q - p) - 1 against reference
    log-probabilities q, which must then be given."""

    kind: LossKind = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    is_cap: float | None = 2.0
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(LossKind):
            raise InvalidRequest(field="loss.kind", expected=f"one of {get_args(LossKind)}", actual=self.kind)
        for name, low, high in (("clip_low", 0.0, 1.0), ("clip_high", 0.0, math.inf), ("kl_coef", 0.0, math.inf)):
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest(field=f"loss.{name}", expected=f"{low} to {high}", actual=getattr(self, name))
        if self.is_cap is not None and not self.is_cap > 0:
            raise InvalidRequest(field="loss.is_cap", expected="more than 0, or none", actual=self.is_cap)

    @property
    def divides_by_std(self) -> bool:
        return self.kind != "dr_grpo"


@dataclass(frozen=True, slots=True)
class OptimConfig:
    """AdamW with a linear warm-up over `warmup_steps`, then a constant rate, or with `decay_steps` a
    linear fall to a tenth at that optimiser step. `updates` optimiser steps are made of one train
    step's samples, `max_tokens` bounds a micro-batch (padded) and `packed` puts several samples
    into a row of `max_tokens`."""

    learning_rate: float = 3e-4
    warmup_steps: int = 5
    decay_steps: int | None = None
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    clip_norm: float = 1.0
    updates: int = 1
    max_tokens: int = 16384
    packed: bool = False

    def __post_init__(self) -> None:
        for name in ("updates", "max_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"optim.{name}", expected="at least 1", actual=getattr(self, name))
        if not 0 <= self.learning_rate < math.inf:
            raise InvalidRequest(field="optim.learning_rate", expected="0 or more", actual=self.learning_rate)
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise InvalidRequest(
                field="optim.decay_steps", expected=f"more than {self.warmup_steps}", actual=self.decay_steps
            )

    def rate(self, done: int) -> float:
        """Share of `learning_rate` for the optimiser step after `done` of them."""
        rising = min(1.0, (done + 1) / max(1, self.warmup_steps))
        if self.decay_steps is None or done < self.warmup_steps:
            return rising
        past = (done - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return max(FLOOR, 1.0 - (1.0 - FLOOR) * past)
