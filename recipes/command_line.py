"""What command lines of recipes have in common.

Owns how a preset becomes a configuration, what is said before and instead of a run. Standard output is for results;
standard error for progress, warnings that matter and refusals. Ignores what is run.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import typer

from engine.config import load_config
from engine.errors import InvalidRequest, SparkrollError
from recipes.grpo.config import ChatModel
from rollout.model_catalog import check_model

C = TypeVar("C")


def from_preset(kind: type[C], presets: Mapping[str, Callable[[], C]], name: str, overrides: list[str]) -> C:
    """A preset with overrides; raises `InvalidRequest` naming what does not exist."""
    if name not in presets:
        raise InvalidRequest(field="preset", expected=f"one of {sorted(presets)}", actual=name)
    return load_config(kind, overrides=overrides, base=presets[name]())


def check_named(model: object, field: str = "model.name") -> None:
    """Refuse a model that is not there before anything that takes time; one that a recipe makes is there."""
    if isinstance(model, ChatModel):
        check_model(model.name, field=field)


def quiet() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)


def loading() -> None:
    """Said before what takes seconds, and on a first start longer."""
    print("loading torch and transformers", file=sys.stderr, flush=True)


@contextmanager
def refusals() -> Iterator[None]:
    """Typed errors become one line and an exit status of 1."""
    try:
        yield
    except SparkrollError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(1) from error
