"""Command line: `python -m recipes.population --preset tiny --set rounds=2`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from engine.config import describe, load_config
from engine.errors import InvalidRequest, SparkrollError
from recipes.grpo.__main__ import check_policy, loading, quiet
from recipes.population.config import PRESETS, PopulationConfig


def main(
    preset: Annotated[str, typer.Option(help="Name of a preset.")] = "tiny",
    settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
    show: Annotated[bool, typer.Option(help="Print the configuration and stop.")] = False,
) -> None:
    """Train several LoRA policies at once from one base and one fleet of engines, and fork the best."""
    quiet()
    try:
        config = configuration(preset, list(settings or []))
        if show:
            print("\n".join(describe(config)))
            return
        check_policy(config.model)
        loading()
        # Imported late: help and refusals need neither torch nor Ray.
        from transformers.utils import logging as transformers_logging

        from recipes.population.loop import run

        transformers_logging.disable_progress_bar()
        results = run(config)
    except SparkrollError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(json.dumps(results), flush=True)


def configuration(preset: str, overrides: list[str], output: Path | None = None) -> PopulationConfig:
    """A preset with overrides; raises `InvalidRequest` naming what does not exist."""
    if preset not in PRESETS:
        raise InvalidRequest(field="preset", expected=f"one of {sorted(PRESETS)}", actual=preset)
    extra = [] if output is None else [f"output={json.dumps(str(output))}"]
    return load_config(PopulationConfig, overrides=[*overrides, *extra], base=PRESETS[preset]())


if __name__ == "__main__":
    typer.run(main)
