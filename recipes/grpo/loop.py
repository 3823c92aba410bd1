"""The run: warm up, then rollout, learn, publish, step by step.

Owns the order of things. Every part is somewhere else: questions in `recipes.arithmetic`, groups
in `rollouts`, updates in `trainer_bridge.trainer`, versions in `trainer_bridge.publisher`.
"""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.config import describe
from recipes.arithmetic import EOS, PAD, ArithmeticCodec, make_questions, make_tokenizer, token_id
from recipes.grpo.config import GrpoConfig
from recipes.grpo.order import Order
from recipes.grpo.progress import Display, note, steps_table, summary_table
from recipes.grpo.report import draw_curves
from recipes.grpo.rollouts import Rollout, Sampler
from recipes.grpo.serving import serving
from recipes.grpo.state import RunState
from recipes.grpo.warmup import make_policy, warm_up
from recipes.tracking import Tracker, WandbSink
from trainer_bridge.advantages import assign_advantages, split_zero_variance
from trainer_bridge.checkpoint import Checkpoint, latest_checkpoint, load_policy, save_checkpoint, save_policy
from trainer_bridge.publisher import Publisher
from trainer_bridge.staleness import StalenessFilter
from trainer_bridge.trainer import PolicyTrainer
from trainer_bridge.transports import BodyTransport

WARMUP, TRAIN = "warmup_step", "train_step"


def run(config: GrpoConfig, *, resume: bool = False, display: Display | None = None) -> dict[str, Any]:
    """Runs or resumes `config`; returns the results that the last line of output shows."""
    checkpoint = latest_checkpoint(config.output / "checkpoints") if resume else None
    with display or Display() as shown, _threads(config.trainer_threads):
        return GrpoRun(config, checkpoint, shown).run()


