"""A trained drafter on held-out prompts: figures, temperatures of its confidences, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engine.build import Parts
from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.scaling import Rule, StoredScaling, SurvivalScaling
from engine.types import SamplingParams
from recipes.grpo.progress import Display
from recipes.train_drafter.config import TrainDrafterConfig
from recipes.train_drafter.target import Target
from trainer_bridge.drafter.calibration import calibrate, draw_reliability
from trainer_bridge.drafter.evaluation import EvaluationReport, report_of_rounds
from trainer_bridge.drafter.responses import Dialogue
from trainer_bridge.drafter.rounds import FullWindowRounds, RoundLog


@dataclass(slots=True)
class Judgement:
    reports: list[EvaluationReport] = field(default_factory=list)
    scalings: list[StoredScaling] = field(default_factory=list)


def judge(
    config: TrainDrafterConfig,
    target: Target,
    parts: Parts,
    model: BlockDrafterModel,
    held_out: Sequence[Dialogue],
    display: Display,
) -> Judgement:
    """Full-window rounds under every rule at every temperature. Where the drafter has confidences, each rule's
    temperatures are fitted on answers of their own and judged on the evaluation's."""
    settings, result = config.evaluation, Judgement()
    prompts = [
        (dialogue.domain, np.asarray(target.codec.render(dialogue.opening, first=True), np.uint32))
        for dialogue in held_out
    ]
    prompts = [(domain, ids) for domain, ids in prompts if _fits(ids, parts, model)]
    for rule in settings.rules:
        fitted = _fit_log(config, target, parts, model, rule, prompts) if model.confidence_head is not None else None
        for temperature in settings.temperatures:
            params = _params(config, target, temperature)
            log = FullWindowRounds(parts, model, rule, config.seed).play(prompts, params, settings.batch)
            scaling: SurvivalScaling | None = None
            if fitted is not None and temperature == settings.calibrate_at:
                outcome = calibrate(fitted, log)
                scaling = outcome.scaling
                name = f"{', '.join(config.prompts.sources)}, held out"
                result.scalings.append(outcome.stored(name, rule, temperature))
                draw_reliability(outcome.raw, outcome.scaled, config.output / f"reliability-{rule}.png")
            report = report_of_rounds(log, rule=rule, temperature=temperature, scaling=scaling)
            result.reports.append(report)
            display.say(describe_report(report))
    return result


def describe_report(report: EvaluationReport) -> str:
    lines = [f"held-out prompts, T = {report.temperature:g}, {report.rule} verification:"]
    for name, one in [*report.domains.items(), ("all", report.overall)]:
        curve = " ".join(f"{value:.2f}" for value in one.survival)
        repeated = "" if one.repetition is None else f"  repetition {one.repetition:.1%}"
        lines.append(f"  {name:<10} accept length {one.accept_length:.3f}  kept {curve}{repeated}")
    for name, errors in (("raw", report.raw), ("scaled", report.scaled)):
        if errors is not None:
            ece, auc = float(np.nanmean(errors.ece)), float(np.nanmean(errors.auc))
            lines.append(f"  confidences, {name}: ECE {ece:.2%}  AUC {auc:.3f}")
    return "\n".join(lines)


def _fit_log(
    config: TrainDrafterConfig,
    target: Target,
    parts: Parts,
    model: BlockDrafterModel,
    rule: Rule,
    prompts: list[tuple[str, np.ndarray]],
) -> RoundLog:
    settings, log = config.evaluation, RoundLog(model.spec.num_drafts)
    params = _params(config, target, settings.calibrate_at)
    for number in range(settings.fit_samples):
        log.add(FullWindowRounds(parts, model, rule, config.seed + 1 + number).play(prompts, params, settings.batch))
    return replace(log, texts={})


def _params(config: TrainDrafterConfig, target: Target, temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_new=config.evaluation.max_new, stop_ids=target.stop_ids)


def _fits(ids: np.ndarray, parts: Parts, model: BlockDrafterModel) -> bool:
    return len(ids) + 2 * model.spec.block < min(parts.limits.context_len, model.spec.backbone.context_len)
