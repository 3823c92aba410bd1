"""The run: answers, states, training, evaluation, export, each resumable.

Owns the order of the stages and what each leaves in the output folder: `responses.jsonl`,
`held_out.jsonl`, `features/`, `checkpoints/`, `drafter/`, `reliability-*.png`, `metrics.jsonl`. A stage
whose result is there is passed over. Ignores how each is done.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from engine.build import Parts, load_parts
from engine.config import describe
from engine.dspark.block_model import BlockDrafterModel
from engine.dspark.block_spec import check_fits, drafter_spec_from_config
from engine.dspark.scaling import StoredScaling
from engine.errors import InvalidRequest
from engine.models.spec import DTYPES
from recipes.grpo.progress import Display
from recipes.tracking import Tracker, wandb_sinks
from recipes.train_drafter.config import TaughtModel, TrainDrafterConfig
from recipes.train_drafter.data import (
    answer,
    cache_states,
    estimate,
    make_responder,
    open_source,
    preview,
    read_answers,
)
from recipes.train_drafter.judge import Judgement, judge
from recipes.train_drafter.prompts import make_prompts
from recipes.train_drafter.ranks import Clock, Ranks
from recipes.train_drafter.target import Target, find_target
from recipes.train_drafter.training import train
from trainer_bridge.drafter.config import SamplingConfig
from trainer_bridge.drafter.ends import training_ends
from trainer_bridge.drafter.export import DrafterCard, export_drafter, load_drafter
from trainer_bridge.drafter.feature_cache import CacheOrigin
from trainer_bridge.drafter.features import FeatureScorer
from trainer_bridge.drafter.initial import drafter_config, initialise
from trainer_bridge.drafter.responses import Dialogue
from trainer_bridge.drafter.trainer import DrafterTrainer

FREE = ("output", "max_seconds", "checkpoint_every", "tracking.", "features.", "engine.", "evaluation.", "portion")
"""Settings that may differ when a run goes on: they change neither examples nor weights."""


class DrafterRun:
    """The parts of one run."""

    def __init__(self, config: TrainDrafterConfig, display: Display) -> None:
        self.config, self.display = config, display
        self.clock = Clock(config.max_seconds)
        config.output.mkdir(parents=True, exist_ok=True)
        self.ranks = Ranks.join(cpu=config.engine.device == "cpu")
        # The first rank makes what is not there yet, the others find it.
        if not self.ranks.first:
            self.ranks.wait()
        _same_run(config)
        if config.engine.num_threads is not None:
            torch.set_num_threads(config.engine.num_threads)  # teaching a target comes before there is an engine
        self.target = self._find_target()
        if self.ranks.first:
            self.ranks.wait()
        self.parts: Parts = load_parts(self.target.folder, config.engine)
        self.model, self.drafter_config = self._begin_with()
        drafter = self.model.spec
        self.scorer = FeatureScorer(self.parts, drafter.target_layers)
        self.origin = CacheOrigin(
            target_digest=self.scorer.digest(),
            layers=drafter.target_layers,
            hidden=drafter.backbone.hidden,
            dtype=str(self.parts.model.dtype).removeprefix("torch."),
        )
        self.ends = training_ends(self.parts.model)

    def dry_run(self) -> dict[str, Any]:
        """What the run would take; makes nothing but a target that does not exist yet."""
        training, held_out = self._prompts()
        responder = make_responder(self.config, self.target, self.parts)
        found = estimate(responder, self.scorer, self.origin, training)
        params = sum(param.numel() for param in self.model.parameters())
        for line in found.lines():
            self.display.say(line)
        self.display.say(f"drafter       {params:,} parameters, {params * DTYPES[self.config.dtype].itemsize:,} bytes")
        steps, batch = self.config.optim.steps, self.config.batch
        self.display.say(f"training      {steps:,} steps of {batch}: {steps * batch / len(training):.1f} epochs")
        return {
            "conversations": found.conversations,
            "held_out": len(held_out),
            "tokens": found.tokens,
            "cache_gib": round(found.cache_gib, 4),
            "answer_seconds": round(found.answer_seconds, 1),
            "score_seconds": round(found.score_seconds, 1),
            "parameters": params,
        }

    def run(self) -> dict[str, Any]:
        """Results; `finished` is false where time ran out, and starting again goes on."""
        config = self.config
        training, held_out = self._prompts()
        responses, kept_out = config.output / "responses.jsonl", config.output / "held_out.jsonl"
        ready = self._answers(training, responses, "answers") and self._answers(held_out, kept_out, "held out")
        if self.ranks.any(not ready, self.parts.device):
            return self._unfinished("answers")
        examples = read_answers(responses, self.display)
        preview(self.target, examples[0], self.display)
        features = config.output / "features"
        stored = config.features.source != "disk" or not self.ranks.first
        ready = stored or cache_states(config, self.scorer, self.origin, examples, features, self.display, self.clock)
        if self.ranks.any(not ready, self.parts.device):
            return self._unfinished("states")
        source = open_source(config, self.target, self.scorer, self.origin, examples, features, self.display)
        trainer = DrafterTrainer(self.model, self.ends, config.loss, config.optim, config.seed, config.trained)
        tracker = self._tracker()
        try:
            unseen = self.scorer.score(read_answers(kept_out, self.display))
            curve, new_steps = train(config, trainer, source, unseen, self.ranks, self.clock, tracker, self.display)
            if trainer.train_step < config.optim.steps:
                return self._unfinished("training") | {"train_step": trainer.train_step, "curve": curve}
            if not self.ranks.first:
                return {"finished": True}
            if new_steps and self.clock.over:
                return self._unfinished("evaluation")
            self.model.requires_grad_(False)
            judged = judge(
                config.evaluation,
                self.target,
                self.parts,
                self.model,
                held_out,
                config.output,
                config.seed,
                self.display,
            )
            for report in judged.reports:
                tracker.log("evaluation", trainer.train_step, report.metrics())
        finally:
            tracker.close()
            close = getattr(source, "close", None)
            if close is not None:
                close()
            self.ranks.leave()
        folder = self._export(judged, len(examples), sum(e.num_tokens for e in examples))
        return self._results(judged, curve, folder)

    def _prompts(self) -> tuple[list[Dialogue], list[Dialogue]]:
        target = self.config.target
        task = target.task if isinstance(target, TaughtModel) else None
        return make_prompts(self.config.prompts, task, self.config.seed)

    def _answers(self, dialogues: list[Dialogue], path: Path, name: str) -> bool:
        if not self.ranks.first:
            return True
        responder = make_responder(self.config, self.target, self.parts, held_out=name == "held out")
        return answer(self.config, responder, dialogues, path, name, self.display, self.clock)

    def _export(self, judged: Judgement, examples: int, tokens: int) -> Path:
        config = self.config
        # A file by its name: where it lay is nobody's business.
        places = [Path(source) for source in config.prompts.sources]
        names = [place.stem if place.suffix in (".jsonl", ".parquet") else str(place) for place in places]
        card = DrafterCard(
            name=config.output.name,
            target=self.target.name,
            target_digest=self.origin.target_digest,
            data=[
                f"{examples:,} conversations ({', '.join(f'`{name}`' for name in names)}), {tokens:,} tokens",
                "answers as given, written by somebody else"
                if config.prompts.answers == "given"
                else _how_answered(config.sampling),
            ],
            notes=[
                f"{line}" for part in ("loss", "optim", "shape") for line in describe(getattr(config, part), f"{part}.")
            ],
            evaluations=judged.reports,
        )
        folder = config.output / "drafter"
        return export_drafter(folder, self.model, self.drafter_config, card, DTYPES[config.dtype], judged.scalings)

    def _results(self, judged: Judgement, curve: list[tuple[int, float]], folder: Path) -> dict[str, Any]:
        def scaling(one: StoredScaling) -> dict[str, float]:
            return {"ece_before": round(one.ece_before, 5), "ece_after": round(one.ece_after, 5)}

        return {
            "finished": True,
            "drafter": str(folder),
            "accept_length_held_out": [[step, round(value, 4)] for step, value in curve],
            "evaluations": {
                f"{report.rule}-T{report.temperature:g}": {
                    name: {"accept_length": round(one.accept_length, 4), "verify_rate": round(one.verify_rate, 4)}
                    for name, one in [*report.domains.items(), ("all", report.overall)]
                }
                for report in judged.reports
            },
            "calibration": {one.rule: scaling(one) for one in judged.scalings},
            "seconds": round(self.clock.elapsed, 1),
        }

    def _unfinished(self, stage: str) -> dict[str, Any]:
        self.display.say(f"time is up during {stage}: start again with the same output folder to go on")
        return {"finished": False, "stage": stage, "seconds": round(self.clock.elapsed, 1)}

    def _begin_with(self) -> tuple[BlockDrafterModel, dict[str, Any]]:
        """A drafter that knows nothing, or the one to go on with, and its configuration."""
        config, target = self.config, self.parts.model
        dtype = DTYPES[config.dtype]
        if config.start_from is not None:
            model, stored = load_drafter(config.start_from, dtype, self.parts.device)
            check_fits(model.spec, target.spec)
        else:
            stored = drafter_config(config.shape, self.target.folder, target.spec, self.target.mask_id)
            model = BlockDrafterModel(drafter_spec_from_config(stored), dtype, self.parts.device)
            initialise(model, target, config.seed)
        return model, stored | {"detach_confidence": config.loss.detach_confidence}

    def _find_target(self) -> Target:
        phases: list[Any] = []

        def observe(step: int, steps: int, loss: float) -> None:
            if not phases:
                phases.append(self.display.phase("teaching", steps, 0))
                phases[0].plain_every = max(1, steps // 4)
            phases[0].advance(step, f"loss {loss:.3f}")

        return find_target(self.config.target, self.config.output, self.config.seed, observe)

    def _tracker(self) -> Tracker:
        config = self.config
        run_id = hashlib.sha256(str(config.output.resolve()).encode()).hexdigest()[:16]
        sinks = wandb_sinks(config.output, run_id, config.tracking, describe(config), self.display.say)
        return Tracker(
            config.output if self.ranks.first else config.output / f"rank-{self.ranks.rank}", sinks, config.tracking
        )


def _how_answered(sampling: SamplingConfig) -> str:
    cold = f"; {sampling.greedy:.0%} of the conversations greedily" if sampling.greedy else ""
    return (
        f"answers written by the target: temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, "
        f"top-k {sampling.top_k}, at most {sampling.max_new} tokens{cold}"
    )


def _same_run(config: TrainDrafterConfig) -> None:
    """Refuse to go on in a folder that holds another run, naming the setting."""
    path = config.output / "settings.json"
    pairs = dict(line.split(" = ", 1) for line in describe(config))
    now = {key: value for key, value in pairs.items() if not key.startswith(FREE)}
    if path.is_file():
        was = json.loads(path.read_text())
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                raise InvalidRequest(field=key, expected=f"{was.get(key)}, as the run began", actual=now.get(key))
        return
    path.write_text(json.dumps(now, indent=1))
    torch.manual_seed(config.seed)
