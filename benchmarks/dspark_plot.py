"""Throughput over concurrency as a picture, from a result of `benchmarks.dspark`.

    python -m benchmarks.dspark_plot benchmarks/results/FILE.json docs/FILE.png

Owns the picture: every side against the best fixed window, one panel a temperature.
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


def draw(result: dict, image: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = curves(result["rows"])
    figure = Figure(figsize=(6 * len(panels), 4))
    FigureCanvasAgg(figure)
    for axes, (title, sides) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        places = sorted({count for values in sides.values() for count in values})
        best = {c: max(v[c] for side, v in sides.items() if side.startswith("fixed") and c in v) for c in places}
        for side, values in sides.items():
            shown = [count for count in places if count in values]
            width = 2.2 if side.startswith("adaptive") else 1.0
            relative = [values[count] / best[count] for count in shown]
            axes.plot(shown, relative, marker="o", markersize=3, linewidth=width, label=side)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_xlabel("requests in flight")
        axes.set_ylabel("throughput / best fixed window")
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(image, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
