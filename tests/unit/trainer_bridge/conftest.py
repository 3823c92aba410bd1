"""Samples for the tests of training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.types import Span
from trainer_bridge.samples import TrainingSample

MakeSample = Callable[..., TrainingSample]


@pytest.fixture
def make_sample() -> MakeSample:
    """`make_sample(prompt, output, advantage=..., version=..., mask=..., logprobs=...)`."""

    def make(
        prompt: int = 3,
        output: int = 4,
        *,
        seed: int = 0,
        group: str = "g",
        index: int = 0,
        reward: float = 0.0,
        advantage: float = 0.0,
        temperature: float = 1.0,
        version: int = 0,
        mask: list[bool] | None = None,
        vocabulary: int = 11,
    ) -> TrainingSample:
        rng = np.random.default_rng([seed, index, prompt, output])
        trained = np.ones(output, bool) if mask is None else np.array(mask)
        logprobs = -rng.exponential(1.5, output).astype(np.float32)
        return TrainingSample(
            group_id=group,
            index=index,
            prompt_ids=rng.integers(0, vocabulary, prompt).astype(np.uint32),
            output_ids=rng.integers(0, vocabulary, output).astype(np.uint32),
            loss_mask=trained,
            rollout_logprobs=np.where(trained, logprobs, 0.0).astype(np.float32),
            spans=[Span(start=0, end=output, policy_version=version)],
            temperature=temperature,
            finish="stop",
            reward=reward,
            advantage=advantage,
        )

    return make
