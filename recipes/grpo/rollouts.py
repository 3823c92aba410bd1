"""Groups of answers as samples with rewards.

Owns what is asked in a step, under which seeds, and counting what came back. Ignores where the
answers come from (`serving`) and what is learnt from them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.types import AdapterRef, GroupOutput, GroupRequest, SamplingParams
from recipes.grpo.config import RolloutConfig
from recipes.grpo.policy import Policy
from recipes.grpo.serving import Serving
from recipes.tasks import Question
from trainer_bridge.episodes import Played, Turn, play
from trainer_bridge.samples import TrainingSample
from trainer_bridge.tally import Tally

EVALUATION_STREAM = 2**31
"""Seeds of evaluation are drawn apart from those of any train_step."""


@dataclass(slots=True)
class Rollout:
    """The samples of one step. `tokens` are generated ones, which took `generating` of its `seconds`: the rest went
    into words and verdicts. `tally` holds means over samples."""

    samples: list[TrainingSample] = field(default_factory=list)
    groups: int = 0
    tokens: int = 0
    seconds: float = 0.0
    generating: float = 0.0
    tally: Tally = field(default_factory=Tally)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.generating if self.generating else float("nan")

    def metrics(self) -> dict[str, float]:
        return {
            **self.tally.means(),
            "perf/throughput": self.tokens_per_second,
            "timing_s/gen": self.generating,
            "timing_s/reward": self.seconds - self.generating,
            "rollout/groups": float(self.groups),
            "rollout/tokens": float(self.tokens),
        }


class Sampler:
    """Plays groups of questions; every group's seed follows from (run seed, step, place).
    `max_turns` is how often the policy may speak in one episode, `adapter` the LoRA policy that speaks (None:
    the base). Names of groups begin with `prefix`."""

    def __init__(
        self,
        serving: Serving,
        policy: Policy,
        config: RolloutConfig,
        seed: int,
        max_turns: int,
        adapter: AdapterRef | None = None,
        prefix: str = "",
    ) -> None:
        self._adapter = adapter
        self._prefix = prefix
        self._serving = serving
        self._policy = policy
        self._config = config
        self._seed = seed
        self._max_turns = max_turns

    def rollout(self, questions: Sequence[Question], step: int, version: int) -> Rollout:
        """One group per question, from no policy older than `version`. (A LoRA policy's publish ends when no
        request finds an older one.)"""
        began = time.monotonic()
        min_policy_version = version if self._adapter is None else None
        groups, generating = self._play(questions, f"step-{step}", self._config.group_size, step, min_policy_version)
        result = Rollout(groups=len(groups), seconds=time.monotonic() - began, generating=generating)
        for members in groups:
            _collect(result, members)
        return result

    def evaluate(self, questions: Sequence[Question]) -> float:
        """Mean reward of `evaluations` answers per question, sampled as in training under fixed seeds. An
        answer that failed or was aborted counts as wrong."""
        name = f"evaluation-{time.monotonic_ns()}"
        groups, _ = self._play(questions, name, self._config.evaluations, EVALUATION_STREAM, None)
        rewards = [one.sample.reward if one.sample else 0.0 for members in groups for one in members]
        return float(np.mean(rewards))

    def _play(
        self, questions: Sequence[Question], name: str, n: int, stream: int, min_policy_version: int | None
    ) -> tuple[list[list[Played]], float]:
        """Episodes, and the seconds in which their words were generated."""
        generating = 0.0

        def generate(turns: list[Turn]) -> list[GroupOutput]:
            nonlocal generating
            began = time.monotonic()
            replies = self._serving.generate([self._request(turn, min_policy_version) for turn in turns])
            generating += time.monotonic() - began
            return replies

        episodes = play(
            [
                (
                    f"{self._prefix}{name}-{place}",
                    self._group_seed(stream, place),
                    [question.environment() for _ in range(n)],
                )
                for place, question in enumerate(questions)
            ],
            generate,
            self._policy.codec,
            temperature=self._config.temperature,
            max_turns=self._max_turns,
        )
        return episodes, generating

    def _request(self, turn: Turn, min_policy_version: int | None) -> GroupRequest:
        return GroupRequest(
            group_id=turn.group_id,
            prompt_ids=turn.prompt_ids,
            n=turn.n,
            sampling=SamplingParams(
                temperature=self._config.temperature,
                max_new=self._config.max_new,
                stop_ids=[self._policy.end_id],
                seed=turn.seed,
            ),
            adapter=self._adapter,
            min_policy_version=min_policy_version,
        )

    def _group_seed(self, stream: int, place: int) -> int:
        return int(np.random.SeedSequence([self._seed, stream, place]).generate_state(1, np.uint32)[0])


def _collect(result: Rollout, members: Sequence[Played]) -> None:
    """Samples of one group and its counts: per episode, but for cache and length per turn."""
    samples = [one.sample for one in members if one.sample is not None]
    outputs = [output for one in members for output in one.outputs]
    result.samples += samples
    lengths = [len(output.ids) for output in outputs]
    result.tokens += sum(lengths)
    tally = result.tally
    tally.add("response/aborted_ratio", len(members) - len(samples), len(members))
    tally.add("critic/rewards/mean", sum(sample.reward for sample in samples), len(samples))
    # A mean over what was sampled estimates it without the logits.
    surprise = -sum(float(sample.rollout_logprobs.sum()) for sample in samples)
    tally.add("rollout/entropy", surprise, sum(sample.num_trained for sample in samples))
    tally.add("frac_reward_zero_std", float(len({sample.reward for sample in samples}) <= 1), 1)
    tally.add("rollout/turns", len(outputs), len(members))
    tally.add("response_length/mean", sum(lengths), len(members))
    tally.add("response_length/clip_ratio", sum(output.finish == "length" for output in outputs), len(outputs))
    cached = sum(output.cached_tokens for output in outputs)
    prompts = sum(reply.prompt_tokens for one in members for reply in one.replies)
    tally.add("rollout/prefix_cache_hit_rate", cached, prompts)
