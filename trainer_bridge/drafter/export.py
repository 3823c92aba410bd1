"""Drafters on disk: what a run resumes from, and what an engine serves.

Owns two kinds of folder. A checkpoint (`step-000123/`) holds the trainer's state and whatever the recipe
needs to go on. An export is in the DeepSpec layout: `config.json`, `model.safetensors`, the temperatures of
its confidences by rule of verification (`sts-rejection.json`), and a model card. Both appear whole or not
at all, and neither is written with weights that are not finite.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import drafter_spec_from_config, read_config
from engine.dspark.scaling import StoredScaling, SurvivalScaling, scaling_file
from engine.errors import InternalError, InvalidRequest
from engine.weights.loader import load_weights
from trainer_bridge.checkpoint import numbered, partial_folder, put_in_place
from trainer_bridge.drafter.evaluation import Calibration, DomainReport, EvaluationReport
from trainer_bridge.drafter.trainer import DrafterTrainer


@dataclass(frozen=True, slots=True)
class DrafterCard:
    """What a reader of the model card must know. `notes` are `name: value` lines about training."""

    name: str
    target: str
    target_digest: str
    data: Sequence[str]
    notes: Sequence[str]
    evaluations: Sequence[EvaluationReport] = ()


def published_tensors(model: BlockDrafterModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights by DeepSpec name. Raises `InternalError` naming one that is not finite."""
    params = dict(model.named_parameters())
    tensors = {}
    for name, place in model.weight_map.placements.items():
        value = params[place.param].detach().narrow(0, place.row_start, place.num_rows)
        if not bool(value.isfinite().all()):
            raise InternalError(f"{name} is not finite: nothing is written")
        tensors[name] = value.to("cpu", dtype).reshape(place.shape).contiguous()
    return tensors


def export_drafter(
    folder: Path,
    model: BlockDrafterModel,
    config: dict[str, Any],
    card: DrafterCard,
    dtype: torch.dtype,
    scalings: Sequence[StoredScaling] = (),
) -> Path:
    """Write what `sparkroll serve --drafter` reads. `config` is the drafter's, as it was built from."""
    tensors = published_tensors(model, dtype)
    partial = partial_folder(folder)
    save_file(tensors, partial / "model.safetensors")
    stored = config | {"torch_dtype": str(dtype).removeprefix("torch."), "target_digest": card.target_digest}
    stored.pop("target_dtype", None)  # of the digest that a packed drafter came with
    (partial / "config.json").write_text(json.dumps(stored, indent=1))
    for scaling in scalings:
        SurvivalScaling(model.spec.num_drafts).save(partial / scaling_file(scaling.rule), scaling)
    (partial / "README.md").write_text(model_card(card, config, scalings), encoding="utf-8")
    put_in_place(partial, folder)
    return folder


def load_drafter(folder: Path, dtype: torch.dtype, device: torch.device | str) -> tuple[BlockDrafterModel, dict]:
    """An exported drafter and its configuration. Raises `InvalidRequest` naming file, field or tensor."""
    config = read_config(folder)
    model = BlockDrafterModel(drafter_spec_from_config(config), dtype, device)
    load_weights(model, folder, "drafter")
    return model, config


def require_target(config: dict[str, Any], digest: str) -> None:
    """Refuse a drafter of other weights, where it says which it was made for."""
    made_for = config.get("target_digest")
    if made_for not in (None, digest):
        raise InvalidRequest(field="target_digest", expected=digest, actual=made_for)


def save_checkpoint(root: Path, trainer: DrafterTrainer, run: dict[str, Any], keep: int = 2) -> Path:
    """The trainer's state under its step number; all but the newest `keep` go. One rank's state is every
    rank's: they hold the same."""
    for name, value in trainer.model.named_parameters():
        if not bool(value.isfinite().all()):
            raise InternalError(f"{name} is not finite at step {trainer.train_step}: no checkpoint is written")
    folder = root / f"step-{trainer.train_step:06d}"
    partial = partial_folder(folder)
    torch.save(trainer.state_dict(), partial / "trainer.pt")
    (partial / "run.json").write_text(json.dumps(run, indent=1))
    put_in_place(partial, folder)
    for _, old in sorted(numbered(root))[:-keep]:
        shutil.rmtree(old)
    return folder


def resume_checkpoint(root: Path, trainer: DrafterTrainer) -> dict[str, Any] | None:
    """Bring the newest checkpoint back and return its run; None where there is none."""
    found = sorted(numbered(root))
    if not found:
        return None
    folder = found[-1][1]
    trainer.load_state_dict(torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True))
    return json.loads((folder / "run.json").read_text())


def model_card(card: DrafterCard, config: dict[str, Any], scalings: Sequence[StoredScaling]) -> str:
    """Markdown: what it is, what it was made from, how it does."""
    head = (
        "none (DFlash)" if not config["markov_rank"] else f"{config['markov_head_type']}, rank {config['markov_rank']}"
    )
    lines = [
        f"# {card.name}",
        "",
        f"A block drafter for {card.target}: {config['num_hidden_layers']} layers, block {config['block_size']},",
        f"sequential head: {head}, confidence head: {'yes' if config['enable_confidence_head'] else 'no'}.",
        f"It belongs to the weights with digest `{card.target_digest}`.",
        "",
        "## Data",
        "",
        *(f"- {line}" for line in card.data),
        "",
        "## Training",
        "",
        *(f"- {line}" for line in card.notes),
        "",
    ]
    if scalings:
        lines += ["## Confidence temperatures", ""]
    for scaling in scalings:
        numbers = ", ".join(f"{t:.2f}" for t in scaling.temperatures)
        if scaling.shifts:
            numbers += f"; added to logits over them: {', '.join(f'{shift:+.2f}' for shift in scaling.shifts)}"
        lines += [
            f"Fitted on {scaling.num_samples} full-window rounds ({scaling.dataset}, {scaling.rule} verification, "
            f"T = {scaling.sampling_temperature:g}): {numbers}.",
            f"Expected calibration error of survival on unseen rounds: {100 * scaling.ece_before:.2f} % before, "
            f"{100 * scaling.ece_after:.2f} % after.",
            "",
        ]
    for report in card.evaluations:
        lines += [
            f"## Held-out prompts, T = {report.temperature:g}, {report.rule} verification",
            "",
            *_table(report),
            "",
        ]
    return "\n".join(lines)


def _table(report: EvaluationReport) -> list[str]:
    drafts = len(report.overall.survival)
    lines = [
        "| prompts | steps | accept length | verify rate | repetition | "
        + " | ".join(f"kept > {k}" for k in range(drafts))
        + " |",
        "|" + "---|" * (5 + drafts),
    ]
    for name, one in [*report.domains.items(), ("all", report.overall)]:
        lines.append(_row(name, one))
    for name, calibration in (("raw", report.raw), ("scaled", report.scaled)):
        if calibration is not None:
            lines += ["", _errors(name, calibration)]
    return lines


def _row(name: str, one: DomainReport) -> str:
    repetition = "–" if one.repetition is None else f"{one.repetition:.1%}"
    curve = " | ".join(f"{value:.1%}" for value in one.survival)
    return f"| {name} | {one.steps} | {one.accept_length:.3f} | {one.verify_rate:.1%} | {repetition} | {curve} |"


def _errors(name: str, one: Calibration) -> str:
    parts = [
        f"{label} {', '.join(f'{value:.3f}' for value in values)}"
        for label, values in (("ECE", one.ece), ("AUC", one.auc), ("Brier", one.brier))
    ]
    return f"Confidences, {name}, by position: {'; '.join(parts)}."
