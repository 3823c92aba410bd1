"""Throughput over concurrency as a picture, from results of `benchmarks.dspark`.

    python -m benchmarks.dspark_plot benchmarks/results/FILE.json [MORE.json ...] docs/FILE.png

Owns the picture: every side against the best fixed window and against none, a column a temperature. Parts of
one sweep go together; a concurrency at which not every fixed window was measured has no best one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def curves(rows: list[dict]) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per second by temperature ("" where there is none), side and concurrency."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        case = re.search(r"(\d+) requests(?:, (T = \S+))?", row["case"])
        if case is not None and row["unit"] == "tok/s":
            sides = found.setdefault(case[2] or "", {})
            sides.setdefault(row["metric"], {})[int(case[1])] = row["value"]
    return found


def bases(sides: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """What sides are measured by, by name and concurrency."""
    fixed = [values for side, values in sides.items() if side.startswith("fixed")]
    places = set.intersection(*map(set, fixed)) if fixed else set()
    found = {"best fixed window": {place: max(values[place] for values in fixed) for place in sorted(places)}}
    return {name: base for name, base in (found | {"none": sides.get("none", {})}).items() if base}


def draw(results: list[dict], image: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = curves([row for result in results for row in result["rows"]])
    names = list(dict.fromkeys(name for sides in panels.values() for name in bases(sides)))
    figure = Figure(figsize=(6 * len(panels), 3.6 * len(names)))
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(names), len(panels), squeeze=False, sharey="row")
    for column, (title, sides) in enumerate(panels.items()):
        for row, name in enumerate(names):
            _panel(grid[row][column], sides, bases(sides).get(name, {}), name)
        grid[0][column].set_title(title, fontsize=10)
    grid[0][0].legend(fontsize=8)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110)


def _panel(axes, sides: dict[str, dict[int, float]], base: dict[int, float], name: str) -> None:
    for place, (side, values) in enumerate(sides.items()):
        shown = [count for count in sorted(base) if count in values]
        width = 2.2 if side.startswith("adaptive") else 1.0
        relative = [values[count] / base[count] for count in shown]
        axes.plot(shown, relative, marker="o", markersize=3, linewidth=width, label=side, color=f"C{place}")
    axes.axhline(1.0, color="grey", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(base), [str(place) for place in base])
    axes.minorticks_off()
    axes.set_xlabel("requests in flight", fontsize=8)
    axes.set_ylabel(f"throughput / {name}", fontsize=8)
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    *given, picture = map(Path, sys.argv[1:])
    draw([json.loads(path.read_text()) for path in given], picture)
