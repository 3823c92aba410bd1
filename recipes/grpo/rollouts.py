"""Groups of answers from the service, as samples with rewards.

Owns asking for groups, running their environments and counting what came back. Ignores how the
service answers and what is learnt from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.types import GroupOutput, SamplingParams
from recipes.arithmetic import ArithmeticCodec, Question
from recipes.grpo.config import RolloutConfig
from trainer_bridge.episodes import action_of, observation_ids
from trainer_bridge.samples import TrainingSample, group_samples, is_trainable
from trainer_bridge.tally import Tally

CONCURRENT_GROUPS = 64
EVALUATION_STREAM = 2**31
"""Seeds of evaluation are drawn apart from those of any train_step."""


class Generator(Protocol):
    """The part of the rollout client that is used here."""

    def generate(self, prompt_ids: Any = None, **options: Any) -> GroupOutput: ...


@dataclass(slots=True)
class Rollout:
    """The samples of one step. `tokens` are generated ones; `tally` holds means over samples."""

    samples: list[TrainingSample] = field(default_factory=list)
    groups: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tally: Tally = field(default_factory=Tally)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")

    def metrics(self) -> dict[str, float]:
        return {
            **self.tally.means(),
            "perf/throughput": self.tokens_per_second,
            "timing_s/gen": self.seconds,
            "rollout/groups": float(self.groups),
            "rollout/tokens": float(self.tokens),
        }


class Sampler:
    """Asks `client` for groups; every group's seed follows from (run seed, step, place)."""

    def __init__(
        self, client: Generator, codec: ArithmeticCodec, config: RolloutConfig, seed: int, eos_id: int
    ) -> None:
        self._client = client
        self._codec = codec
        self._config = config
        self._seed = seed
        self._eos_id = eos_id

    def rollout(self, questions: Sequence[Question], step: int, min_policy_version: int) -> Rollout:
        """One group per question, from no policy older than `min_policy_version`."""
        started = time.monotonic()
        seeds = [self._group_seed(step, place) for place in range(len(questions))]

        def ask(place: int) -> tuple[np.ndarray, GroupOutput]:
            group_id = f"step-{step}-{place}"
            return self._ask(questions[place], group_id, self._config.group_size, seeds[place], min_policy_version)

        result = Rollout(groups=len(questions))
        with ThreadPoolExecutor(CONCURRENT_GROUPS) as threads:
            answers = list(threads.map(ask, range(len(questions))))
        result.seconds = time.monotonic() - started
        for question, (prompt_ids, group) in zip(questions, answers, strict=True):
            self._collect(result, question, prompt_ids, group)
        return result

    def evaluate(self, questions: Sequence[Question]) -> float:
        """Mean reward of one answer per question, sampled as in training under fixed seeds."""

        def ask(place: int) -> float:
            seed = self._group_seed(EVALUATION_STREAM, place)
            _, group = self._ask(questions[place], f"evaluation-{place}-{time.monotonic_ns()}", 1, seed, None)
            return self._rewards(questions[place], group)[0]

        with ThreadPoolExecutor(CONCURRENT_GROUPS) as threads:
            return float(np.mean(list(threads.map(ask, range(len(questions))))))

    def _ask(
        self, question: Question, group_id: str, n: int, seed: int, min_policy_version: int | None
    ) -> tuple[np.ndarray, GroupOutput]:
        prompt_ids = observation_ids(question.environment().reset(), self._codec, first=True)
        sampling = SamplingParams(
            temperature=self._config.temperature, max_new=self._config.max_new, stop_ids=[self._eos_id], seed=seed
        )
        group = self._client.generate(
            prompt_ids,
            n=n,
            sampling=sampling,
            group_id=group_id,
            min_policy_version=min_policy_version,
            timeout_s=self._config.timeout_s,
        )
        return prompt_ids, group

    def _rewards(self, question: Question, group: GroupOutput) -> list[float]:
        rewards = []
        for output in group.samples:
            environment = question.environment()
            environment.reset()
            rewards.append(environment.step(action_of(output, self._codec)).reward)
        return rewards

    def _collect(self, result: Rollout, question: Question, prompt_ids: np.ndarray, group: GroupOutput) -> None:
        rewards = self._rewards(question, group)
        result.samples += group_samples(prompt_ids, group, rewards, self._config.temperature)
        count = len(group.samples)
        lengths = [len(output.ids) for output in group.samples]
        result.tokens += sum(lengths)
        tally = result.tally
        trainable = sum(is_trainable(output) for output in group.samples)
        tally.add("response/aborted_ratio", count - trainable, count)
        tally.add("critic/rewards/mean", sum(rewards), count)
        tally.add("frac_reward_zero_std", float(len(set(rewards)) == 1), 1)
        tally.add("response_length/mean", sum(lengths), count)
        tally.add("response_length/clip_ratio", sum(output.finish == "length" for output in group.samples), count)
        cached = sum(output.cached_tokens for output in group.samples)
        tally.add("rollout/prefix_cache_hit_rate", cached, count * group.prompt_tokens)

    def _group_seed(self, step: int, place: int) -> int:
        return int(np.random.SeedSequence([self._seed, step, place]).generate_state(1, np.uint32)[0])