class GrpoRun:
    """The parts of one run. `checkpoint` is where to go on from."""

    def __init__(self, config: GrpoConfig, checkpoint: Checkpoint | None, display: Display) -> None:
        self.config = config
        self.display = display
        self.checkpoint = checkpoint
        self.tokenizer = make_tokenizer()
        self.codec = ArithmeticCodec(self.tokenizer)
        self.questions = make_questions(config.task, config.seed)
        device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu")
        self.device = device if config.device == "auto" else torch.device(config.device)
        if checkpoint is None:
            self.model: PreTrainedModel = make_policy(config.model, self.tokenizer, config.seed)
            self.state = RunState(run_id=uuid.uuid4().hex[:8], settings=describe(config))
        else:
            self.state = RunState.from_dict(checkpoint.run, config)
            self.model = load_policy(checkpoint.policy)
        nn.Module.to(self.model, self.device)
        self.order = Order(config.seed, self.state.asked)
        self.staleness = StalenessFilter(config.rollout.max_lag)
        self.history: list[dict[str, float]] = []
        sinks = []
        if config.tracking.wandb != "disabled":
            settings = dict(line.split(" = ", 1) for line in describe(config))
            sinks.append(WandbSink(config.output, self.state.run_id, config.tracking, settings))
        self.tracker = Tracker(config.output, sinks, config.tracking)

    def run(self) -> dict[str, Any]:
        started = time.monotonic() - self.state.seconds
        try:
            trainer = self._trainer()
            initial = self.config.output / "initial_policy"
            save_policy(initial, self.model, self.tokenizer)
            with serving(initial, self.config.rollout) as client, _interruptible() as interrupted:
                sampler = Sampler(client, self.codec, self.config.rollout, self.config.seed, self._eos_id)
                publisher = Publisher(client, BodyTransport(), timeout_s=self.config.rollout.timeout_s)
                if self.state.policy_version:
                    publisher.publish(self.model, self.state.policy_version)
                else:
                    self.state.reward_before = self._evaluate(sampler)
                self._learn(sampler, publisher, trainer, interrupted, started)
                reward_after = self._evaluate(sampler)
            save_policy(self.config.output / "policy", self.model, self.tokenizer)
        finally:
            self.tracker.close()
        return self._results(reward_after, time.monotonic() - started)

    def _learn(
        self, sampler: Sampler, publisher: Publisher, trainer: PolicyTrainer, interrupted: list[int], started: float
    ) -> None:
        config, state = self.config, self.state
        last = min(config.steps, config.max_steps or config.steps)
        bar = self.display.phase("grpo", config.steps, state.train_step)
        while state.train_step < last and not interrupted:
            step_started = time.monotonic()
            questions = self.order.take(self.questions.training, config.rollout.groups)
            rollout = sampler.rollout(questions, state.train_step, state.policy_version)
            values = self._train_step(trainer, rollout)
            publish_started = time.monotonic()
            report = publisher.publish(self.model)
            state.train_step += 1
            state.policy_version = report.policy_version
            state.asked = self.order.asked
            state.seconds = time.monotonic() - started
            values |= {
                "rollout/update_pause_ms": report.pause_ms,
                "timing_s/param_sync": time.monotonic() - publish_started,
                "timing_s/step": time.monotonic() - step_started,
                "train/policy_version": float(report.policy_version),
            }
            self.tracker.log(TRAIN, state.train_step, values)
            self.history.append({"step": float(state.train_step), **values})
            bar.advance(state.train_step, note(values))
            if state.train_step % config.checkpoint_every == 0 or state.train_step == last or interrupted:
                self._save(trainer)

    def _train_step(self, trainer: PolicyTrainer, rollout: Rollout) -> dict[str, float]:
        """One policy update; without a group whose rewards differ there is nothing to learn from."""
        config = self.config
        if config.shuffle_rewards:
            _shuffle_rewards(rollout, f"{config.seed}/{self.state.train_step}")
        samples = self.staleness.apply(rollout.samples, self.state.policy_version)
        assign_advantages(samples, divide_by_std=config.loss.divides_by_std)
        if config.filter_zero_variance:
            samples, _ = split_zero_variance(samples)
        started = time.monotonic()
        learnt = trainer.train_step(samples, config.loss, config.rollout.max_new) if samples else {}
        return {
            **rollout.metrics(),
            **learnt,
            "timing_s/update_actor": time.monotonic() - started,
            "train/samples": float(len(samples)),
            "fully_async/count/dropped_stale_samples": float(self.staleness.dropped),
        }

    def _trainer(self) -> PolicyTrainer:
        """The GRPO trainer: of the checkpoint, or with a fresh optimiser after the warm-up."""
        config = self.config
        pad_id = token_id(self.tokenizer, PAD)
        if self.checkpoint is not None:
            trainer = PolicyTrainer(self.model, config.optim, pad_id)
            self.checkpoint.restore(trainer)
            return trainer
        bar = self.display.phase("warm-up", config.warmup.steps)

        def observe(step: int, loss: float) -> None:
            self.tracker.log(WARMUP, step, {"warmup/loss": loss})
            bar.advance(step + 1, f"loss {loss:.3f}")

        warm_up(
            PolicyTrainer(self.model, config.warmup.optim, pad_id),
            self.codec,
            self._eos_id,
            self.questions.training,
            config.task,
            config.warmup,
            config.seed,
            observe,
        )
        return PolicyTrainer(self.model, config.optim, pad_id)

    @property
    def _eos_id(self) -> int:
        return token_id(self.tokenizer, EOS)

    def _evaluate(self, sampler: Sampler) -> float:
        reward = sampler.evaluate(self.questions.held_out)
        self.tracker.log(TRAIN, self.state.train_step, {"val/reward/mean": reward})
        self.display.say(f"held-out reward at step {self.state.train_step}: {reward:.3f}")
        return reward

    def _save(self, trainer: PolicyTrainer) -> None:
        root = self.config.output / "checkpoints"
        save_checkpoint(root, self.state.train_step, trainer, self.tokenizer, self.state.to_dict())

    def _results(self, reward_after: float, seconds: float) -> dict[str, Any]:
        image = self.config.output / "curves.png"
        draw_curves(self.tracker.path, image)
        results: dict[str, Any] = {
            "reward_before": round(self.state.reward_before, 4),
            "reward_after": round(reward_after, 4),
            "seconds": round(seconds, 1),
            "held_out_questions": len(self.questions.held_out),
            "steps": self.state.train_step,
            "policy_version": self.state.policy_version,
            **_means(self.history),
            "metrics_lost": self.tracker.lost,
            "policy": str(self.config.output / "policy"),
            "curves": str(image),
        }
        self.display.console.print(steps_table(self.history))
        self.display.console.print(summary_table({name: str(value) for name, value in results.items()}))
        return results


def _means(history: list[dict[str, float]]) -> dict[str, float]:
    """Over this process's steps: rates as sums over sums, the rest as plain means."""
    if not history:
        return {}
    total = {name: sum(values.get(name, 0.0) for values in history) for name in history[-1]}

    def mean(name: str) -> float:
        counted = [values[name] for values in history if name in values]
        return sum(counted) / len(counted) if counted else float("nan")

    return {
        "groups": int(total["rollout/groups"]),
        "tokens_per_second": round(total["rollout/tokens"] / total["timing_s/gen"], 1),
        "cache_hit_share": round(mean("rollout/prefix_cache_hit_rate"), 4),
        "update_pause_ms": round(mean("rollout/update_pause_ms"), 3),
        "logprob_abs_diff": round(mean("train/train_rollout_logprob_abs_diff"), 9),
    }


def _shuffle_rewards(rollout: Rollout, seed: str) -> None:
    rewards = [sample.reward for sample in rollout.samples]
    random.Random(seed).shuffle(rewards)
    for sample, reward in zip(rollout.samples, rewards, strict=True):
        sample.reward = reward


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C fills the list, so that the step ends and is saved; a second one raises."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    try:
        before = signal.signal(signal.SIGINT, handle)
    except ValueError:  # not the main thread, where no signal arrives either
        yield received
        return
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, before)
