"""Temperatures of a drafter's confidences, fitted anew, and the drafter measured.

Owns the order of the parts of `python -m recipes.calibrate_drafter`. Ignores training.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.build import load_parts
from engine.config import describe
from engine.dspark.block_spec import check_fits
from engine.dspark.scaling import SurvivalScaling, scaling_file
from engine.errors import InvalidRequest
from engine.models.spec import DTYPES
from engine.weights.digest import model_digest
from recipes.grpo.config import ChatModel
from recipes.grpo.progress import Display
from recipes.tracking import Tracker, wandb_sinks
from recipes.train_drafter.config import CalibrateConfig
from recipes.train_drafter.judge import judge
from recipes.train_drafter.prompts import make_prompts
from recipes.train_drafter.target import find_target
from trainer_bridge.drafter.export import load_drafter, require_target


def calibrate_drafter(folder: Path, config: CalibrateConfig, display: Display) -> dict:
    """Reports by rule and temperature, as plain values. Raises `InvalidRequest` where drafter and target do not
    match or the drafter has no confidences."""
    target = find_target(ChatModel(config.target), folder, config.seed, lambda *_: None)
    parts = load_parts(target.folder, config.engine)
    model, stored = load_drafter(folder, DTYPES[config.dtype], parts.device)
    check_fits(model.spec, parts.model.spec)
    if config.require_digest:
        require_target(stored, model_digest(parts.model))
    if model.confidence_head is None:
        raise InvalidRequest(field="enable_confidence_head", expected="true, to be calibrated", actual=False)
    _, held_out = make_prompts(config.prompts, None, config.seed)
    judged = judge(config.evaluation, target, parts, model, held_out, folder, config.seed, display)
    for scaling in judged.scalings:
        SurvivalScaling(model.spec.num_drafts).save(folder / scaling_file(scaling.rule), scaling)
    sinks = wandb_sinks(folder, f"calibrate-{folder.name}", config.tracking, describe(config), display.say)
    tracker = Tracker(folder, sinks, config.tracking)
    for report in judged.reports:
        tracker.log("evaluation", 0, report.metrics())
    tracker.close()
    return {
        "drafter": str(folder),
        "scalings": [msgspec.to_builtins(one) for one in judged.scalings],
        "reports": [msgspec.to_builtins(one) for one in judged.reports],
    }
