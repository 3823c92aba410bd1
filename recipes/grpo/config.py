"""The whole configuration of a GRPO run, one function per preset."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import InvalidRequest
from recipes.arithmetic import SumsConfig
from recipes.digit_pairs import DigitPairsConfig
from recipes.tracking import TrackingConfig
from trainer_bridge.config import LossConfig, OptimConfig
from trainer_bridge.drafter.config import DrafterShape, OnlineConfig


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A Llama-shaped policy over characters, initialised at random."""

    hidden_size: int = 192
    intermediate_size: int = 640
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    context: int = 128
    initializer_range: float = 0.06


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A pretrained policy with a chat template: a preset of the model catalogue or a local folder.
    Trained in `dtype`, with fp32 copies of the weights behind 16 bits."""

    name: str = "smollm2-135m"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """Supervised training on demonstrations before GRPO: it teaches the form of an answer and the
    sums, and the teacher's carelessness with them. `steps` 0 leaves it out."""

    steps: int = 300
    batch: int = 64
    optim: OptimConfig = OptimConfig(learning_rate=1.5e-3, warmup_steps=20, decay_steps=300, betas=(0.9, 0.98))


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """`groups` questions a step, `group_size` samples each; `evaluations` answers to each held-out
    question.

    `where` is "service" (`engines` replicas behind a server, on Ray) or "colocated": one engine in
    the trainer's process, on the trainer's device. There the engine gives up what `release` names
    ("kv", "weights", "graphs") while the trainer works, and with `offload_trainer` the trainer
    leaves the device while the engine works.
    """

    groups: int = 32
    group_size: int = 8
    evaluations: int = 1
    temperature: float = 1.0
    max_new: int = 12
    max_lag: int = 0
    where: Literal["service", "colocated"] = "service"
    engines: int = 1
    release: tuple[str, ...] = ("kv", "weights")
    offload_trainer: bool = True
    timeout_s: float = 120.0
    start_timeout_s: float = 300.0
    engine: EngineConfig = EngineConfig(
        num_threads=1,
        cache=CacheConfig(page_size=4, kv_tokens=32768),
        scheduler=SchedulerConfig(max_running=256, prefill_tokens=2048),
    )

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "evaluations", "max_new", "engines"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"rollout.{name}", expected="at least 1", actual=getattr(self, name))
        if self.temperature <= 0:
            raise InvalidRequest(
                field="rollout.temperature",
                expected="more than 0: greedy groups have no variance",
                actual=self.temperature,
            )
        if self.where not in ("service", "colocated"):
            raise InvalidRequest(field="rollout.where", expected="'service' or 'colocated'", actual=self.where)
        if self.where == "colocated" and self.engines != 1:
            raise InvalidRequest(field="rollout.engines", expected="1 where colocated", actual=self.engines)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA policy `name` on top of the model, which stays as it is. `targets` are module names, or
    "all-linear" alone."""

    name: str = "policy"
    rank: int = 16
    alpha: int = 32
    rslora: bool = False
    targets: tuple[str, ...] = ("all-linear",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidRequest(field="adapter.rank", expected="at least 1", actual=self.rank)
        if not self.targets:
            raise InvalidRequest(field="adapter.targets", expected="at least one", actual=self.targets)


@dataclass(frozen=True, slots=True)
class OnlineDrafterConfig:
    """Trains the drafter of `rollout.engine.dspark` from the run's rollouts, or, where that names none, one of
    `shape` that begins knowing nothing."""

    enabled: bool = False
    shape: DrafterShape = DrafterShape(layers=2, markov_rank=64)
    training: OnlineConfig = OnlineConfig()


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """`steps` is the train_step count of the whole run, `max_steps` where this process stops (and
    saves) before it. `trainer_threads` None leaves torch as it is: two threads are faster on idle
    cores and many times slower on busy ones. `shuffle_rewards` gives every sample another one's
    reward, a control that must not learn. `overlong_buffer` tokens before the limit answers begin
    to lose reward (DAPO; 0 switches it off). With `adapter` a LoRA policy is trained and published
    instead of the whole model; `online` trains a drafter beside the policy. Every `evaluate_every` steps
    the held-out questions are asked (0: before and after the run only). With `agreement` the engine's and the
    trainer's log-probabilities are held against those of the same weights in 32 bits, at the first and last step."""

    output: Path = Path("outputs/grpo")
    seed: int = 0
    device: str = "auto"
    trainer_threads: int | None = None
    steps: int = 36
    max_steps: int | None = None
    checkpoint_every: int = 10
    evaluate_every: int = 0
    agreement: bool = True
    shuffle_rewards: bool = False
    filter_zero_variance: bool = True
    overlong_buffer: int = 0
    task: SumsConfig | DigitPairsConfig = SumsConfig()
    model: RandomModel | ChatModel = RandomModel()
    adapter: AdapterConfig | None = None
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = LossConfig(kind="dr_grpo")
    optim: OptimConfig = OptimConfig(learning_rate=1.2e-3, eps=1e-2, decay_steps=36)
    online: OnlineDrafterConfig = OnlineDrafterConfig()
    tracking: TrackingConfig = TrackingConfig()

    def __post_init__(self) -> None:
        if self.online.enabled and (self.rollout.where != "colocated" or self.adapter is not None):
            raise InvalidRequest(
                field="online.enabled",
                expected="false, unless engine and trainer of a whole policy share a process (rollout.where=colocated)",
                actual=self.rollout.where if self.adapter is None else "an adapter",
            )
        if not 0 <= self.overlong_buffer <= self.rollout.max_new:
            raise InvalidRequest(
                field="overlong_buffer", expected=f"0 to {self.rollout.max_new}", actual=self.overlong_buffer
            )
        if self.adapter is not None and self.rollout.where == "colocated" and "weights" in self.rollout.release:
            raise InvalidRequest(
                field="rollout.release", expected="no weights: updates bring an adapter's alone", actual="weights"
            )
        if self.warmup.steps and not isinstance(self.task, SumsConfig):
            raise InvalidRequest(field="warmup.steps", expected="0: this task has no teacher", actual=self.warmup.steps)


