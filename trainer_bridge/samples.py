"""From rollouts to samples that can be trained on.

Owns what a training sample holds and which rollouts make none. Ignores advantages, batches and
losses. All columns of a sample cover `output_ids`: every token after the first prompt, those an
environment said in later turns included, with a loss mask that is true on the policy's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.errors import InvalidRequest
from engine.types import FinishReason, LogprobDefinition, SampleOutput, Span


@dataclass(slots=True, eq=False)
class TrainingSample:
    """`rollout_logprobs` (nats) are the behaviour policy's at `temperature`, 0 where the mask is
    false. `spans` are in positions of `output_ids` and cover its masked tokens."""

    group_id: str
    index: int
    prompt_ids: np.ndarray
    output_ids: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    spans: list[Span]
    temperature: float
    finish: FinishReason
    reward: float = 0.0
    advantage: float = 0.0

    def __post_init__(self) -> None:
        length = len(self.output_ids)
        if not (len(self.loss_mask) == len(self.rollout_logprobs) == length):
            raise InvalidRequest(
                field=f"sample {self.group_id}/{self.index}",
                expected=f"columns of length {length}",
                actual=(len(self.loss_mask), len(self.rollout_logprobs)),
            )
        covered = np.zeros(length, dtype=bool)
        for span in self.spans:
            covered[span.start : span.end] = True
        if not np.all(covered[self.loss_mask]):
            raise InvalidRequest(
                field=f"sample {self.group_id}/{self.index}",
                expected="a policy version for every trained token",
                actual=self.spans,
            )

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def oldest_version(self) -> int:
        return min(span.policy_version for span in self.spans)


@dataclass(slots=True)
class Episode:
    """A conversation being recorded: the first prompt, then turns of the policy and of the
    environment, as ids that are never tokenised again."""

    group_id: str
    index: int
    prompt_ids: np.ndarray
    temperature: float
    _ids: list[np.ndarray] = field(default_factory=list)
    _masks: list[np.ndarray] = field(default_factory=list)
    _logprobs: list[np.ndarray] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _length: int = 0
    finish: FinishReason = "stop"

    @property
    def context_ids(self) -> np.ndarray:
        """Everything said so far: the prompt of the next turn."""
        return np.concatenate([np.asarray(self.prompt_ids, np.uint32), *self._ids])

    def record(self, output: SampleOutput) -> None:
        """Appends what the policy answered. Raises `InvalidRequest` where its log-probabilities
        are not those of the sampling distribution at this temperature."""
        _require_behaviour(output.logprob_definition, self.temperature)
        if len(output.ids) != len(output.logprobs):
            raise InvalidRequest(field="logprobs", expected=f"{len(output.ids)} values", actual=len(output.logprobs))
        for span in output.spans:
            self._spans.append(_shifted(span, self._length))
        self._append(output.ids, True, output.logprobs)
        self.finish = output.finish

    def observe(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends what the environment said; never trained on."""
        self._append(np.asarray(ids, np.uint32), False, np.zeros(len(ids), np.float32))

    def close(self, reward: float) -> TrainingSample:
        return TrainingSample(
            group_id=self.group_id,
            index=self.index,
            prompt_ids=np.asarray(self.prompt_ids, np.uint32),
            output_ids=np.concatenate(self._ids) if self._ids else np.zeros(0, np.uint32),
            loss_mask=np.concatenate(self._masks) if self._masks else np.zeros(0, bool),
            rollout_logprobs=np.concatenate(self._logprobs) if self._logprobs else np.zeros(0, np.float32),
            spans=self._spans,
            temperature=self.temperature,
            finish=self.finish,
            reward=reward,
        )

    def _append(self, ids: np.ndarray, trained: bool, logprobs: np.ndarray) -> None:
        self._ids.append(np.asarray(ids, np.uint32))
        self._masks.append(np.full(len(ids), trained))
        self._logprobs.append(np.asarray(logprobs, np.float32))
        self._length += len(ids)


def is_trainable(output: SampleOutput) -> bool:
    """Errors and aborts are dropped, never zeroed: a reward of 0 would punish the policy for them."""
    return output.finish in ("stop", "length") and len(output.ids) > 0


def _require_behaviour(definition: LogprobDefinition, temperature: float) -> None:
    if definition == "raw" and temperature not in (0.0, 1.0):
        raise InvalidRequest(
            field="logprob_definition", expected=f"log-probabilities at temperature {temperature}", actual="raw"
        )


def _shifted(span: Span, offset: int) -> Span:
    return Span(
        start=span.start + offset,
        end=span.end + offset,
        policy_version=span.policy_version,
        adapter_rev=span.adapter_rev,
        drafter_version=span.drafter_version,
        mixed_kv=span.mixed_kv,
    )
