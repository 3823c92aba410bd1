"""Fit the temperatures of a drafter's confidences anew and measure it, or hold it against another one.

Owns the command: `python -m recipes.calibrate_drafter --drafter DRAFTER [--against OTHER]`. After a policy update, for
another sampling temperature or other traffic, a fit takes minutes and changes no weights: `sts-RULE.json` beside the
drafter is replaced, and a reliability diagram drawn. With `--against` nothing is fitted or written: accept lengths of
both on the same prompts are printed by domain. How is `recipes.train_drafter.calibration`.
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
from rollout.drafter_catalog import find_drafter, is_packed, resolve_drafter
from rollout.model_catalog import check_model


def main(
    drafter: Annotated[str, typer.Option(help="A drafter's folder, whose temperatures are replaced, or name.")],
    against: Annotated[str | None, typer.Option(help="Only compare accept lengths with this one's.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where temperatures go instead; a packed drafter needs one.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="a.b=value; may be repeated. target=MODEL: what the drafter was made for."),
    ] = None,
) -> None:
    """Fit confidence temperatures on held-out full-window rounds and report how the drafter does."""
    quiet()
    with refusals():
        config = load_config(CalibrateConfig, overrides=list(settings or []), base=CalibrateConfig())
        found = find_drafter(drafter)
        if against is not None:
            find_drafter(against, field="against")
        elif output is None and is_packed(found):
            expected = f"a folder for temperatures: {drafter} is packed"
            raise InvalidRequest(field="output", expected=expected, actual=None)
        check_model(config.target, field="target")
        loading()
        # Imported late: help and refusals need no torch.
        from recipes.grpo.progress import Display
        from recipes.train_drafter.calibration import calibrate_drafter, compare_drafters

        folder = Path(resolve_drafter(drafter))
        with Display() as display:
            if against is None:
                results = calibrate_drafter(folder, config, display, output)
            else:
                others = {drafter: folder, against: Path(resolve_drafter(against))}
                results = compare_drafters(others, config, display)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    typer.run(main)
