"""Settings of training a drafter, beside its policy or by itself.

Owns the values and what they may be. Ignores what is done with them; loads without torch, as
`trainer_bridge.config` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from engine.errors import InvalidRequest

Trained = Literal["all", "confidence"]
Family = Literal["Qwen3DSparkModel", "LlamaDSparkModel"]
MarkovHead = Literal["vanilla", "gated", "rnn"]

_LIMITS = {
    "layers": (1, 10_000),
    "block": (1, 64),
    "captured": (1, 10_000),
    "markov_rank": (0, 65_536),
    "intermediate": (1, None),
    "num_heads": (1, None),
    "num_kv_heads": (1, None),
    "head_dim": (2, None),
    "context": (1, None),
}
_OF_THE_TARGET = ("intermediate", "num_heads", "num_kv_heads", "head_dim", "context")


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """`layers` decoder layers of `family`; heads and inner width are the target's where not given. `captured`
    target layers, evenly spaced where `target_layers` does not name them. `markov_rank` 0 makes a
    drafter without a sequential head (DFlash). `context` bounds the positions it drafts at."""

    family: Family = "Qwen3DSparkModel"
    layers: int = 2
    block: int = 7
    captured: int = 5
    target_layers: tuple[int, ...] = ()
    intermediate: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    context: int | None = None
    markov_rank: int = 256
    markov_head: MarkovHead = "vanilla"
    confidence: bool = True
    confidence_reads_markov: bool = True
    draft_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kinds in (("family", get_args(Family)), ("markov_head", get_args(MarkovHead))):
            if getattr(self, name) not in kinds:
                raise InvalidRequest(field=f"shape.{name}", expected=f"one of {kinds}", actual=getattr(self, name))
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in _OF_THE_TARGET:
                continue
            if type(value) is not int or value < low or (high is not None and value > high):
                expected = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
                raise InvalidRequest(field=f"shape.{name}", expected=expected, actual=value)
        if self.head_dim is not None and self.head_dim % 2:
            raise InvalidRequest(field="shape.head_dim", expected="an even number", actual=self.head_dim)
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise InvalidRequest(
                field="shape.num_kv_heads", expected=f"a divisor of {self.num_heads} heads", actual=self.num_kv_heads
            )
        if len(set(self.target_layers)) != len(self.target_layers) or min(self.target_layers, default=0) < 0:
            raise InvalidRequest(
                field="shape.target_layers", expected="distinct layers from 0", actual=self.target_layers
            )
        if list(self.draft_ids) != sorted(set(self.draft_ids)) or min(self.draft_ids, default=0) < 0:
            raise InvalidRequest(field="shape.draft_ids", expected="ascending ids", actual=self.draft_ids)


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How the target answers; the defaults are those published for Qwen3. Train at the temperature you serve
    at: a drafter learns the distribution it has seen. `samples` answers to each conversation; the share `greedy` of
    conversations is answered at temperature 0, which is another kind of text where a model repeats itself."""

    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    max_new: int = 4096
    samples: int = 1
    greedy: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new", "samples"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"sampling.{name}", expected="at least 1", actual=getattr(self, name))
        if not 0.0 <= self.greedy <= 1.0:
            raise InvalidRequest(field="sampling.greedy", expected="a share", actual=self.greedy)


@dataclass(frozen=True, slots=True)
class DraftLossConfig:
    """The published weights. `decay` None weighs all positions alike. `temperature` is that of both p and
    q: drafters for rollouts at another one are trained at it.

    `detach_confidence` keeps the gradient of the confidence term to the confidence head: switching that
    head on then changes nothing else, bit for bit. Off by default, as published: the gradient flows
    into backbone and Markov table. The target c* never carries a gradient.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0
    temperature: float = 1.0
    detach_confidence: bool = False

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest(field=f"loss.{name}", expected="0 or more", actual=getattr(self, name))
        if self.ce == self.l1 == self.confidence == 0.0:
            raise InvalidRequest(field="loss", expected="a term with a weight", actual=self)
        for name in ("decay", "temperature"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidRequest(field=f"loss.{name}", expected="more than 0", actual=value)

    @property
    def needs_states(self) -> bool:
        """Whether the target's final states must be there: cross-entropy alone learns from tokens."""
        return self.l1 > 0 or self.confidence > 0


