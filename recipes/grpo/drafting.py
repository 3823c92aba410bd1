"""A drafter beside the policy of a run: one to begin with, and its training from rollouts.

Owns what a run must do for it, so that the loop has three calls. Ignores learning
(`trainer_bridge.drafter.online_trainer`) and what is drafted (`engine.dspark`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import drafter_spec_from_config, read_config
from engine.models.registry import build_model
from engine.models.spec import DTYPES, read_spec
from engine.weights.loader import load_weights
from recipes.grpo.config import GrpoConfig
from recipes.grpo.policy import Policy
from recipes.grpo.serving import ColocatedServing, Serving
from recipes.tokenizers import mask_token
from trainer_bridge.drafter.config import DrafterShape
from trainer_bridge.drafter.export import DrafterCard, export_drafter
from trainer_bridge.drafter.initial import drafter_config, initialise
from trainer_bridge.drafter.online_trainer import OnlineTrainer

BEGINNING = "initial_drafter"


def new_drafter(folder: Path, target: Path, policy: Policy, shape: DrafterShape, seed: int) -> Path:
    """A drafter that knows nothing yet, for the policy in `target`, exported into `folder`."""
    spec = read_spec(target)
    config = drafter_config(shape, target, spec, mask_token(policy.tokenizer))
    host = build_model(spec, spec.dtype, torch.device("cpu"))
    load_weights(host, target)
    model = BlockDrafterModel(drafter_spec_from_config(config), spec.dtype, "cpu")
    initialise(model, host, seed)
    card = DrafterCard("initial drafter", target.name, "", ["none yet"], [])
    return export_drafter(folder, model, config, card, spec.dtype)


class RunDrafter:
    """What a run's drafter did since the last rollout, and its training where that is asked for."""

    def __init__(self, config: GrpoConfig, served: Serving, resumed: bool) -> None:
        self._config, self._served = config, served
        self._report = served.draft_report()
        self._online: OnlineTrainer | None = None
        if config.online.enabled:
            assert isinstance(served, ColocatedServing), "the configuration was checked"
            self._online = OnlineTrainer(served.engine, served.parts, config.online.training, config.seed)
            if resumed:
                self._online.restore(self._checkpoints)

    def before_rollout(self) -> None:
        """What was asked in between (an evaluation, say) is no rollout."""
        if self._online is not None:
            self._online.recorder.take()
        self._report = self._served.draft_report()

    def after_rollout(self) -> dict[str, float]:
        """Learn, and metrics; empty where nothing is drafted."""
        report = self._served.draft_report()
        if not report.values:
            return {}
        metrics = report.since(self._report).metrics()
        if self._online is not None:
            metrics |= self._online.after_rollout()
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def save(self) -> None:
        if self._online is not None:
            self._online.save(self._checkpoints)

    def export(self, folder: Path) -> None:
        """The trained drafter, as `serve --drafter` reads it."""
        if self._online is None:
            return
        assert isinstance(self._served, ColocatedServing)
        source = Path(self._served.engine.config.dspark.drafter)
        stored: dict[str, Any] = read_config(source)
        card = DrafterCard(
            name=folder.name,
            target=str(self._config.output / "policy"),
            target_digest=self._served.engine.digest(),
            data=[f"rollouts of {self._config.output.name}"],
            notes=[f"{self._online.trainer.train_step} train_steps beside the policy, from {source.name}"],
        )
        export_drafter(folder, self._online.model, stored, card, DTYPES[self._served.engine.config.dtype])

    @property
    def _checkpoints(self) -> Path:
        return self._config.output / "drafter_checkpoints"
