"""Runs of GRPO without and with speculation, side by side: what it did to rewards and to the time of rollouts.

    python -m benchmarks.grpo_speculation NONE FROZEN ONLINE --png FILE --json FILE

Owns the comparison of finished runs of `recipes.grpo` that differ in their drafter alone; the first does not
speculate, and each is called by its folder's name. Ignores how they were run. A run's metrics are those of its
`metrics.jsonl`; a token's time is that of generating a whole rollout over the tokens it brought. Rewards coincide where
the curves are no further apart than steps of the first run are from one another: all runs ask the same questions
in the same order, and only rounding tells their policies apart.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np

from benchmarks.report import Row, at_least, at_most, report
from engine.errors import InvalidRequest
from recipes.grpo.report import read_series

EDGE = 3
"""Steps at each end whose mean is a run's beginning and its end."""
FASTER, APART = 1.5, 2.0

Curve = dict[int, float]
Curves = dict[str, Curve]
"""Of one run, by name and train_step."""
REWARD, HELD_OUT, TIME, ENTROPY = "reward", "held-out reward", "rollout, µs a token", "entropy (nats)"
LENGTH, ACCEPTED, DRAFTING = "accept length", "accepted", "drafting"
_PLAIN = {
    REWARD: "critic/rewards/mean",
    HELD_OUT: "val/reward/mean",
    ENTROPY: "rollout/entropy",
    LENGTH: "draft/accept_length",
    ACCEPTED: "draft/accepted",
    DRAFTING: "draft/drafting",
}


def read_run(place: Path) -> Curves:
    """Of a run's folder or its metrics file. Raises `InvalidRequest` where that holds no train_steps."""
    path = place / "metrics.jsonl" if place.is_dir() else place
    if not path.is_file():
        raise InvalidRequest(field=str(place), expected="the output folder of a run", actual="no metrics.jsonl")
    series = read_series(path)
    curves = {name: series.get(logged, {}) for name, logged in _PLAIN.items()}
    tokens, seconds = series.get("rollout/tokens", {}), series.get("timing_s/gen", {})
    curves[TIME] = {step: 1e6 * seconds[step] / count for step, count in tokens.items() if count and step in seconds}
    if not curves[TIME]:
        raise InvalidRequest(field=str(path), expected="rollouts of train_steps", actual=sorted(series))
    versions = series.get("train/policy_version", {})
    # What is logged of a step is the version it published: its rollout was the one before's.
    curves["policy version"] = {step: version - 1 for step, version in versions.items()}
    return curves


def faster(plain: Curves, run: Curves) -> Curve:
    """By train_step: time of a token without speculation over the run's."""
    return {step: plain[TIME][step] / value for step, value in run[TIME].items() if step in plain[TIME]}


def distance(plain: Curve, other: Curve) -> float:
    """Root mean square distance of two curves over that of a curve's steps from their neighbours."""
    steps = sorted(plain.keys() & other.keys())
    if len(steps) < 3:
        return math.nan
    apart = np.array([plain[step] - other[step] for step in steps])
    noise = np.diff([plain[step] for step in steps])
    scale = math.sqrt(np.mean(noise**2))
    return math.sqrt(np.mean(apart**2)) / scale if scale else (0.0 if not apart.any() else math.inf)


def rows_of(runs: dict[str, Curves]) -> list[Row]:
    rows: list[Row] = []
    first, *others = runs
    for name, run in runs.items():
        for label in (REWARD, HELD_OUT, TIME, ENTROPY, LENGTH, DRAFTING):
            if run[label]:
                edge = 1 if label == HELD_OUT else EDGE
                begun, ended = _ends(run[label], edge)
                rows += [Row(name, f"{label}, first steps", begun, ""), Row(name, f"{label}, last steps", ended, "")]
    for name in others:
        begun, ended = _ends(faster(runs[first], runs[name]), EDGE)
        rows.append(Row(name, f"token time, {first} / {name}, first steps", begun, "x"))
        rows.append(at_least(name, f"token time, {first} / {name}, last steps", ended, "x", FASTER))
        apart = distance(runs[first][REWARD], runs[name][REWARD])
        rows.append(at_most(name, f"reward: distance from {first} / step noise", apart, "x", APART))
    return rows


def _ends(curve: Curve, edge: int) -> tuple[float, float]:
    values = [value for _, value in sorted(curve.items())]
    return (float(np.mean(values[:edge])), float(np.mean(values[-edge:]))) if values else (math.nan, math.nan)


def draw(runs: dict[str, Curves], image: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(13, 7))
    FigureCanvasAgg(figure)
    first, *others = runs
    panels = figure.subplots(2, 3)
    rewards, times, ratios, lengths, drafting, entropy = panels.flat
    for place, (name, run) in enumerate(runs.items()):
        color = f"C{place}"
        _line(rewards, run[REWARD], color, name)
        held_out = sorted(run[HELD_OUT].items())
        rewards.plot(*zip(*held_out, strict=True), "s--", markersize=4, color=color, alpha=0.6) if held_out else None
        _line(times, run[TIME], color, name)
        _line(entropy, run[ENTROPY], color, name)
        if name in others:
            _line(ratios, faster(runs[first], run), color, name)
        versions = run["policy version"]
        by_version = {int(versions[step]): value for step, value in run[LENGTH].items() if step in versions}
        _line(lengths, by_version, color, name)
        _line(drafting, run[DRAFTING], color, name)
    ratios.axhline(FASTER, color="grey", linestyle=":", linewidth=1)
    titles = {
        rewards: ("mean reward (squares: held-out questions)", "train_step"),
        times: ("rollout time, µs a token", "train_step"),
        ratios: (f"rollout time a token, {first} / run", "train_step"),
        lengths: ("accept length (tokens a verify step)", "policy version"),
        drafting: ("share of steps that draft", "train_step"),
        entropy: ("entropy of rollouts (nats a token)", "train_step"),
    }
    for axes, (title, horizontal) in titles.items():
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(horizontal, fontsize=8)
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    for axes in (rewards, times, ratios, drafting, entropy):
        axes.set_ylim(bottom=0)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110)


def _line(axes, curve: Curve, color: str, label: str) -> None:
    if curve:
        steps, values = zip(*sorted(curve.items()), strict=True)
        axes.plot(steps, values, marker="o", markersize=3, color=color, label=label)


def compare(places: list[Path], json_path: Path | None = None, image: Path | None = None) -> dict:
    """Print, save and draw; the result with the curves it was made from."""
    runs = {(place if place.is_dir() else place.with_suffix("")).name: read_run(place) for place in places}
    if len(runs) != len(places):
        raise InvalidRequest(field="runs", expected="folders of different names", actual=list(map(str, places)))
    result = report("grpo_speculation", rows_of(runs)) | {"runs": runs}
    if json_path is not None:
        json_path.write_text(json.dumps(result) + "\n")
    if image is not None:
        draw(runs, image)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders, or metrics files; the first is the base")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    compare(args.runs, args.json, args.png)


if __name__ == "__main__":
    main()