@dataclass(frozen=True, slots=True)
class DraftOptimConfig:
    """AdamW, a linear warm-up over the share `warmup` of `steps`, then a cosine to 0; the published values
    but for `betas`, which were not. `anchors` blocks an example at most, of which the share `shortened` end early,
    anywhere: engines that choose by request how many drafts are made make such blocks, and a drafter that has never
    seen one accepts less in them. `max_slots` bounds block slots
    plus context tokens of a micro-batch, `chunk` the blocks whose logits exist at once. `max_skipped`
    steps in a row without a finite gradient end the run."""

    steps: int = 24_000
    learning_rate: float = 6e-4
    warmup: float = 0.04
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    eps: float = 1e-8
    clip_norm: float = 1.0
    anchors: int = 512
    shortened: float = 0.0
    max_slots: int = 8192
    chunk: int = 128
    max_skipped: int = 10

    def __post_init__(self) -> None:
        for name in ("steps", "anchors", "max_slots", "chunk", "max_skipped"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"optim.{name}", expected="at least 1", actual=getattr(self, name))
        if not self.learning_rate >= 0:
            raise InvalidRequest(field="optim.learning_rate", expected="0 or more", actual=self.learning_rate)
        if not 0.0 <= self.shortened <= 1.0:
            raise InvalidRequest(field="optim.shortened", expected="a share", actual=self.shortened)
        if not 0.0 <= self.warmup < 1.0:
            raise InvalidRequest(field="optim.warmup", expected="a share below 1", actual=self.warmup)

    def rate(self, done: int) -> float:
        """Share of `learning_rate` for the step after `done` of them."""
        rising = self.warmup * self.steps
        if done < rising:
            return (done + 1) / (rising + 1)
        past = (done - rising) / max(1.0, self.steps - rising)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, past)))


@dataclass(frozen=True, slots=True)
class DriftConfig:
    """A sum of (predicted - accepted - `slack`) drafts a round that reaches `threshold` is drift. Each rung but
    the last is tried `attempts` times; `calm` rounds without drift go one rung down. Drafting is stopped only where
    fewer than `worth` drafts a round are kept: what is promised too much of a drafter that is good is for planning to
    discount (`engine.dspark.promises`), and for training to mend."""

    slack: float = 0.1
    threshold: float = 20.0
    attempts: int = 2
    calm: int = 2000
    worth: float = 0.5

    def __post_init__(self) -> None:
        for name in ("slack", "threshold", "attempts", "calm", "worth"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(field=f"drift.{name}", expected="more than 0", actual=getattr(self, name))


@dataclass(frozen=True, slots=True)
class OnlineConfig:
    """Every response "train" takes `steps` train_steps of `batch` examples from a buffer of `replay_mib`, of which
    every `keep_every`-th sample is put in; every `every` rollouts it is taken anyway (0: on drift alone).
    Drafting that drift has stopped is tried again, with a drafter trained anew, after `retry_after` rollouts.
    The rate rises over `optim.warmup` of `optim.steps` once, over all of a run's train_steps."""

    steps: int = 20
    batch: int = 32
    every: int = 1
    keep_every: int = 1
    replay_mib: int = 1024
    retry_after: int = 4
    drift: DriftConfig = DriftConfig()
    loss: DraftLossConfig = DraftLossConfig()
    optim: DraftOptimConfig = DraftOptimConfig(steps=100_000, warmup=0.0005, anchors=64)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "keep_every", "replay_mib", "retry_after"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"online.{name}", expected="at least 1", actual=getattr(self, name))
        if self.every < 0:
            raise InvalidRequest(field="online.every", expected="0 or more", actual=self.every)
