"""`sparkroll inspect`: what a service knows of itself, for people.

Owns the tables and the pictures. Ignores where the sums come from (`engine.dspark.report`).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from engine.dspark.report import DraftReport
from engine.errors import InvalidRequest, SparkrollError

app = typer.Typer(no_args_is_help=True, help="Show what a running service has counted.")
_SHARES = {"verify_rate", "accepted", "drafting"}


@app.command()
def dspark(
    url: Annotated[str, typer.Option(help="Address of a running service.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="Key of the service, where it has one.")] = None,
    file: Annotated[Path | None, typer.Option("--metrics", help="A saved metrics text instead of a service.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers instead of tables.")] = False,
) -> None:
    """How speculation does: acceptance by domain and position, calibration, prediction of step times."""
    try:
        report = _report(url, key, file)
        if png is not None:
            draw(report, png)
    except SparkrollError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]{error.code}[/] {error.message}", soft_wrap=True)
        raise typer.Exit(1) from None
    out = Console(highlight=False)
    if as_json:
        values = {name: None if math.isnan(value) else value for name, value in report.metrics().items()}
        out.print_json(json.dumps(values))
        return
    for table in tables(report):
        out.print(table)


@app.command()
def memory(
    url: Annotated[str, typer.Option(help="Address of a running service.")] = "http://127.0.0.1:8000",
    key: Annotated[str | None, typer.Option(help="Key of the service, where it has one.")] = None,
    file: Annotated[Path | None, typer.Option("--metrics", help="A saved metrics text instead of a service.")] = None,
) -> None:
    """How each engine divides its device's memory."""
    from rollout.metrics import read_plans

    try:
        plans = read_plans(_metrics(url, key, file))
    except SparkrollError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]{error.code}[/] {error.message}", soft_wrap=True)
        raise typer.Exit(1) from None
    out = Console(highlight=False)
    for engine, parts in plans.items():
        table = Table(title=f"memory plan of engine {engine}")
        for column in ("part", "units", "MiB"):
            table.add_column(column, justify="left" if column == "part" else "right")
        for part, (units, unit, num_bytes) in parts.items():
            table.add_row(part, f"{units:,.0f} {unit}", f"{num_bytes / 2**20:,.1f}")
        out.print(table)


def tables(report: DraftReport) -> list[Table]:
    return [_domains(report), _positions(report), _histograms(report), _costs(report)]


def draw(report: DraftReport, image: Path) -> None:
    """Accept lengths by domain, survival by position as predicted and as it was, and reliability, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.05, right=0.98, top=0.9, bottom=0.14, wspace=0.22)
    lengths, survival, reliability = figure.subplots(1, 3)
    places = range(report.drafts)
    for domain in report.domains:
        counts = report.column("lengths", "length", report.drafts + 2, domain=domain)
        steps = counts.sum()
        if steps:
            lengths.plot(range(len(counts)), counts / steps, marker="o", markersize=3, label=_named(domain))
    calibration = report.calibration()
    survival.plot(places, calibration["predicted"], marker="o", label="predicted")
    survival.plot(places, calibration["actual"], marker="s", label="actual")
    count_GK, predicted_GK, actual_GK = (report.bins(f"survival_{name}") for name in ("count", "predicted", "actual"))
    reliability.plot((0, 1), (0, 1), color="grey", linewidth=0.8)
    for place in places:
        seen_K = count_GK[place] > 0
        x_K, y_K = predicted_GK[place][seen_K], actual_GK[place][seen_K]
        reliability.plot(
            x_K / count_GK[place][seen_K], y_K / count_GK[place][seen_K], marker=".", label=f"draft {place + 1}"
        )
    for axes, title, x in (
        (lengths, "share of verify steps", "tokens of the step"),
        (survival, "drafts up to a position accepted", "position"),
        (reliability, "observed survival", "predicted survival"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    try:
        image.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(image, dpi=110)
    except (OSError, ValueError) as error:
        raise InvalidRequest(field="png", expected="a file that can be written", actual=error) from error


def _report(url: str, key: str | None, file: Path | None) -> DraftReport:
    from rollout.draft_metrics import read_report

    return read_report(_metrics(url, key, file))


def _metrics(url: str, key: str | None, file: Path | None) -> str:
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(field=str(file), expected="a readable metrics text", actual=error) from error
    from rollout.client import AsyncClient, RetryPolicy

    async def run() -> str:
        async with AsyncClient(url, key=key, timeout_s=10.0, retry=RetryPolicy(attempts=1)) as client:
            return await client.metrics()

    return asyncio.run(run())


def _domains(report: DraftReport) -> Table:
    table = Table(title="speculation by domain")
    table.add_column("domain")
    rows: list[tuple[str, dict[str, str]]] = [("all", {})]
    if len(report.domains) > 1:
        rows += [(_named(domain), {"domain": domain}) for domain in report.domains]
    for place, (name, labels) in enumerate(rows):
        figures = report.figures(**labels)
        if not place:
            for column in ("steps", *figures):
                table.add_column(column.replace("_", " "), justify="right")
        table.add_row(name, f"{report.total('steps', **labels):,.0f}", *_shown(figures))
    return table


def _positions(report: DraftReport) -> Table:
    table = Table(title="drafts by position: predicted and actual survival")
    calibration = report.calibration()
    steps = report.total("steps")
    accepted_G = report.column("accepted_at", "position", report.drafts)
    for column in ("position", "kept", *calibration):
        table.add_column(column, justify="right")
    for place in range(report.drafts):
        cells = [accepted_G[place] / steps if steps else math.nan, *(values[place] for values in calibration.values())]
        table.add_row(str(place + 1), *(_number(value, True) for value in cells))
    return table


def _histograms(report: DraftReport) -> Table:
    table = Table(title="share of verify steps by length of window and of what was emitted")
    table.add_column("domain")
    table.add_column("")
    for size in range(report.drafts + 2):
        table.add_column(str(size), justify="right")
    for domain in report.domains:
        steps = report.total("steps", domain=domain)
        if not steps:
            continue
        for name, label in (("windows", "window"), ("lengths", "length")):
            shares = report.column(name, label, report.drafts + 2, domain=domain) / steps
            table.add_row(_named(domain), label, *(f"{share:.1%}" if share else "" for share in shares))
    return table


def _costs(report: DraftReport) -> Table:
    table = Table(title="step times and ceiling", show_header=False)
    for name, value in report.costs().items():
        table.add_row(name.replace("_", " "), _number(value, True))
    table.add_row("probes", f"{report.total('probes'):,.0f}")
    table.add_row("measured steps", f"{report.total('cost_steps'):,.0f}")
    return table


def _shown(figures: Mapping[str, float]) -> list[str]:
    return [_number(value, name in _SHARES) for name, value in figures.items()]


def _number(value: float, share: bool) -> str:
    return "–" if math.isnan(value) else f"{value:.1%}" if share else f"{value:.3f}"


def _named(domain: str) -> str:
    return domain or "unnamed"
