"""Fit the temperatures of a drafter's confidences anew, and measure the drafter.

Owns the command: `python -m recipes.calibrate_drafter --drafter FOLDER`. After a policy update, for
another sampling temperature or other traffic, a fit takes minutes and changes no weights: `sts-RULE.json`
beside the drafter is replaced, and a reliability diagram drawn. Ignores training.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from engine.build import load_parts
from engine.config import EngineConfig, describe, load_config
from engine.dspark.block_spec import check_fits
from engine.dspark.scaling import SurvivalScaling
from engine.errors import InvalidRequest, SparkrollError
from engine.models.spec import DTYPES
from engine.weights.digest import model_digest
from recipes.grpo.config import ChatModel
from recipes.grpo.progress import Display
from recipes.tracking import Tracker, TrackingConfig, wandb_sinks
from recipes.train_drafter.config import EvaluationConfig, PromptConfig
from recipes.train_drafter.judge import judge
from recipes.train_drafter.prompts import make_prompts
from recipes.train_drafter.target import find_target
from trainer_bridge.drafter.export import load_drafter, require_target, scaling_file


@dataclass(frozen=True, slots=True)
class CalibrateConfig:
    """`target` is a model of the catalogue or a folder. `prompts.held_out` conversations of each source are
    played. With `require_digest` a drafter made for other weights is refused."""

    target: str = "smollm2-135m"
    seed: int = 1
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    require_digest: bool = False
    prompts: PromptConfig = PromptConfig(training=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    tracking: TrackingConfig = TrackingConfig()


def main(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter; its temperatures are replaced.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
) -> None:
    """Fit confidence temperatures on held-out full-window rounds and report how the drafter does."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        config = load_config(CalibrateConfig, overrides=list(settings or []), base=CalibrateConfig())
        with Display() as display:
            results = calibrate_drafter(drafter, config, display)
    except SparkrollError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(json.dumps(results), flush=True)


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


if __name__ == "__main__":
    typer.run(main)
