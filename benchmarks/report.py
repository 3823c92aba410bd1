"""How benchmarks print and save what they measured.

Owns the table, the closing JSON line and the machine's name. Ignores what is measured.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `target` says in words or as a bound what it should be (a number is an upper
    bound), `reached` whether it is; both None where there is nothing to reach."""

    case: str
    metric: str
    value: float
    unit: str
    target: float | str | None = None
    reached: bool | None = None


def at_most(case: str, metric: str, value: float, unit: str, bound: float) -> Row:
    """A row whose value must not exceed `bound`."""
    return Row(case, metric, value, unit, bound, value <= bound)


def at_least(case: str, metric: str, value: float, unit: str, bound: float) -> Row:
    """A row whose value must not fall below `bound`."""
    return Row(case, metric, value, unit, f">= {bound:g}", value >= bound)


def report(name: str, rows: list[Row], json_path: str | Path | None = None) -> dict:
    """Print the table and the JSON line, write the latter to `json_path` too, and return it."""
    width = max([len("case"), *(len(row.case) for row in rows)])
    metric_width = max([len("metric"), *(len(row.metric) for row in rows)])
    print(f"{'case':{width}}  {'metric':{metric_width}}  {'value':>12}  {'unit':8}  {'target':>10}  reached")
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}" if isinstance(row.target, (int, float)) else row.target
        reached = {None: "", True: "yes", False: "NO"}[row.reached]
        value = f"{row.value:,.4g}" if abs(row.value) < 10_000 else f"{row.value:,.0f}"
        print(f"{row.case:{width}}  {row.metric:{metric_width}}  {value:>12}  {row.unit:8}  {target:>10}  {reached}")
    result = {"name": name, "machine": machine(), "commit": commit(), "rows": [asdict(row) for row in rows]}
    line = json.dumps(result)
    print(line)
    if json_path is not None:
        Path(json_path).write_text(line + "\n")
    return result


def machine() -> str:
    """The accelerator's name if there is one, then processor and core count."""
    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cpu = f"{cpu} x{os.cpu_count()}"
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return cpu
    names = [name.strip() for name in names if name.strip()]
    return f"{len(names)}x {names[0]}, {cpu}" if names else cpu


def commit() -> str:
    """The checked-out commit, with "+" if files differ from it; "unknown" outside a repository."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")
