"""Which samples are too old to train on.

Owns the lag of a sample behind the trained policy and the bound on it. Ignores queues. The lag is
counted from the oldest token: one old token makes an old sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import Conflict, InvalidRequest
from trainer_bridge.samples import TrainingSample


def lag(sample: TrainingSample, current_version: int) -> int:
    """Versions between the sample's oldest token and `current_version`; never negative.

    Raises `Conflict` for a sample from the future: the count has gone back somewhere, and
    treating such samples as fresh would let the oldest through.
    """
    newest = max(span.policy_version for span in sample.spans)
    if newest > current_version:
        raise Conflict(
            field=f"policy version of sample {sample.group_id}/{sample.index}",
            expected=f"at most the trainer's {current_version}",
            actual=newest,
        )
    return current_version - sample.oldest_version


@dataclass(slots=True)
class StalenessFilter:
    """Keeps samples whose lag is at most `max_lag`; counts the rest by whole samples."""

    max_lag: int
    kept: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise InvalidRequest(field="max_lag", expected="0 or more", actual=self.max_lag)

    def apply(self, samples: Iterable[TrainingSample], current_version: int) -> list[TrainingSample]:
        fresh = []
        for sample in samples:
            if lag(sample, current_version) <= self.max_lag:
                fresh.append(sample)
            else:
                self.dropped += 1
        self.kept += len(fresh)
        return fresh
