"""Command line: `python -m recipes.population --preset tiny --set rounds=2`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engine.config import describe
from recipes.command_line import check_named, from_preset, loading, quiet, refusals
from recipes.population.config import PRESETS, PopulationConfig


def main(
    preset: Annotated[str, typer.Option(help="Name of a preset.")] = "tiny",
    settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
    show: Annotated[bool, typer.Option(help="Print the configuration and stop.")] = False,
) -> None:
    """Train several LoRA policies at once from one base and one fleet of engines, and fork the best."""
    quiet()
    with refusals():
        config = configuration(preset, list(settings or []))
        if show:
            print("\n".join(describe(config)))
            return
        check_named(config.model)
        loading()
        # Imported late: help and refusals need neither torch nor Ray.
        from transformers.utils import logging as transformers_logging

        from recipes.population.loop import run

        transformers_logging.disable_progress_bar()
        results = run(config)
    print(json.dumps(results), flush=True)


def configuration(preset: str, overrides: list[str], output: Path | None = None) -> PopulationConfig:
    """A preset with overrides; raises `InvalidRequest` naming what does not exist."""
    extra = [] if output is None else [f"output={json.dumps(str(output))}"]
    return from_preset(PopulationConfig, PRESETS, preset, [*overrides, *extra])


if __name__ == "__main__":
    typer.run(main)
