"""Rollouts as the engine plays them, as examples with states.

Owns what is kept of a sample between its rounds and its end: where its rounds stood, what they promised
and kept, and the states that the engine hands over. Nothing is computed again: features and the target's
final states are those of serving. Ignores what is learnt from them (`trainer_bridge.drafter.online`).

Shapes: T tokens, M captured layers, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.dspark.draft_step import DraftStep
from engine.models.decoder import DenseDecoderLM
from engine.request import Sample
from engine.runner.stepper import to_host
from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.features import FeatureExample


@dataclass(frozen=True, slots=True)
class Promise:
    """What a step's rounds were expected to keep, and kept, at one policy version."""

    policy_version: int
    predicted: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer, and the rounds that drafted it: where they stood and how many drafts they kept."""

    item: FeatureExample
    anchors: list[int]
    accepted: list[int]


@dataclass(slots=True)
class _Rounds:
    anchors: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class RolloutRecorder:
    """A `DraftWatcher`. Every `every`-th finished sample is kept, on the host; the rest count for `promises`
    alone. A sample that more than one policy version wrote is left out: its states are of several. States come to the
    host while the device goes on."""

    def __init__(self, target: DenseDecoderLM, every: int = 1) -> None:
        assert every >= 1, "a share of samples is kept"
        self._target = target
        self._every = every
        self._rounds: dict[tuple[str, int], _Rounds] = {}
        self._items: dict[tuple[str, int], tuple[DraftExample, torch.Tensor, torch.Tensor]] = {}
        """Answers, their states and the last of those normed, on the host once the copies are done."""
        self._promises: list[Promise] = []
        self._ended = 0
        self._copied: torch.cuda.Event | None = None
        """Behind the last of the copies of states."""

    def take(self) -> tuple[list[Recorded], list[Promise]]:
        """Everything since the last time. Call it while the engine is idle: rounds of samples that have not
        ended well are forgotten."""
        if self._copied is not None:
            self._copied.synchronize()
        recorded = []
        for key, (example, states_TMD, last_TD) in self._items.items():
            rounds = self._rounds.get(key, _Rounds())
            # These are copies, as pinned memory is for the next ones. The last token's states are not there, and no
            # label needs them.
            features_TMD = torch.cat((states_TMD[:, :-1], torch.zeros_like(states_TMD[:1, :-1])))
            item = FeatureExample(example, features_TMD, torch.cat((last_TD, torch.zeros_like(last_TD[:1]))))
            recorded.append(Recorded(item, rounds.anchors, rounds.accepted))
        promises = self._promises
        self._rounds, self._items, self._promises, self._copied = {}, {}, [], None
        return recorded, promises

    def on_round(self, step: DraftStep) -> None:
        assert step.verdict is not None
        rows, drafts = step.survival_BG.shape
        verified_B = np.array([len(own) for own in step.drafts[:rows]])
        predicted_B = np.where(np.arange(drafts) < verified_B[:, None], step.survival_BG, 0.0).sum(1)
        told = zip(step.samples, step.anchors, predicted_B.tolist(), step.verdict.num_accepted, strict=False)
        for sample, anchor, predicted, accepted in told:
            if sample.spans:
                self._promises.append(Promise(sample.spans[-1].policy_version, predicted, float(accepted)))
            if anchor + 1 < sample.length:
                rounds = self._rounds.setdefault(_key(sample), _Rounds())
                rounds.anchors.append(anchor)
                rounds.accepted.append(accepted)

    def wants(self, sample: Sample) -> bool:
        self._ended += 1
        versions = {span.policy_version for span in sample.spans}
        return len(versions) == 1 and not (sample.resumed or sample.mixed_kv or self._ended % self._every)

    def on_sample(self, sample: Sample, states_TMD: torch.Tensor) -> None:
        tokens = sample.tokens().astype(np.uint32)
        mask = np.zeros(len(tokens), dtype=bool)
        mask[len(sample.group.prompt) :] = True
        name = f"{sample.group.request.group_id}/{sample.index}"
        version = sample.spans[-1].policy_version
        example = DraftExample(name, sample.group.request.domain, tokens, mask, version)
        with torch.no_grad():
            last_TD = self._target.model.norm(states_TMD[:, -1].contiguous())
        self._items[_key(sample)] = example, to_host(states_TMD), to_host(last_TD)
        if states_TMD.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()


def _key(sample: Sample) -> tuple[str, int]:
    return sample.group.request.group_id, sample.index
