"""Supervised training on careless demonstrations, before GRPO."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from engine.types import Span
from recipes.arithmetic import SumQuestion, SumsConfig, demonstration
from recipes.grpo.config import WarmupConfig
from recipes.grpo.policy import Policy
from trainer_bridge.environment import Message
from trainer_bridge.samples import TrainingSample
from trainer_bridge.trainer import PolicyTrainer


def warm_up(
    policy: Policy,
    questions: Sequence[SumQuestion],
    task: SumsConfig,
    config: WarmupConfig,
    seed: int,
    observe: Callable[[int, float], None],
) -> None:
    """`config.steps` updates on fresh demonstrations; `observe` gets each step and its loss."""
    trainer = PolicyTrainer(policy.model, config.optim, policy.pad_id)
    rng = random.Random(f"{seed}/warm-up")
    for step in range(config.steps):
        chosen = rng.sample(list(questions), min(config.batch, len(questions)))
        samples = [_demonstrated(policy, question, demonstration(question, task, rng)) for question in chosen]
        observe(step, trainer.supervised_step(samples))


def _demonstrated(policy: Policy, question: SumQuestion, answer: str) -> TrainingSample:
    prompt_ids = policy.codec.render([Message("user", question.text)], first=True)
    output_ids = [*policy.codec.render([Message("assistant", answer)], first=False), policy.end_id]
    length = len(output_ids)
    return TrainingSample(
        group_id=question.text,
        index=0,
        prompt_ids=np.asarray(prompt_ids, np.uint32),
        output_ids=np.asarray(output_ids, np.uint32),
        loss_mask=np.ones(length, bool),
        rollout_logprobs=np.zeros(length, np.float32),
        spans=[Span(start=0, end=length, policy_version=0)],
        temperature=1.0,
        finish="stop",
    )
