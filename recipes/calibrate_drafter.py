"""Fit the temperatures of a drafter's confidences anew, and measure the drafter.

Owns the command: `python -m recipes.calibrate_drafter --drafter FOLDER`. After a policy update, for
another sampling temperature or other traffic, a fit takes minutes and changes no weights: `sts-RULE.json`
beside the drafter is replaced, and a reliability diagram drawn. How is `recipes.train_drafter.calibration`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from engine.config import load_config
from engine.errors import InvalidRequest
from recipes.command_line import loading, quiet, refusals
from recipes.train_drafter.config import CalibrateConfig
from rollout.model_catalog import check_model


def main(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter; its temperatures are replaced.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="a.b=value; may be repeated.")] = None,
) -> None:
    """Fit confidence temperatures on held-out full-window rounds and report how the drafter does."""
    quiet()
    with refusals():
        config = load_config(CalibrateConfig, overrides=list(settings or []), base=CalibrateConfig())
        if not (drafter / "config.json").is_file():
            raise InvalidRequest(field="drafter", expected="a drafter's folder, with a config.json", actual=drafter)
        check_model(config.target, field="target")
        loading()
        # Imported late: help and refusals need no torch.
        from recipes.grpo.progress import Display
        from recipes.train_drafter.calibration import calibrate_drafter

        with Display() as display:
            results = calibrate_drafter(drafter, config, display)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    typer.run(main)
