"""A trained drafter on held-out prompts: figures, temperatures of its confidences, pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.build import Parts
from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.scaling import StoredScaling
from engine.errors import InvalidRequest
from engine.types import SamplingParams
from recipes.grpo.progress import Display
from recipes.train_drafter.config import EvaluationConfig
from recipes.train_drafter.target import Target
from trainer_bridge.drafter.calibration import calibrate, draw_reliability
from trainer_bridge.drafter.evaluation import EvaluationReport, known_mean, report_of_rounds
from trainer_bridge.drafter.responses import Dialogue
from trainer_bridge.drafter.rounds import FullWindowRounds, RoundLog


@dataclass(slots=True)
class Judgement:
    reports: list[EvaluationReport] = field(default_factory=list)
    scalings: list[StoredScaling] = field(default_factory=list)


def judge(
    settings: EvaluationConfig,
    target: Target,
    parts: Parts,
    model: BlockDrafterModel,
    held_out: Sequence[Dialogue],
    output: Path,
    seed: int,
    display: Display,
) -> Judgement:
    """Full-window rounds under every rule at every temperature. Where the drafter has confidences, each rule's
    temperatures are fitted on answers of their own and judged on the evaluation's; `output` gets the
    reliability diagrams."""
    result = Judgement()
    prompts = [
        (dialogue.domain, np.asarray(target.codec.render(dialogue.opening, first=True), np.uint32))
        for dialogue in held_out
    ]
    prompts = [(domain, ids) for domain, ids in prompts if _fits(ids, parts, model)]
    if not prompts:
        raise InvalidRequest(field="prompts.held_out", expected="a prompt that fits the drafter's context", actual=0)
    for rule in settings.rules:
        rounds = FullWindowRounds(parts, model, rule)

        def play(temperature: float, seed: int, rounds: FullWindowRounds = rounds) -> RoundLog:
            params = SamplingParams(temperature=temperature, max_new=settings.max_new, stop_ids=target.stop_ids)
            return rounds.play(prompts, params, settings.batch, seed)

        fitted = RoundLog(model.spec.num_drafts)
        if model.confidence_head is not None:
            for number in range(settings.fit_samples):
                fitted.add(play(settings.calibrate_at, seed + 1 + number))
        for temperature in settings.temperatures:
            log, scaling = play(temperature, seed), None
            if fitted.logits and temperature == settings.calibrate_at:
                outcome = calibrate(fitted, log)
                scaling = outcome.scaling
                name = f"{', '.join(sorted(log.stats))}: held-out prompts"
                result.scalings.append(outcome.stored(name, rule, temperature))
                draw_reliability(outcome.raw, outcome.scaled, output / f"reliability-{rule}.png")
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
            ece, auc = known_mean(errors.ece), known_mean(errors.auc)
            lines.append(f"  confidences, {name}: ECE {ece:.2%}  AUC {auc:.3f}")
    return "\n".join(lines)


def _fits(ids: np.ndarray, parts: Parts, model: BlockDrafterModel) -> bool:
    return len(ids) + 2 * model.spec.block < min(parts.limits.context_len, model.spec.backbone.context_len)
