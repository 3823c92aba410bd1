"""One policy of a population: its adapter, its optimiser, its questions and its log.

Owns a train_step of it. Ignores the others, but for the model they share and the lock on it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from peft import PeftModel

from engine.config import describe
from recipes.grpo.learner import Learner
from recipes.grpo.loop import TRAIN, Clock
from recipes.grpo.order import Order
from recipes.grpo.policy import Policy
from recipes.grpo.progress import Display
from recipes.grpo.rollouts import Sampler
from recipes.grpo.serving import Serving
from recipes.grpo.student import LoraPolicy
from recipes.population.config import MemberConfig, PopulationConfig
from recipes.tasks import Question, Questions
from recipes.tracking import Tracker, wandb_sinks
from trainer_bridge.staleness import StalenessFilter, adapter_rev
from trainer_bridge.trainer import PolicyTrainer


@dataclass(slots=True)
class Shared:
    """What all members use. Whoever computes with `model` holds `lock`."""

    config: PopulationConfig
    policy: Policy
    model: PeftModel
    served: Serving
    questions: Questions[Question]
    group: str
    display: Display
    lock: threading.Lock = field(default_factory=threading.Lock)


class Member:
    def __init__(self, place: int, settings: MemberConfig, shared: Shared) -> None:
        config = shared.config
        self.name = settings.name
        self.learning_rate = settings.learning_rate
        self.parent: str | None = None
        """Whom it was last copied from."""
        self.step = 0
        self.tokens = 0
        self._shared = shared
        self._student = LoraPolicy(shared.model, settings.name, settings.name)
        self._order = Order(config.seed + place)
        seed = config.seed * 1000 + place
        turns = config.task.turns
        self._sampler = Sampler(
            shared.served, shared.policy, config.rollout, seed, turns, self._student.adapter, f"{settings.name}-"
        )
        shared.model.set_adapter(settings.name)
        optim = replace(config.optim, learning_rate=settings.learning_rate)
        self.learner = Learner(
            PolicyTrainer(shared.model, optim, shared.policy.pad_id),
            config.loss,
            config.rollout.max_new * turns,
            StalenessFilter(config.rollout.max_lag, adapter_rev),
            config.filter_zero_variance,
            settings.overlong_buffer,
        )
        folder = config.output / settings.name
        tracking = replace(config.tracking, group=shared.group)
        run_id = f"{shared.group}-{settings.name}"
        sinks = wandb_sinks(folder, run_id, tracking, describe(config), shared.display.say)
        self.tracker = Tracker(folder, sinks, tracking)
        self.version = self._student.connect(shared.served, config.rollout.timeout_s, 0)

    def train_step(self) -> None:
        """Answers while others learn, then a turn of the trainer, then everybody's engines have the revision."""
        shared, clock = self._shared, Clock()
        questions = self._order.take(shared.questions.training, shared.config.rollout.groups)
        rollout = self._sampler.rollout(questions, self.step, self.version)
        clock.lap("timing_s/rollout")
        with shared.lock:
            clock.lap("timing_s/wait_for_trainer")
            shared.model.set_adapter(self.name)
            values = self.learner.learn(rollout, self.version)
            clock.lap("timing_s/update_actor")
            published = self._student.publish()
        self.version = published.version
        clock.lap("timing_s/param_sync")
        self.step += 1
        self.tokens += rollout.tokens
        values |= {"rollout/update_pause_ms": published.pause_ms, "train/adapter_rev": float(published.version)}
        self.tracker.log(TRAIN, self.step, {**values, **clock.laps, "population/learning_rate": self.learning_rate})

    def evaluate(self, questions: Sequence[Question]) -> float:
        """The share of right answers, whatever the member is rewarded for."""
        reward = self._sampler.evaluate(questions)
        self.tracker.log(TRAIN, self.step, {"val/reward/mean": reward})
        return reward

    def become(self, other: Member, factor: float) -> None:
        """Copy the other one's weights and optimiser, and go on at its rate times `factor`."""
        with self._shared.lock:
            self.learner.trainer.copy_from(other.learner.trainer)
            self.learner.trainer.scale_learning_rate(factor)
            self._shared.model.set_adapter(self.name)
            self.version = self._student.publish().version
        self.learning_rate = other.learning_rate * factor
        self.parent = other.name
        self.tracker.log(TRAIN, self.step, {"population/forked": 1.0, "population/learning_rate": self.learning_rate})

    def save(self) -> str:
        folder = self._shared.config.output / self.name / "policy"
        self._student.save(folder)
        return str(folder)
