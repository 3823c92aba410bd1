"""The whole configuration of a GRPO run, one function per preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.errors import InvalidRequest
from recipes.arithmetic import TaskConfig
from recipes.tracking import TrackingConfig
from trainer_bridge.losses import LossConfig
from trainer_bridge.trainer import OptimConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-shaped policy, initialised at random."""

    hidden_size: int = 192
    intermediate_size: int = 640
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    context: int = 128
    initializer_range: float = 0.06


@dataclass(frozen=True, slots=True)
class WarmupConfig:
    """Supervised training on demonstrations before GRPO: it teaches the form of an answer and the
    sums, and the teacher's carelessness with them."""

    steps: int = 300
    batch: int = 64
    optim: OptimConfig = OptimConfig(learning_rate=1.5e-3, warmup_steps=20, decay_steps=300, betas=(0.9, 0.98))


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """`groups` questions a step, `group_size` samples each. `engines` replicas serve them."""

    groups: int = 32
    group_size: int = 8
    temperature: float = 1.0
    max_new: int = 12
    engines: int = 1
    max_lag: int = 0
    timeout_s: float = 120.0
    start_timeout_s: float = 300.0
    engine: EngineConfig = EngineConfig(
        num_threads=1,
        cache=CacheConfig(page_size=4, kv_tokens=32768),
        scheduler=SchedulerConfig(max_running=256, prefill_tokens=2048),
    )

    def __post_init__(self) -> None:
        for name in ("groups", "group_size", "max_new", "engines"):
            if getattr(self, name) < 1:
                raise InvalidRequest(field=f"rollout.{name}", expected="at least 1", actual=getattr(self, name))
        if self.temperature <= 0:
            raise InvalidRequest(
                field="rollout.temperature",
                expected="more than 0: greedy groups have no variance",
                actual=self.temperature,
            )


@dataclass(frozen=True, slots=True)
class GrpoConfig:
    """`steps` is the train_step count of the whole run, `max_steps` where this process stops (and
    saves) before it. `trainer_threads` None leaves torch as it is: two threads are faster on idle
    cores and many times slower on busy ones. `shuffle_rewards` gives every sample another one's
    reward, a control that must not learn."""

    output: Path = Path("outputs/grpo")
    seed: int = 0
    device: str = "auto"
    trainer_threads: int | None = None
    steps: int = 36
    max_steps: int | None = None
    checkpoint_every: int = 10
    shuffle_rewards: bool = False
    filter_zero_variance: bool = True
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig(kind="dr_grpo")
    optim: OptimConfig = OptimConfig(learning_rate=1.2e-3, eps=1e-2, decay_steps=36)
    tracking: TrackingConfig = TrackingConfig()


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
    """Token mean and asymmetric clip."""
    return replace(demo(), output=Path("outputs/dapo"), loss=LossConfig(kind="dapo", clip_high=0.28))


PRESETS = {"demo": demo, "grpo": grpo, "dapo": dapo}
