"""The run: warm up, then rollout, learn, publish, step by step.

Owns the order of things, and with it who has the device when engine and trainer share one. Every
part is somewhere else: questions in tasks, groups in `rollouts`, engines in `serving`, updates in
`trainer_bridge.trainer`, versions in `student`.
"""

from __future__ import annotations

import dataclasses
import random
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from engine.config import describe
from recipes.arithmetic import SumQuestion, SumsConfig, make_sums
from recipes.digit_pairs import make_digit_pairs
from recipes.grpo.config import GrpoConfig, RolloutConfig
from recipes.grpo.drafting import BEGINNING, RunDrafter, new_drafter
from recipes.grpo.learner import Learner
from recipes.grpo.order import Order
from recipes.grpo.policy import make_policy
from recipes.grpo.progress import Display, note, steps_table, summary_table
from recipes.grpo.report import run_results
from recipes.grpo.rollouts import Rollout, Sampler
from recipes.grpo.serving import Serving, serving
from recipes.grpo.state import RunState
from recipes.grpo.student import Student, make_student
from recipes.grpo.warmup import warm_up
from recipes.tasks import Question, Questions
from recipes.tracking import Tracker, wandb_sinks
from trainer_bridge.agreement import Agreement, measure_agreement
from trainer_bridge.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint, save_policy
from trainer_bridge.staleness import StalenessFilter
from trainer_bridge.trainer import PolicyTrainer

WARMUP, TRAIN = "warmup_step", "train_step"
INITIAL = "initial_policy"
"""Folder that engines start from."""
AGREEMENT_SAMPLES = 256
"""Samples of the first and of the last step on which engine and trainer are compared."""


def run(config: GrpoConfig, *, resume: bool = False, display: Display | None = None) -> dict[str, Any]:
    """Runs or resumes `config`; returns the results that the last line of output shows."""
    checkpoint = latest_checkpoint(config.output / "checkpoints") if resume else None
    with display or Display() as shown, threads(config.trainer_threads):
        return GrpoRun(config, checkpoint, shown).run()


