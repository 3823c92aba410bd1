"""States computed in other processes and sent to the trainer through Ray.

Owns the workers and how requests are spread over them. In memory there are the examples that the stream
lets wait and what workers are computing: nothing is stored by Ray beyond a request's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from trainer_bridge.drafter.examples import DraftExample
from trainer_bridge.drafter.features import FeatureExample


class FeatureWorker:
    """An engine in a process of its own, asked for nothing but states."""

    def __init__(self, folder: Path, config: EngineConfig, layers: tuple[int, ...]) -> None:
        from engine.build import load_parts
        from trainer_bridge.drafter.features import FeatureScorer

        self._scorer = FeatureScorer(load_parts(folder, config), layers)

    def score(self, examples: list[DraftExample]) -> list[tuple[Any, Any]]:
        """(features, last) of each, on the host."""
        return [(item.features_TMD.cpu(), _host(item.last_TD)) for item in self._scorer.score(examples)]


class RayFeatures:
    """A `FeatureSource` over `workers` processes; each gets an equal share of a step's examples. Close it when
    done: its processes go with it."""

    def __init__(
        self, folder: Path, config: EngineConfig, layers: Sequence[int], examples: Sequence[DraftExample], workers: int
    ) -> None:
        import ray

        from rollout.actors.launch import ensure_ray

        self._owned = ensure_ray(None)
        self._examples = list(examples)
        gpus = 0 if config.device == "cpu" else 1
        kind = ray.remote(num_cpus=1, num_gpus=gpus)(FeatureWorker)
        self._workers: list[Any] = [kind.remote(folder, config, tuple(layers)) for _ in range(workers)]

    def __len__(self) -> int:
        return len(self._examples)

    def fetch(self, places: Sequence[int]) -> list[FeatureExample]:
        import ray

        examples = [self._examples[place] for place in places]
        count = len(self._workers)
        shares = [examples[number::count] for number in range(count)]
        asked = [worker.score.remote(share) for worker, share in zip(self._workers, shares, strict=True) if share]
        answers = ray.get(asked)
        states: list[Any] = [None] * len(examples)
        for number, answer in enumerate(answers):
            states[number::count] = answer
        return [FeatureExample(example, *pair) for example, pair in zip(examples, states, strict=True)]

    def close(self) -> None:
        import ray

        for worker in self._workers:
            ray.kill(worker)
        if self._owned:
            ray.shutdown()


def _host(value: Any) -> Any:
    return None if value is None else value.cpu()
