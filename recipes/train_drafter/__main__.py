"""Command line of the recipe: `python -m recipes.train_drafter --preset tiny`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from engine.config import describe
from recipes.command_line import check_named, from_preset, loading, quiet, refusals
from recipes.train_drafter.config import PRESETS, TrainDrafterConfig


def main(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "tiny",
    settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="End at the next safe point after so long.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print tokens, bytes and time, and stop.")] = False,
    show: Annotated[bool, typer.Option(help="Print the configuration and stop.")] = False,
) -> None:
    """Train a block drafter; started again with the same output folder it goes on where it was."""
    quiet()
    with refusals():
        config = configuration(preset, list(settings or []), max_seconds)
        if show:
            print("\n".join(describe(config)))
            return
        check_named(config.target, "target.name")
        loading()
        # Imported late: help and refusals need no torch.
        from transformers.utils import logging as transformers_logging

        from recipes.grpo.progress import Display
        from recipes.train_drafter.run import DrafterRun

        transformers_logging.disable_progress_bar()
        with Display() as display:
            run = DrafterRun(config, display)
            results = run.dry_run() if dry_run else run.run()
    print(json.dumps(results), flush=True)


def configuration(preset: str, overrides: list[str], max_seconds: float | None = None) -> TrainDrafterConfig:
    """A preset with overrides; raises `InvalidRequest` naming what does not exist."""
    extra = [] if max_seconds is None else [f"max_seconds={float(max_seconds)}"]
    return from_preset(TrainDrafterConfig, PRESETS, preset, [*overrides, *extra])


if __name__ == "__main__":
    typer.run(main)