def demo() -> GrpoConfig:
    """What `make demo` runs: between three and four minutes on two cores, from careless to careful.

    `optim.eps` lies far above the gradient's elements, so that AdamW's step grows with the
    gradient. With a small one the faint gradient of meaningless rewards would be scaled up to
    steps as large as those of a real signal, and shuffled rewards would make the policy wander.
    """
    return GrpoConfig()


def grpo() -> GrpoConfig:
    """The loss as first published. Dividing by each answer's length makes short answers move more
    than long ones, so that even rewards without meaning drift towards shorter answers."""
    return replace(demo(), output=Path("outputs/grpo_original"), loss=LossConfig(kind="grpo"))


def dapo() -> GrpoConfig:
    """Token mean, asymmetric clip, and answers near the length limit lose reward: a full answer of
    two-digit numbers takes 9 of 12 tokens with its end."""
    return replace(demo(), output=Path("outputs/dapo"), loss=LossConfig(kind="dapo", clip_high=0.28), overlong_buffer=3)


def retry() -> GrpoConfig:
    """Several turns: after a wrong answer the question is asked once more, for half the reward."""
    return replace(demo(), output=Path("outputs/retry"), task=SumsConfig(retries=1))


def smollm2() -> GrpoConfig:
    """A real model on one GPU, engine and trainer in one process, taking turns with its memory.

    SmolLM2-135M ranks the result first for 82 % of the sums and 96 % of the products of digits, but
    says just that, and ends, 11 % of the time: what it has to learn is to say what it knows.
    """
    return GrpoConfig(
        output=Path("outputs/smollm2"),
        steps=50,
        checkpoint_every=50,
        evaluate_every=10,
        task=DigitPairsConfig(),
        model=ChatModel(),
        warmup=WarmupConfig(steps=0),
        rollout=RolloutConfig(
            where="colocated",
            groups=64,
            group_size=16,
            evaluations=16,
            max_new=8,
            engine=EngineConfig(
                cache=CacheConfig(page_size=16, kv_tokens=131072),
                scheduler=SchedulerConfig(max_running=1024, prefill_tokens=8192),
            ),
        ),
        loss=LossConfig(kind="dr_grpo"),
        optim=OptimConfig(learning_rate=3e-5, warmup_steps=5, decay_steps=50, max_tokens=32768),
    )


def smollm2_lines() -> GrpoConfig:
    """Six of those at a time, one a line, in answers of some fifty tokens: rollouts whose time is decoding, what
    speculation is for. A quarter of them are kept to train a drafter from."""
    base = smollm2()
    engine = replace(base.rollout.engine, scheduler=SchedulerConfig(max_running=256, prefill_tokens=8192))
    return replace(
        base,
        output=Path("outputs/smollm2_lines"),
        steps=20,
        checkpoint_every=20,
        task=DigitPairsConfig(prompt="Work these out, one on each line: {all}", chain=6),
        rollout=replace(base.rollout, groups=16, group_size=16, evaluations=2, max_new=64, engine=engine),
        optim=replace(base.optim, warmup_steps=3),
        online=OnlineDrafterConfig(training=OnlineConfig(keep_every=4)),
    )


PRESETS = {"demo": demo, "grpo": grpo, "dapo": dapo, "retry": retry, "smollm2": smollm2, "smollm2_lines": smollm2_lines}
