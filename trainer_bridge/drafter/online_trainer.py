"""A drafter that is trained beside its policy, from the policy's own rollouts.

Owns the loop between an engine and a trainer in one process: what was recorded feeds the buffer and the
detector of drift, whose answers are carried out (temperatures refitted, train_steps taken and the drafter
published, drafting stopped). Ignores the policy, which nothing here touches: the drafter has weights, a
version and updates of its own.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np

from engine.build import Parts
from engine.dspark.block_model import BlockDrafterModel
from engine.engine import Engine
from engine.errors import Unsupported
from trainer_bridge.drafter.config import OnlineConfig
from trainer_bridge.drafter.ends import training_ends
from trainer_bridge.drafter.export import published_tensors, resume_checkpoint, save_checkpoint
from trainer_bridge.drafter.online import DriftLadder, ReplayBuffer, Response
from trainer_bridge.drafter.recorder import RolloutRecorder
from trainer_bridge.drafter.trainer import DrafterTrainer
from trainer_bridge.publisher import Publisher
from trainer_bridge.transports.in_process import InProcessControl, InProcessTransport


class OnlineTrainer:
    """Call `after_rollout` between rollouts, while the engine is idle and its weights are there."""

    def __init__(self, engine: Engine, parts: Parts, config: OnlineConfig, seed: int = 0) -> None:
        served = parts.drafter_model
        if not isinstance(served, BlockDrafterModel):
            raise Unsupported(field="dspark.drafter", expected="a block drafter, to be trained", actual=type(served))
        self.config = config
        self._engine = engine
        # The engine's own is changed by updates alone.
        self.model = copy.deepcopy(served).requires_grad_(True)
        self.recorder = RolloutRecorder(parts.model, config.keep_every)
        engine.drafting.watch(self.recorder)
        self.trainer = DrafterTrainer(self.model, training_ends(parts.model), config.loss, config.optim, seed)
        self.ladder = DriftLadder(config.drift)
        self.buffer = ReplayBuffer(config.replay_mib << 20, self.model.spec.num_drafts)
        self._publisher = Publisher(InProcessControl(engine), InProcessTransport(), module="drafter")
        self._seed, self._rollouts, self._stopped_at = seed, 0, 0

    def after_rollout(self) -> dict[str, float]:
        """Learn from what the engine played since the last time; metrics."""
        self._rollouts += 1
        recorded, promises = self.recorder.take()
        for one in recorded:
            self.buffer.add(one.item, one.anchors, one.accepted)
        self.ladder.played([promise.accepted for promise in promises])
        answer: Response = "none"
        for promise in promises:
            answer = self.ladder.observe(promise.policy_version, promise.predicted, promise.accepted)
            if answer != "none":
                # What was played before the answer says nothing of what comes after it.
                break
        if answer == "refit" and not self._engine.drafting.refit():
            answer = "train"
        if answer == "disable":
            self._engine.drafting.stop("the drafter has drifted from its policy")
            self._stopped_at = self._rollouts
        due = self.config.every and self._rollouts % self.config.every == 0
        retry = self.ladder.disabled and self._rollouts - self._stopped_at >= self.config.retry_after
        metrics: dict[str, float] = {}
        if retry or answer == "train" or (due and not self.ladder.disabled):
            metrics = self.train()
        if retry and metrics:
            self.ladder.enable()
        return metrics | {
            "drafter/version": float(self._engine.drafter_version),
            "drafter/replay_examples": float(len(self.buffer)),
            "drafter/replay_mib": self.buffer.size / 2**20,
            "drafter/drift_alarms": float(self.ladder.alarms),
            "drafter/stopped": float(self.ladder.disabled),
        }

    def train(self) -> dict[str, float]:
        """Some train_steps, and the drafter published; the last step's metrics, none without examples."""
        metrics: dict[str, float] = {}
        for _ in range(self.config.steps if len(self.buffer) else 0):
            rng = np.random.default_rng([self._seed, self.trainer.train_step])
            metrics = self.trainer.step(self.buffer.sample(self.config.batch, rng))
        if metrics:
            self.publish()
        return metrics

    def publish(self) -> None:
        """Raises what an update raises; the engine then serves the drafter it has."""
        self._publisher.publish(published_tensors(self.model, self.model.dtype))

    def save(self, root: Path) -> None:
        save_checkpoint(root, self.trainer, {"rollouts": self._rollouts})

    def restore(self, root: Path) -> bool:
        """Go on from the newest checkpoint and publish it; False where there is none. The buffer begins empty."""
        run = resume_checkpoint(root, self.trainer)
        if run is None:
            return False
        self._rollouts = int(run["rollouts"])
        self.publish()
        return True
