"""What a person watching the run sees: a live line per phase, then a table.

Owns the terminal. Everything goes to standard error, so that standard output ends with the one
JSON line of results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

COLUMNS = {
    "step": ("step", "{:.0f}"),
    "reward": ("critic/rewards/mean", "{:.3f}"),
    "groups": ("rollout/groups", "{:.0f}"),
    "tokens/s": ("perf/throughput", "{:,.0f}"),
    "cache hits": ("rollout/prefix_cache_hit_rate", "{:.1%}"),
    "update pause ms": ("rollout/update_pause_ms", "{:.2f}"),
    "|rollout − trainer logp|": ("train/train_rollout_logprob_abs_diff", "{:.1e}"),
}


class Display:
    """A context manager. On a terminal the line is redrawn in place; elsewhere a line is printed now and then."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
        self._live = Live(self._progress, console=self.console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def phase(self, name: str, total: int, done: int = 0) -> Phase:
        return Phase(self, self._progress, name, total, done)


class Phase:
    """One bar. `plain_every` steps a line is printed where there is no terminal."""

    plain_every = 5

    def __init__(self, display: Display, progress: Progress, name: str, total: int, done: int) -> None:
        self._display = display
        self._progress = progress
        self._name = name
        self._total = total
        self._task = progress.add_task(name, total=total, completed=done, note="")

    def advance(self, done: int, note: str) -> None:
        self._progress.update(self._task, completed=done, note=note)
        if not self._display.console.is_terminal and (done % self.plain_every == 0 or done == self._total):
            self._display.say(f"{self._name:<9} {done}/{self._total}  {note}")


def note(values: Mapping[str, float]) -> str:
    """The columns of one step in one line."""
    parts = []
    for label, (name, form) in COLUMNS.items():
        if name in values and label not in ("step", "groups"):
            parts.append(f"{label} {form.format(values[name])}")
    return "  ".join(parts)


def steps_table(history: Sequence[Mapping[str, float]], rows: int = 12) -> Table:
    """At most `rows` evenly spaced steps, the first and the last among them."""
    table = Table(title="GRPO, step by step")
    for label in COLUMNS:
        table.add_column(label, justify="right")
    last = len(history) - 1
    chosen = sorted({round(place * last / max(1, rows - 1)) for place in range(rows)}) if history else []
    for place in chosen:
        values = history[place]
        table.add_row(*(form.format(values[name]) if name in values else "–" for name, form in COLUMNS.values()))
    return table


def summary_table(results: Mapping[str, object]) -> Table:
    """One result a row. Lists, tables of tables and what was not made are for the JSON line alone."""
    table = Table(title="result", show_header=False)
    for name, value in results.items():
        if isinstance(value, Mapping):
            if not any(isinstance(inner, Mapping) for inner in value.values()):
                table.add_row(name, "\n".join(f"{key}: {inner}" for key, inner in value.items()))
        elif value is not None and not isinstance(value, list):
            table.add_row(name, str(value))
    return table
