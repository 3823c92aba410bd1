"""From a step's rollout to an update of the trained weights.

Owns what happens to samples between their rewards and the loss. Ignores where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recipes.grpo.rollouts import Rollout
from trainer_bridge.advantages import add_overlong_penalties, assign_advantages, split_zero_variance
from trainer_bridge.config import LossConfig
from trainer_bridge.staleness import StalenessFilter
from trainer_bridge.trainer import PolicyTrainer


@dataclass(slots=True)
class Learner:
    """`longest` is the most tokens of an answer, all turns together."""

    trainer: PolicyTrainer
    loss: LossConfig
    longest: int
    staleness: StalenessFilter = field(default_factory=lambda: StalenessFilter(0))
    filter_zero_variance: bool = True
    overlong_buffer: int = 0

    def learn(self, rollout: Rollout, version: int) -> dict[str, float]:
        """One policy update; without a group whose rewards differ there is nothing to learn from. `version` is
        what the trainer holds."""
        samples = self.staleness.apply(rollout.samples, version)
        if self.overlong_buffer:
            add_overlong_penalties(samples, self.longest, self.overlong_buffer)
        assign_advantages(samples, divide_by_std=self.loss.divides_by_std)
        if self.filter_zero_variance:
            samples, _ = split_zero_variance(samples)
        learnt = self.trainer.train_step(samples, self.loss, self.longest) if samples else {}
        return {
            **rollout.metrics(),
            **learnt,
            "train/samples": float(len(samples)),
            "fully_async/count/dropped_stale_samples": float(self.staleness.dropped),
        }
