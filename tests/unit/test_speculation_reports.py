"""What sweeps and runs with speculation come to: compared with what, and against which target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import dspark_plot, grpo_speculation
from benchmarks.dspark_rows import Bounds, Measured, rows_of
from engine.dspark.report import DraftReport
from engine.errors import InvalidRequest


def counted(domains: dict[str, tuple[int, int, int, list[int]]]) -> DraftReport:
    """By domain: steps that draft, plain ones, tokens of the former, and how many drafts each of them verified."""
    series = []
    for domain, (steps, plain, emitted, windows) in domains.items():
        labels = {"domain": domain, "adapter": ""}
        sums = {"steps": steps, "plain_steps": plain, "emitted": emitted, "verify_rows": steps + sum(windows)}
        series += [(name, labels, value) for name, value in sums.items()]
        series += [("windows", {**labels, "window": str(window)}, 1.0) for window in windows]
        series += [("accepted_at", {**labels, "position": str(place)}, 0.0) for place in range(3)]
    return DraftReport.of(series)


def test_a_sweep_is_judged_by_whole_windows_and_the_best_fixed_one() -> None:
    whole = counted({"math": (10, 0, 30, [3] * 10), "poetry": (10, 0, 15, [3] * 10)})
    chosen = counted({"math": (9, 2, 25, [2] * 9), "poetry": (6, 9, 8, [3] * 6)})
    rates = {"none": 100.0, "fixed 1": 110.0, "fixed 3": 120.0, "adaptive": 118.0}
    reports = {"fixed 3": whole, "adaptive": chosen}
    found = {
        (side, count, temperature): Measured(rate, [[1]], reports.get(side, DraftReport()))
        for side, rate in rates.items()
        for count in (1, 256)
        for temperature in (0.0, 1.0)
    }
    rows = {(row.case, row.metric): row for row in rows_of(found, list(rates), Bounds(single=1.8, fixed_at_256=1.06))}
    last = "256 requests, T = 1"
    # 44 tokens in 26 steps that verify 62 rows; whole windows take 20 steps and 80 rows to 45 tokens.
    assert rows[last, "utilisation of the ceiling"].value == pytest.approx((44 / 26) / (45 / 20))
    assert rows[last, "utilisation of the ceiling"].reached is False
    assert rows[last, "share of full-window rows"].value == pytest.approx((62 / 26) / 4)
    assert rows[last, "share of full-window rows"].reached is True
    assert rows[last, "committed / verified rows"].value == pytest.approx(44 / 62)
    assert rows[last, "adaptive: window, poetry"].value == pytest.approx(18 / 15)
    assert rows[last, "pairs of classes with windows in order"].reached is True
    assert rows[last, "adaptive / best fixed"].reached is False
    assert rows["1 requests, T = 1", "adaptive / best fixed"].reached is True
    assert rows["1 requests, T = 0", "adaptive / none"].target == ">= 1.8"
    assert rows["1 requests, T = 1", "utilisation"].target is None
    assert ("256 requests, T = 0", "pairs of classes with windows in order") not in rows


def test_parts_of_a_sweep_share_a_best_fixed_window_where_all_were_measured() -> None:
    sides = {"none": {1: 1.0, 8: 5.0}, "fixed 1": {1: 2.0, 8: 9.0}, "fixed 3": {1: 3.0}}
    assert dspark_plot.bases(sides) == {"best fixed window": {1: 3.0}, "none": {1: 1.0, 8: 5.0}}
    assert dspark_plot.bases({"adaptive": {1: 1.0}}) == {}


def save_run(folder: Path, times: list[float], rewards: list[float], lengths: list[float] | None = None) -> Path:
    folder.mkdir()
    lines = []
    for step, (seconds, reward) in enumerate(zip(times, rewards, strict=True), 1):
        values = {"critic/rewards/mean": reward, "timing_s/gen": seconds, "rollout/tokens": 1000.0}
        values |= {"train/policy_version": float(step), "rollout/entropy": 1.0 / step}
        if lengths:
            values |= {"draft/accept_length": lengths[step - 1], "draft/drafting": 1.0}
        lines.append(json.dumps({"axis": "train_step", "step": step, "time": 0.0, "values": values}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def three_runs(root: Path) -> list[Path]:
    rewards = [0.1, 0.3, 0.4, 0.6, 0.8]
    return [
        save_run(root / "none", [0.02] * 5, rewards),
        save_run(root / "frozen", [0.02, 0.018, 0.016, 0.016, 0.016], rewards, [2.0, 2.1, 2.2, 2.2, 2.2]),
        save_run(
            root / "online", [0.02, 0.015, 0.01, 0.01, 0.01], [0.1, 0.3, 0.4, 0.7, 0.1], [2.0, 3.0, 4.0, 4.0, 5.0]
        ),
    ]


def test_runs_are_compared_step_by_step(tmp_path: Path) -> None:
    places = three_runs(tmp_path)
    result = grpo_speculation.compare(places, tmp_path / "result.json")
    rows = {(row["case"], row["metric"]): row for row in result["rows"]}
    assert rows["none", "rollout, µs a token, last steps"]["value"] == pytest.approx(20.0)
    frozen, online = (rows[name, f"token time, none / {name}, last steps"] for name in ("frozen", "online"))
    assert (frozen["value"], frozen["reached"]) == (pytest.approx(1.25), False)
    assert (online["value"], online["reached"]) == (pytest.approx(2.0), True)
    distances = [rows[name, "reward: distance from none / step noise"] for name in ("frozen", "online")]
    assert distances[0]["value"] == 0 and distances[0]["reached"] and distances[1]["value"] > 1.0
    assert rows["online", "accept length, last steps"]["value"] == pytest.approx(13 / 3)
    assert json.loads((tmp_path / "result.json").read_text())["runs"]["online"]["policy version"]["5"] == 4
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="no metrics"):
        grpo_speculation.compare([places[0], tmp_path / "empty"])
    with pytest.raises(InvalidRequest, match="different names"):
        grpo_speculation.compare([places[0], places[0]])


@pytest.mark.slow
def test_both_are_drawn(tmp_path: Path) -> None:
    places = three_runs(tmp_path)
    grpo_speculation.compare(places, image=tmp_path / "runs.png")
    rows = [
        {"case": f"{count} requests, T = {temperature}", "metric": side, "value": count * 2.0, "unit": "tok/s"}
        for count in (1, 8)
        for temperature in (0, 1)
        for side in ("none", "fixed 1", "adaptive")
    ]
    dspark_plot.draw([{"rows": rows[:6]}, {"rows": rows[6:]}], tmp_path / "sweep.png")
    assert all((tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG" for name in ("runs", "sweep"))
