"""The figures and curves of a run, from its steps and its own metrics file."""

from __future__ import annotations

import importlib.util
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CURVES = {
    "mean reward": ("critic/rewards/mean", "val/reward/mean"),
    "|rollout − trainer log-probability|": ("train/train_rollout_logprob_abs_diff",),
    "generated tokens per second": ("perf/throughput",),
    "prefix-cache hit share": ("rollout/prefix_cache_hit_rate",),
    "update pause (ms)": ("rollout/update_pause_ms",),
    "answer length (tokens)": ("response_length/mean",),
}
DRAFT_CURVES = {
    "tokens a verify step": ("draft/accept_length", "draft/window"),
    "drafts accepted, steps that draft (shares)": ("draft/accepted", "draft/drafting"),
    "drafter version": ("drafter/version",),
}
"""Of runs that speculate."""


def run_results(
    history: Sequence[Mapping[str, float]], output: Path, metrics: Path, curves: bool = True
) -> dict[str, Any]:
    """What a run's steps come to, with its folders. `reward_curve` is [step, held-out reward];
    `curves` is null where none are wanted or matplotlib is not installed."""
    rewards = read_series(metrics).get("val/reward/mean", {})
    image = output / "curves.png"
    drawn = curves and importlib.util.find_spec("matplotlib") is not None
    if drawn:
        draw_curves(metrics, image)
    return {
        **step_means(history),
        "reward_curve": [[step, round(reward, 4)] for step, reward in sorted(rewards.items())],
        "policy": str(output / "policy"),
        "curves": str(image) if drawn else None,
    }


def step_means(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Over one process's steps: rates as sums over sums, the rest as plain means."""
    if not history:
        return {}

    def total(name: str) -> float:
        return sum(values.get(name, 0.0) for values in history)

    def mean(name: str) -> float:
        counted = [values[name] for values in history if name in values]
        return sum(counted) / len(counted) if counted else float("nan")

    return {
        "groups": int(total("rollout/groups")),
        "tokens_per_second": round(total("rollout/tokens") / total("timing_s/gen"), 1),
        "cache_hit_share": round(mean("rollout/prefix_cache_hit_rate"), 4),
        "update_pause_ms": round(mean("rollout/update_pause_ms"), 3),
        "logprob_abs_diff": round(mean("train/train_rollout_logprob_abs_diff"), 9),
        "released_gib": round(mean("memory/released_gib"), 3),
        "step_seconds": round(mean("timing_s/step"), 3),
        "rollout_seconds": round(mean("timing_s/gen"), 3),
        "reward_seconds": round(mean("timing_s/reward"), 3),
        **_drafts(history),
        "train_seconds": round(mean("timing_s/update_actor"), 3),
        "publish_seconds": round(mean("timing_s/param_sync"), 3),
        "hand_over_seconds": round(mean("timing_s/to_trainer") + mean("timing_s/to_engine"), 3),
    }


def _drafts(history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Of runs that speculate: [train_step, policy version, accept length, milliseconds of generation a token]."""
    rows = [
        [
            int(values["step"]),
            int(values["train/policy_version"]) - 1,
            round(values["draft/accept_length"], 3),
            round(1e3 * values["timing_s/gen"] / values["rollout/tokens"], 4),
        ]
        for values in history
        if "draft/accept_length" in values and values.get("rollout/tokens")
    ]
    return {"accept_lengths": rows} if rows else {}


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
    curves = CURVES | (DRAFT_CURVES if "draft/accept_length" in series else {})
    rows = -(-len(curves) // 3)
    figure = Figure(figsize=(12, 3.25 * rows))
    FigureCanvasAgg(figure)
    # Fixed margins: a layout engine draws everything twice.
    figure.subplots_adjust(left=0.05, right=0.98, top=0.95, bottom=0.08, hspace=0.35, wspace=0.2)
    for axes, (title, names) in zip(figure.subplots(rows, 3).flat, curves.items(), strict=True):
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
