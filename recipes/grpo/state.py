"""What a run must remember to go on: beside weights and optimiser, which checkpoints hold."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from engine.config import describe
from engine.errors import InvalidRequest
from recipes.grpo.config import GrpoConfig

FREE = (
    "output",
    "steps",
    "max_steps",
    "checkpoint_every",
    "evaluate_every",
    "device",
    "trainer_threads",
    "tracking.",
    "rollout.engine",
    "rollout.where",
    "rollout.release",
    "rollout.offload_trainer",
    "online.",
)
"""Settings that may differ after a resume: they change no sample and no update."""


@dataclass(slots=True)
class RunState:
    """`train_step` counts finished steps, `policy_version` is the version those weights had,
    `asked` how many training questions have been asked."""

    run_id: str
    settings: list[str]
    train_step: int = 0
    policy_version: int = 0
    asked: int = 0
    reward_before: float = float("nan")
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], config: GrpoConfig) -> RunState:
        """Raises `InvalidRequest` where the configuration would make it another run."""
        state = cls(**values)
        was, now = _binding(state.settings), _binding(describe(config))
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                raise InvalidRequest(field=key, expected=f"{was.get(key)}, as the run began", actual=now.get(key))
        return state


def _binding(settings: list[str]) -> dict[str, str]:
    pairs = dict(line.split(" = ", 1) for line in settings)
    return {key: value for key, value in pairs.items() if not key.startswith(FREE)}
