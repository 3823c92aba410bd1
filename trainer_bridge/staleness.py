"""Which samples are too old to train on.

Owns the lag of a sample behind the trained policy and the bound on it. Ignores queues. The lag is
counted from the oldest token: one old token makes an old sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.errors import Conflict, InvalidRequest
from engine.types import Span
from trainer_bridge.samples import TrainingSample

VersionOf = Callable[[Span], int]


def policy_version(span: Span) -> int:
    return span.policy_version


def adapter_rev(span: Span) -> int:
    return span.adapter_rev


def lag(sample: TrainingSample, current_version: int, version_of: VersionOf = policy_version) -> int:
    """Versions between the sample's oldest token and `current_version`; never negative.

    Raises `Conflict` for a sample from the future: the count has gone back somewhere, and
    treating such samples as fresh would let the oldest through.
    """
    versions = [version_of(span) for span in sample.spans]
    newest = max(versions)
    if newest > current_version:
        raise Conflict(
            field=f"policy version of sample {sample.group_id}/{sample.index}",
            expected=f"at most the trainer's {current_version}",
            actual=newest,
        )
    return current_version - min(versions)


@dataclass(slots=True)
class StalenessFilter:
    """Keeps samples whose lag is at most `max_lag`; counts the rest by whole samples. `version_of` says which of
    a span's labels is the trained policy's."""

    max_lag: int
    version_of: VersionOf = policy_version
    kept: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if self.max_lag < 0:
            raise InvalidRequest(field="max_lag", expected="0 or more", actual=self.max_lag)

    def apply(self, samples: Iterable[TrainingSample], current_version: int) -> list[TrainingSample]:
        fresh = []
        for sample in samples:
            if lag(sample, current_version, self.version_of) <= self.max_lag:
                fresh.append(sample)
            else:
                self.dropped += 1
        self.kept += len(fresh)
        return fresh
