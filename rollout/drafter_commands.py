"""`sparkroll drafter`: a drafter's folder from one form into another.

Owns the commands and what they print. Ignores the forms (`engine.dspark.packing`, `engine.dspark.layouts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine.errors import InvalidRequest, SparkrollError
from rollout.drafter_catalog import find_drafter
from rollout.model_catalog import check_model, resolve_model

app = typer.Typer(no_args_is_help=True, help="Pack, expand or convert a drafter.")
_out = Console(highlight=False)

Out = Annotated[Path, typer.Argument(help="Folder to make.")]


@app.command()
def pack(source: Annotated[Path, typer.Argument(help="Folder of a drafter as training exports it.")], out: Out) -> None:
    """Write a drafter with matrices in 8 bits, to be shipped."""
    with _refusals(out):
        find_drafter(str(source))
        from engine.dspark.packing import pack_drafter

        report = pack_drafter(source, out)
    worst = max(report.errors, key=lambda name: report.errors[name])
    mean = sum(report.errors.values()) / len(report.errors)
    sizes = f"{report.before:,} bytes became {report.after:,} ({report.after / 2**20:.2f} MiB)"
    _say(f"{out}: {sizes}; {len(report.errors)} matrices in 8 bits,")
    _say(f"relative error {mean:.3%} in the mean, {report.errors[worst]:.3%} at most ({worst})")


@app.command()
def expand(source: Annotated[str, typer.Argument(help="A drafter's name, or a packed folder.")], out: Out) -> None:
    """Write a packed drafter in the DeepSpec layout, in bfloat16."""
    with _refusals(out):
        folder = find_drafter(source)
        from engine.dspark.packing import expand_drafter, folder_bytes

        expand_drafter(folder, out)
    _say(f"{out}: {folder_bytes(out):,} bytes in the DeepSpec layout")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a drafter that another library made.")],
    out: Out,
    model: Annotated[str, typer.Option(help="The model it is for: a folder or a name.")],
) -> None:
    """Write a drafter of the speculators or SpecForge layout in the DeepSpec layout."""
    with _refusals(out):
        find_drafter(str(source))
        check_model(model)
        from engine.dspark.layouts import convert_drafter
        from engine.models.spec import read_spec

        spec = convert_drafter(source, out, read_spec(resolve_model(model)))
    _say(f"{out}: {spec.num_drafts} drafts a round, in the DeepSpec layout")


@contextlib.contextmanager
def _refusals(out: Path) -> Iterator[None]:
    """Typed errors become one line and exit code 1; what is there already is not written over."""
    try:
        if out.exists():
            raise InvalidRequest(field="out", expected="a folder that does not exist yet", actual=str(out))
        yield
    except SparkrollError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]{error.code}[/] {error.message}", soft_wrap=True)
        raise typer.Exit(1) from None


def _say(line: str) -> None:
    _out.print(line, markup=False, soft_wrap=True)
