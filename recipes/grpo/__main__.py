"""Command line of the GRPO recipe: `python -m recipes.grpo --preset demo --set steps=20`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from engine.config import describe
from engine.errors import InvalidRequest
from recipes.command_line import check_named, from_preset, loading, quiet, refusals
from recipes.grpo.config import PRESETS, GrpoConfig
from rollout.drafter_catalog import check_drafter

RECIPE = "recipe.json"


Presets = Mapping[str, Callable[[], GrpoConfig]]


def command(presets: Presets, default: str, summary: str) -> Callable[..., None]:
    """The command line of a run that begins with one of `presets`."""

    def main(
        preset: Annotated[str, typer.Option(help="Name of a preset.")] = default,
        settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
        drafter: Annotated[
            str | None, typer.Option(help="A drafter's folder or name, or ngram: rollouts speculate.")
        ] = None,
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
        with refusals():
            if resume is not None:
                preset, overrides = _recipe_of(resume, overrides)
            config = configuration(preset, overrides, resume, max_steps, presets)
            if show:
                print("\n".join(describe(config)))
                return
            check_named(config.model)
            check_drafter(config.rollout.engine.dspark.drafter, field="rollout.engine.dspark.drafter")
            loading()
            # Imported late: help and refusals need neither torch nor Ray.
            from transformers.utils import logging as transformers_logging

            from recipes.grpo.loop import run

            transformers_logging.disable_progress_bar()
            config.output.mkdir(parents=True, exist_ok=True)
            (config.output / RECIPE).write_text(json.dumps({"preset": preset, "set": overrides}))
            results = run(config, resume=resume is not None)
        print(json.dumps(results), flush=True)

    main.__doc__ = f"{summary} Presets: {', '.join(presets)}."
    return main


main = command(PRESETS, "demo", "Train a small policy to answer arithmetic questions with GRPO.")


def configuration(
    preset: str,
    overrides: list[str],
    output: Path | None = None,
    max_steps: int | None = None,
    presets: Presets = PRESETS,
) -> GrpoConfig:
    """A preset with overrides; raises `InvalidRequest` naming what does not exist."""
    extra = [] if output is None else [f"output={json.dumps(str(output))}"]
    extra += [] if max_steps is None else [f"max_steps={max_steps}"]
    return from_preset(GrpoConfig, presets, preset, [*overrides, *extra])


def _recipe_of(folder: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """Preset and overrides a run began with, then the new overrides."""
    try:
        saved = json.loads((folder / RECIPE).read_text())
    except OSError as error:
        raise InvalidRequest(field="resume", expected="the output folder of a run", actual=folder) from error
    return saved["preset"], [*saved["set"], *overrides]


if __name__ == "__main__":
    typer.run(main)
