"""Command line of the GRPO recipe: `python -m recipes.grpo --preset demo --set steps=20`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from engine.config import describe, load_config
from engine.errors import InvalidRequest, SparkrollError
from recipes.grpo.config import PRESETS, ChatModel, GrpoConfig, RandomModel
from rollout.model_catalog import check_model

RECIPE = "recipe.json"


Presets = Mapping[str, Callable[[], GrpoConfig]]


def command(presets: Presets, default: str, summary: str) -> Callable[..., None]:
    """The command line of a run that begins with one of `presets`."""

    def main(
        preset: Annotated[str, typer.Option(help="Name of a preset.")] = default,
        settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
        drafter: Annotated[str | None, typer.Option(help="A drafter's folder, or ngram: rollouts speculate.")] = None,
        online_drafter: Annotated[
            bool, typer.Option("--online-drafter", help="Train the drafter (a new one, unless given) from rollouts.")
        ] = False,
        resume: Annotated[Path | None, typer.Option(help="Output folder of a run to go on with.")] = None,
        max_steps: Annotated[int | None, typer.Option(help="Stop (and save) after this train_step.")] = None,
        show: Annotated[bool, typer.Option(help="Print the configuration and stop.")] = False,
    ) -> None:
        quiet()
        overrides = list(settings or [])
        if drafter is not None:
            overrides.append(f"rollout.engine.dspark.drafter={json.dumps(drafter)}")
        if online_drafter:
            overrides.append("online.enabled=true")
        try:
            if resume is not None:
                preset, overrides = _recipe_of(resume, overrides)
            config = configuration(preset, overrides, resume, max_steps, presets)
            if show:
                print("\n".join(describe(config)))
                return
            check_policy(config.model)
            loading()
            # Imported late: help and refusals need neither torch nor Ray.
            from transformers.utils import logging as transformers_logging

            from recipes.grpo.loop import run

            transformers_logging.disable_progress_bar()
            config.output.mkdir(parents=True, exist_ok=True)
            (config.output / RECIPE).write_text(json.dumps({"preset": preset, "set": overrides}))
            results = run(config, resume=resume is not None)
        except SparkrollError as error:
            print(f"error: {error.message}", file=sys.stderr)
            raise typer.Exit(1) from error
        print(json.dumps(results), flush=True)

    main.__doc__ = f"{summary} Presets: {', '.join(presets)}."
    return main


def quiet() -> None:
    """Standard output is for results; standard error for progress and warnings that matter."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)


def loading() -> None:
    """Said before what takes seconds, and on a first start longer."""
    print("loading torch and transformers", file=sys.stderr, flush=True)


main = command(PRESETS, "demo", "Train a small policy to answer arithmetic questions with GRPO.")


def configuration(
    preset: str,
    overrides: list[str],
    output: Path | None = None,
    max_steps: int | None = None,
    presets: Presets = PRESETS,
) -> GrpoConfig:
    """A preset with overrides; raises `InvalidRequest` naming what does not exist."""
    if preset not in presets:
        raise InvalidRequest(field="preset", expected=f"one of {sorted(presets)}", actual=preset)
    extra = [] if output is None else [f"output={json.dumps(str(output))}"]
    extra += [] if max_steps is None else [f"max_steps={max_steps}"]
    return load_config(GrpoConfig, overrides=[*overrides, *extra], base=presets[preset]())


def check_policy(model: RandomModel | ChatModel, field: str = "model.name") -> None:
    """Refuse a model that is not there before anything that takes time."""
    if isinstance(model, ChatModel):
        check_model(model.name, field=field)


def _recipe_of(folder: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """Preset and overrides a run began with, then the new overrides."""
    try:
        saved = json.loads((folder / RECIPE).read_text())
    except OSError as error:
        raise InvalidRequest(field="resume", expected="the output folder of a run", actual=folder) from error
    return saved["preset"], [*saved["set"], *overrides]


if __name__ == "__main__":
    typer.run(main)
