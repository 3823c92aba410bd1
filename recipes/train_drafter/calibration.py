"""Temperatures of a drafter's confidences, fitted anew; drafters measured, and held against each other.

Owns the order of the parts of `python -m recipes.calibrate_drafter`. Ignores training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from engine.build import Parts, load_parts
from engine.config import describe
from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import check_fits
from engine.dspark.scaling import SurvivalScaling, scaling_file
from engine.errors import InvalidRequest
from engine.models.spec import DTYPES
from engine.weights.digest import model_digest
from recipes.grpo.config import ChatModel
from recipes.grpo.progress import Display
from recipes.tracking import Tracker, wandb_sinks
from recipes.train_drafter.config import CalibrateConfig
from recipes.train_drafter.judge import Judgement, judge
from recipes.train_drafter.prompts import make_prompts
from recipes.train_drafter.target import Target, find_target
from trainer_bridge.drafter.evaluation import EvaluationReport
from trainer_bridge.drafter.export import load_drafter, require_target


def calibrate_drafter(folder: Path, config: CalibrateConfig, display: Display, output: Path | None = None) -> dict:
    """Reports by rule and temperature, as plain values; temperatures and pictures go to `output`, the drafter's own
    folder unless given. Raises `InvalidRequest` where drafter and target do not match or the drafter has no
    confidences."""
    output = folder if output is None else output
    output.mkdir(parents=True, exist_ok=True)
    target, parts = _target(config)
    model = _load(folder, config, parts)
    if model.confidence_head is None:
        raise InvalidRequest(field="enable_confidence_head", expected="true, to be calibrated", actual=False)
    judged = _judge(model, config, target, parts, output, display)
    for scaling in judged.scalings:
        SurvivalScaling(model.spec.num_drafts).save(output / scaling_file(scaling.rule), scaling)
    sinks = wandb_sinks(output, f"calibrate-{output.name}", config.tracking, describe(config), display.say)
    tracker = Tracker(output, sinks, config.tracking)
    for report in judged.reports:
        tracker.log("evaluation", 0, report.metrics())
    tracker.close()
    return {
        "drafter": str(folder),
        "scalings": [msgspec.to_builtins(one) for one in judged.scalings],
        "reports": [msgspec.to_builtins(one) for one in judged.reports],
    }


def compare_drafters(folders: Mapping[str, Path], config: CalibrateConfig, display: Display) -> dict:
    """Accept lengths of drafters of one target on the same prompts and seeds, by rule, temperature and domain, as
    plain values. Fits nothing and writes no file. Raises as `calibrate_drafter`."""
    target, parts = _target(config)
    config = replace(config, evaluation=replace(config.evaluation, fit_samples=0))
    found: dict[str, list[EvaluationReport]] = {}
    for name, folder in folders.items():
        display.say(f"{name}:")
        found[name] = _judge(_load(folder, config, parts), config, target, parts, folder, display).reports
    compared = {}
    for reports in zip(*found.values(), strict=True):
        title = f"{reports[0].rule}, T = {reports[0].temperature:g}"
        lengths = {name: _lengths(report) for name, report in zip(found, reports, strict=True)}
        compared[title] = lengths
        display.say(_table(title, lengths))
    return {"accept_length": compared}


def _table(title: str, lengths: Mapping[str, Mapping[str, float]]) -> str:
    """Every drafter's line after the first shows its share of the first one's accept lengths too."""
    first = next(iter(lengths.values()))
    lines = [f"accept length, {title}:"]
    for domain in [name for name in first if all(name in one for one in lengths.values())]:
        lines.append(f"  {domain}")
        lines += [f"    {one[domain]:.3f}  {one[domain] / first[domain]:7.2%}  {name}" for name, one in lengths.items()]
    return "\n".join(lines)


def _lengths(report: EvaluationReport) -> dict[str, float]:
    return {name: one.accept_length for name, one in [*report.domains.items(), ("all", report.overall)]}


def _target(config: CalibrateConfig) -> tuple[Target, Parts]:
    # A model of the catalogue is not made, and needs no place.
    target = find_target(ChatModel(config.target), Path(), config.seed, lambda *_: None)
    return target, load_parts(target.folder, config.engine)


def _load(folder: Path, config: CalibrateConfig, parts: Parts) -> BlockDrafterModel:
    model, stored = load_drafter(folder, DTYPES[config.dtype], parts.device)
    check_fits(model.spec, parts.model.spec)
    if config.require_digest:
        require_target(stored, model_digest(parts.model))
    return model


def _judge(
    model: BlockDrafterModel, config: CalibrateConfig, target: Target, parts: Parts, output: Path, display: Display
) -> Judgement:
    _, held_out = make_prompts(config.prompts, None, config.seed)
    return judge(config.evaluation, target, parts, model, held_out, output, config.seed, display)
