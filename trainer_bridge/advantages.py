"""Advantages within a group, and what DAPO does to rewards and groups before them.

Owns the arithmetic from rewards to advantages. Ignores tokens and losses. Sources: GRPO (Shao et
al. 2024, eq. 3 with outcome supervision), Dr.GRPO (Liu et al. 2025: no division by the standard
deviation), DAPO (Yu et al. 2025: groups without variance carry no gradient and are filtered;
answers near the length limit are punished softly, eq. 13).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from engine.errors import InvalidRequest
from trainer_bridge.samples import TrainingSample

STD_EPSILON = 1e-6
"""Added to the standard deviation, so that a group without variance gets 0 and not NaN."""


def group_advantages(rewards_N: np.ndarray, *, divide_by_std: bool) -> np.ndarray:
    """Reward minus the group's mean, over the population standard deviation where asked. float64 [N]."""
    rewards_N = np.asarray(rewards_N, np.float64)
    if rewards_N.size == 0 or not np.isfinite(rewards_N).all():
        raise InvalidRequest(field="rewards", expected="finite values, at least one", actual=rewards_N.tolist())
    centred_N = rewards_N - rewards_N.mean()
    return centred_N / (rewards_N.std() + STD_EPSILON) if divide_by_std else centred_N


def assign_advantages(samples: Sequence[TrainingSample], *, divide_by_std: bool) -> None:
    """Writes every sample's advantage, group by group."""
    for members in by_group(samples).values():
        values = group_advantages(np.array([sample.reward for sample in members]), divide_by_std=divide_by_std)
        for sample, value in zip(members, values, strict=True):
            sample.advantage = float(value)


def split_zero_variance(samples: Sequence[TrainingSample]) -> tuple[list[TrainingSample], int]:
    """Samples of the groups whose rewards differ, and how many groups were left out."""
    groups = by_group(samples)
    kept = {key: members for key, members in groups.items() if len({sample.reward for sample in members}) > 1}
    return [sample for members in kept.values() for sample in members], len(groups) - len(kept)


def overlong_penalty(length: int, max_new: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to `max_new - buffer` tokens, falling to -1 at `max_new`."""
    if not 0 < buffer <= max_new:
        raise InvalidRequest(field="buffer", expected=f"1 to {max_new}", actual=buffer)
    return float(min(0.0, max(-1.0, (max_new - buffer - length) / buffer)))


def add_overlong_penalties(samples: Sequence[TrainingSample], max_new: int, buffer: int) -> None:
    """Takes the punishment off every sample's reward; its length is what the policy said."""
    for sample in samples:
        sample.reward += overlong_penalty(sample.num_trained, max_new, buffer)


def by_group(samples: Sequence[TrainingSample]) -> dict[str, list[TrainingSample]]:
    groups: dict[str, list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    return groups
