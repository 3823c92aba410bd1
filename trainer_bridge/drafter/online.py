"""A drafter that follows its policy.

Owns three parts of training during reinforcement learning: a detector of drift, the ladder of answers to
it, and a buffer of rounds worth learning from. Ignores who feeds them and who acts: each is a plain object
with numbers in and decisions out.

The target changes with every policy version, the drafter does not; what it promises and what is kept drift
apart. `DriftLadder` first refits the temperatures (cheap, cures overconfidence), then asks for drafter
steps, then switches drafting off if it is not worth its while. Peace takes it back down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from engine.errors import InvalidRequest
from trainer_bridge.drafter.anchors import eligible
from trainer_bridge.drafter.config import DriftConfig
from trainer_bridge.drafter.features import FeatureExample

Response = Literal["none", "refit", "train", "disable"]
LADDER: tuple[Response, ...] = ("refit", "train", "disable")


@dataclass(slots=True)
class Cusum:
    """One-sided cumulative sum (Page 1954): drafts promised beyond those kept, above what chance explains."""

    slack: float
    threshold: float
    value: float = 0.0

    def add(self, predicted: float, accepted: float) -> bool:
        """A round's expected and actual accepted drafts; True where drift is found, which starts it anew."""
        self.value = max(0.0, self.value + predicted - accepted - self.slack)
        if self.value < self.threshold:
            return False
        self.value = 0.0
        return True


class DriftLadder:
    """Decides after every round. A new policy version starts the sum anew: rounds of one version say nothing
    of the next, but the rung stays."""

    def __init__(self, config: DriftConfig) -> None:
        self.config = config
        self.policy_version = 0
        self.alarms = 0
        self._cusum = Cusum(config.slack, config.threshold)
        self._rung, self._tried, self._quiet = 0, 0, 0
        self._rounds, self._kept = 0.0, 0.0
        """Rounds of late, and drafts kept in them."""
        self._disabled = False

    @property
    def disabled(self) -> bool:
        return self._disabled

    def played(self, accepted: Sequence[float]) -> None:
        """Drafts kept in all rounds of a rollout, those that no answer is asked about included: what led to an answer
        was bad by choice. Earlier rollouts fade."""
        self._rounds, self._kept = 0.5 * self._rounds + len(accepted), 0.5 * self._kept + sum(accepted)

    def observe(self, policy_version: int, predicted: float, accepted: float) -> Response:
        """What to do now. Rounds of an older version than the newest seen are ignored."""
        if policy_version < self.policy_version or self._disabled:
            return "none"
        if policy_version > self.policy_version:
            self.policy_version = policy_version
            self._cusum.value = 0.0
        if not self._cusum.add(predicted, accepted):
            self._quiet += 1
            if self._quiet >= self.config.calm:
                self._rung, self._tried, self._quiet = max(0, self._rung - 1), 0, 0
            return "none"
        self.alarms += 1
        self._quiet = 0
        response = LADDER[self._rung]
        if response == "disable" and self._kept >= self.config.worth * self._rounds > 0.0:
            return "train"
        self._tried += 1
        if response == "disable":
            self._disabled = True
        elif self._tried >= self.config.attempts:
            self._rung, self._tried = self._rung + 1, 0
        return response

    def enable(self) -> None:
        """Drafting is worth another try (a newly trained drafter, say); it begins at the bottom."""
        self._disabled = False
        self._rung, self._tried, self._quiet = 0, 0, 0
        self._cusum.value = 0.0


@dataclass(slots=True)
class _Kept:
    item: FeatureExample
    priority: float
    size: int


@dataclass(slots=True)
class ReplayBuffer:
    """Examples with their states in at most `capacity` bytes, drawn in proportion to how badly they were
    drafted. An anchor that kept all its drafts keeps the weight `floor`. When full, examples of the
    oldest policy go first, and of those the best drafted."""

    capacity: int
    drafts: int
    floor: float = 0.05
    size: int = 0
    dropped: int = 0
    _kept: dict[str, _Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise InvalidRequest(field="replay.capacity", expected="1 byte or more", actual=self.capacity)
        if not 0.0 < self.floor <= 1.0:
            raise InvalidRequest(field="replay.floor", expected="in (0, 1]", actual=self.floor)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, item: FeatureExample, anchors: Sequence[int], accepted: Sequence[int]) -> None:
        """An example whose rounds stood at `anchors` and kept so many drafts. Positions that no round stood at
        take the mean of those that some did. An example of the same key is replaced."""
        weights_T = self._weights(item, anchors, accepted)
        size = sum(t.numel() * t.element_size() for t in (item.features_TMD, item.last_TD) if t is not None)
        if size > self.capacity:
            self.dropped += 1
            return
        self.remove(item.example.key)
        item = replace(item, anchor_weights_T=weights_T)
        self._kept[item.example.key] = _Kept(item, float(weights_T[weights_T > 0].mean()), size)
        self.size += size
        while self.size > self.capacity:
            worst = min(self._kept.values(), key=lambda kept: (kept.item.example.policy_version, kept.priority))
            self.remove(worst.item.example.key)
            self.dropped += 1

    def remove(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.size -= kept.size

    def sample(self, count: int, rng: np.random.Generator) -> list[FeatureExample]:
        """At most `count` different examples; their `anchor_weights_T` favour the same anchors."""
        kept = [self._kept[key] for key in sorted(self._kept)]
        if len(kept) <= count:
            return [one.item for one in kept]
        priorities = np.array([one.priority for one in kept])
        places = rng.choice(len(kept), count, replace=False, p=priorities / priorities.sum())
        return [kept[place].item for place in places]

    def _weights(self, item: FeatureExample, anchors: Sequence[int], accepted: Sequence[int]) -> np.ndarray:
        """float64 [T]: 1 - share of drafts kept, at least `floor`; 0 where no block may stand."""
        length = item.example.num_tokens
        allowed = eligible(item.example.mask, 1, length)
        if len(anchors) != len(accepted) or not set(anchors) <= set(allowed.tolist()):
            raise InvalidRequest(field="anchors", expected="positions before supervised tokens", actual=list(anchors))
        if any(not 0 <= count <= self.drafts for count in accepted):
            raise InvalidRequest(field="accepted", expected=f"0 to {self.drafts}", actual=list(accepted))
        missed = np.maximum(self.floor, 1.0 - np.asarray(accepted, float) / self.drafts)
        weights_T = np.zeros(length)
        weights_T[allowed] = missed.mean() if len(missed) else 1.0
        weights_T[list(anchors)] = missed
        return weights_T
