"""The whole configuration of a population, one function per preset."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.errors import InvalidRequest
from recipes.arithmetic import SumsConfig
from recipes.digit_pairs import DigitPairsConfig
from recipes.grpo.config import AdapterConfig, ChatModel, RandomModel, RolloutConfig, WarmupConfig
from recipes.lora_grpo.config import smollm2 as lora_smollm2
from recipes.lora_grpo.config import tiny as lora_tiny
from recipes.tracking import TrackingConfig
from trainer_bridge.config import LossConfig, OptimConfig


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """One policy: its rate, and its reward. Answers begin to lose reward `overlong_buffer` tokens before the
    limit (0: only whether they are right counts). All are compared by whether answers are right."""

    name: str
    learning_rate: float
    overlong_buffer: int = 0


@dataclass(frozen=True, slots=True)
class PopulationConfig:
    """`rounds` of `steps` train_steps for every member. After each but the last, the `forks` worst become copies
    of the best, each at a learning rate multiplied by one of `perturb`. No member begins a train_step more
    than `max_lead` ahead of the slowest."""

    output: Path = Path("outputs/population")
    seed: int = 0
    device: str = "auto"
    trainer_threads: int | None = None
    rounds: int = 3
    steps: int = 6
    forks: int = 1
    perturb: tuple[float, ...] = (0.7, 1.4)
    max_lead: int = 1
    filter_zero_variance: bool = True
    members: tuple[MemberConfig, ...] = ()
    task: SumsConfig | DigitPairsConfig = SumsConfig()
    model: RandomModel | ChatModel = RandomModel()
    adapter: AdapterConfig = AdapterConfig()
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = LossConfig(kind="dr_grpo")
    optim: OptimConfig = OptimConfig()
    tracking: TrackingConfig = TrackingConfig()

    def __post_init__(self) -> None:
        names = [member.name for member in self.members]
        if len(names) < 2 or len(set(names)) != len(names) or not all(names):
            raise InvalidRequest(field="members", expected="two or more with names of their own", actual=names)
        for name, least in (("rounds", 1), ("steps", 1), ("max_lead", 0)):
            if getattr(self, name) < least:
                raise InvalidRequest(field=name, expected=f"at least {least}", actual=getattr(self, name))
        if not 0 <= self.forks < len(names):
            raise InvalidRequest(field="forks", expected=f"0 to {len(names) - 1}", actual=self.forks)
        if not self.perturb or min(self.perturb) <= 0:
            raise InvalidRequest(field="perturb", expected="positive factors", actual=self.perturb)
        for member in self.members:
            if not 0 <= member.overlong_buffer <= self.rollout.max_new:
                raise InvalidRequest(
                    field=f"members[{member.name}].overlong_buffer",
                    expected=f"0 to {self.rollout.max_new}",
                    actual=member.overlong_buffer,
                )
        if self.rollout.release:
            raise InvalidRequest(
                field="rollout.release", expected="nothing: some member always generates", actual=self.rollout.release
            )
        if self.warmup.steps and not isinstance(self.task, SumsConfig):
            raise InvalidRequest(field="warmup.steps", expected="0: this task has no teacher", actual=self.warmup.steps)


def tiny() -> PopulationConfig:
    """Two minutes on two cores: four policies on the base of `recipes.lora_grpo`'s `tiny`. One learns far too
    slowly, one has its own idea of a good answer; forking lets the best one's weights win."""
    single = lora_tiny()
    return PopulationConfig(
        output=Path("outputs/population_tiny"),
        trainer_threads=single.trainer_threads,
        members=(
            MemberConfig("steady", 2e-2),
            MemberConfig("slow", 1e-3),
            MemberConfig("brief", 2e-2, overlong_buffer=4),
            MemberConfig("cautious", 8e-3),
        ),
        task=single.task,
        model=single.model,
        adapter=AdapterConfig(rank=8, alpha=16),
        warmup=single.warmup,
        rollout=replace(single.rollout, release=(), offload_trainer=False),
        loss=single.loss,
        optim=replace(single.optim, decay_steps=None),
    )


def smollm2() -> PopulationConfig:
    """Four policies over SmolLM2-135M on one GPU: rates from a third to three times the recipe's own."""
    single = lora_smollm2()
    return PopulationConfig(
        output=Path("outputs/population_smollm2"),
        rounds=4,
        steps=10,
        members=(
            MemberConfig("third", 1e-4),
            MemberConfig("own", 3e-4),
            MemberConfig("triple", 1e-3),
            MemberConfig("brief", 3e-4, overlong_buffer=2),
        ),
        task=single.task,
        model=single.model,
        adapter=AdapterConfig(rank=16, alpha=32),
        warmup=single.warmup,
        rollout=replace(single.rollout, groups=32, release=(), offload_trainer=False),
        loss=single.loss,
        optim=replace(single.optim, decay_steps=None),
    )


PRESETS = {"tiny": tiny, "smollm2": smollm2}
