"""The curves of a run, from its own metrics file."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

CURVES = {
    "mean reward": ("critic/rewards/mean", "val/reward/mean"),
    "|rollout − trainer log-probability|": ("train/train_rollout_logprob_abs_diff",),
    "generated tokens per second": ("perf/throughput",),
    "prefix-cache hit share": ("rollout/prefix_cache_hit_rate",),
    "update pause (ms)": ("rollout/update_pause_ms",),
    "answer length (tokens)": ("response_length/mean",),
}


def read_series(metrics: Path) -> dict[str, dict[int, float]]:
    """Value by step of every metric; where a step was repeated after a resume, the later one."""
    series: dict[str, dict[int, float]] = defaultdict(dict)
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        for name, value in record["values"].items():
            if value is not None:
                series[name][record["step"]] = value
    return series


def draw_curves(metrics: Path, image: Path) -> None:
    """One panel per curve, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = read_series(metrics)
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(figure.subplots(2, 3).flat, CURVES.items(), strict=True):
        for name in names:
            points = sorted(series.get(name, {}).items())
            marker = "o" if len(points) < 5 else None
            axes.plot([step for step, _ in points], [value for _, value in points], label=name, marker=marker)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("train_step", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110)