class GrpoRun:
    """The parts of one run. `checkpoint` is where to go on from."""

    def __init__(self, config: GrpoConfig, checkpoint: Checkpoint | None, display: Display) -> None:
        self.config = config
        self.display = display
        self.checkpoint = checkpoint
        self.questions: Questions[Question] = (
            make_sums(config.task, config.seed)
            if isinstance(config.task, SumsConfig)
            else make_digit_pairs(config.task, config.seed)
        )
        device = torch.device("cuda" if config.device == "auto" and torch.cuda.is_available() else "cpu")
        self.device = device if config.device == "auto" else torch.device(config.device)
        if checkpoint is None:
            self.state = RunState(run_id=uuid.uuid4().hex[:8], settings=describe(config))
        else:
            self.state = RunState.from_dict(checkpoint.run, config)
        saved = None if checkpoint is None else checkpoint.policy
        if saved is not None and config.adapter is not None:
            saved = config.output / INITIAL
        self.policy = make_policy(config.model, config.seed, saved)
        nn.Module.to(self.policy.model, self.device)
        self.order = Order(config.seed, self.state.asked)
        self.history: list[dict[str, float]] = []
        self.agreement: dict[int, Agreement] = {}
        sinks = wandb_sinks(config.output, self.state.run_id, config.tracking, describe(config), display.say)
        self.tracker = Tracker(config.output, sinks, config.tracking)

    def run(self) -> dict[str, Any]:
        started = time.monotonic() - self.state.seconds
        try:
            config = self.config
            if self.checkpoint is None:
                self._warm_up()
            initial = config.output / INITIAL
            save_policy(initial, self.policy.model, self.policy.tokenizer)
            student = make_student(self.policy, config.adapter, config.seed, self.checkpoint and self.checkpoint.policy)
            learner = self._learner(student)
            rollout = self._with_drafter(initial)
            with serving(initial, rollout, self.device, self.display.say) as served, interruptible() as interrupted:
                turns = config.task.turns
                sampler = Sampler(served, self.policy, config.rollout, config.seed, turns, student.adapter)
                self.state.policy_version = student.connect(served, config.rollout.timeout_s, self.state.policy_version)
                if self.checkpoint is None:
                    self.state.reward_before = self._evaluate(sampler)
                self.drafter = RunDrafter(config, served, self.checkpoint is not None)
                reward_after = self._learn(served, sampler, student, learner, interrupted, started)
                self.drafter.export(config.output / "drafter")
            learner.trainer.restore()
            student.save(config.output / "policy")
        finally:
            self.tracker.close()
        return self._results(reward_after, time.monotonic() - started)

    def _learn(
        self,
        served: Serving,
        sampler: Sampler,
        student: Student,
        learner: Learner,
        interrupted: list[int],
        started: float,
    ) -> float:
        """The steps of this process; returns the held-out reward after them."""
        config, state = self.config, self.state
        last = min(config.steps, config.max_steps or config.steps)
        bar = self.display.phase("grpo", config.steps, state.train_step)
        measured: dict[int, float] = {}
        while state.train_step < last and not interrupted:
            step_started = time.monotonic()
            questions = self.order.take(self.questions.training, config.rollout.groups)
            self.drafter.before_rollout()
            rollout = sampler.rollout(questions, state.train_step, state.policy_version)
            values = self._trainers_turn(served, student, learner, rollout, last, interrupted, started)
            values["timing_s/step"] = time.monotonic() - step_started
            self.tracker.log(TRAIN, state.train_step, values)
            self.history.append({"step": float(state.train_step), **values})
            bar.advance(state.train_step, note(values))
            if config.evaluate_every and state.train_step % config.evaluate_every == 0:
                measured[state.train_step] = self._evaluate(sampler)
        return measured[state.train_step] if state.train_step in measured else self._evaluate(sampler)

    def _trainers_turn(
        self,
        served: Serving,
        student: Student,
        learner: Learner,
        rollout: Rollout,
        last: int,
        interrupted: list[int],
        started: float,
    ) -> dict[str, float]:
        """From a rollout to new weights in the engines. Where both share a device, the engine gives
        up its memory first and takes the rest of it back last, after the trainer has gone."""
        config, state, trainer = self.config, self.state, learner.trainer
        clock = Clock()
        # Its targets are the policy's that played: it learns before that changes.
        drafted = self.drafter.after_rollout()
        clock.lap("timing_s/update_drafter")
        released = served.release()
        trainer.restore()
        clock.lap("timing_s/to_trainer")
        if config.agreement and (not self.history or state.train_step == last - 1):
            self.agreement[state.train_step] = measure_agreement(trainer, rollout.samples[:AGREEMENT_SAMPLES])
            clock.lap("timing_s/agreement")
        if config.shuffle_rewards:
            _shuffle_rewards(rollout, f"{config.seed}/{state.train_step}")
        values = learner.learn(rollout, state.policy_version)
        clock.lap("timing_s/update_actor")
        served.take_weights()
        published = student.publish()
        clock.lap("timing_s/param_sync")
        state.train_step += 1
        state.policy_version = published.version
        state.asked = self.order.asked
        state.seconds = time.monotonic() - started
        if state.train_step % config.checkpoint_every == 0 or state.train_step == last or interrupted:
            root = config.output / "checkpoints"
            save_checkpoint(root, state.train_step, trainer, student.save, state.to_dict())
            self.drafter.save()
            clock.lap("timing_s/checkpoint")
        shares = config.rollout.where == "colocated" and config.rollout.offload_trainer
        offloaded = trainer.offload() if shares else 0
        served.resume()
        clock.lap("timing_s/to_engine")
        return {
            **values,
            **drafted,
            **clock.laps,
            "memory/released_gib": sum(released.values()) / 2**30,
            "memory/trainer_offloaded_gib": offloaded / 2**30,
            "rollout/update_pause_ms": published.pause_ms,
            "train/policy_version": float(published.version),
        }

    def _with_drafter(self, initial: Path) -> RolloutConfig:
        """The settings of rollouts, with a drafter to train where one is wanted."""
        config, rollout = self.config, self.config.rollout
        if not config.online.enabled:
            return rollout
        dspark = replace(rollout.engine.dspark, keep_states=True)
        if not dspark.enabled:
            folder = config.output / BEGINNING
            if not folder.is_dir():
                new_drafter(folder, initial, self.policy, config.online.shape, config.seed)
            dspark = replace(dspark, drafter=str(folder))
        return replace(rollout, engine=replace(rollout.engine, dspark=dspark))

    def _warm_up(self) -> None:
        config = self.config
        if config.warmup.steps and isinstance(config.task, SumsConfig):
            bar = self.display.phase("warm-up", config.warmup.steps)

            def observe(step: int, loss: float) -> None:
                self.tracker.log(WARMUP, step, {"warmup/loss": loss})
                bar.advance(step + 1, f"loss {loss:.3f}")

            training = cast("Sequence[SumQuestion]", self.questions.training)
            warm_up(self.policy, training, config.task, config.warmup, config.seed, observe)

    def _learner(self, student: Student) -> Learner:
        """With the trainer of the checkpoint, or a fresh optimiser after the warm-up."""
        config = self.config
        trainer = PolicyTrainer(student.model, config.optim, self.policy.pad_id)
        if self.checkpoint is not None:
            self.checkpoint.restore(trainer)
        return Learner(
            trainer,
            config.loss,
            config.rollout.max_new * config.task.turns,
            StalenessFilter(config.rollout.max_lag, student.version_of),
            config.filter_zero_variance,
            config.overlong_buffer,
        )

    def _evaluate(self, sampler: Sampler) -> float:
        self.display.say(f"asking {len(self.questions.held_out)} held-out questions")
        reward = sampler.evaluate(self.questions.held_out)
        self.tracker.log(TRAIN, self.state.train_step, {"val/reward/mean": reward})
        self.display.say(f"held-out reward at step {self.state.train_step}: {reward:.3f}")
        return reward

    def _results(self, reward_after: float, seconds: float) -> dict[str, Any]:
        results: dict[str, Any] = {
            "reward_before": round(self.state.reward_before, 4),
            "reward_after": round(reward_after, 4),
            "seconds": round(seconds, 1),
            "held_out_questions": len(self.questions.held_out),
            "steps": self.state.train_step,
            "policy_version": self.state.policy_version,
            **run_results(self.history, self.config.output, self.tracker.path, self.config.tracking.curves),
            "metrics_lost": self.tracker.lost,
            "agreement": {str(step): dataclasses.asdict(found) for step, found in self.agreement.items()},
        }
        self.display.console.print(steps_table(self.history))
        self.display.console.print(summary_table(results))
        return results


class Clock:
    """Seconds between laps, by name."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.laps[name] = now - self._last
        self._last = now


def _shuffle_rewards(rollout: Rollout, seed: str) -> None:
    rewards = [sample.reward for sample in rollout.samples]
    random.Random(seed).shuffle(rewards)
    for sample, reward in zip(rollout.samples, rewards, strict=True):
        sample.reward = reward


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def interruptible() -> Iterator[list[int]]:
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
