"""What a sweep of `benchmarks.dspark` comes to, as rows with targets.

Owns what is compared with what. Ignores how engines were played.

The ceiling is measured, not estimated: the side "fixed G" with all G drafts of the drafter verifies whole
windows of the same requests. Tokens a step of a request that steps without drafts included, "adaptive" over
"fixed G", are the utilisation; rows a step, likewise, the share of full-window rows. (What an engine says of
its own ceiling is of the blocks it made, which may be shorter than whole, and bounded only.) Classes are
ranked by what whole windows yield too: drafts that were chosen for their confidence say less of a class.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Row, at_least, at_most
from engine.dspark.report import DraftReport, ratio

ALIKE = 0.02
"""Classes whose accept lengths differ by less than this share have no order."""


@dataclass(slots=True)
class Measured:
    """Of one engine at one concurrency and temperature: tokens per second, what was said, what was counted, and the
    time in which a device had nothing to do between rounds over that of rounds, where it runs them by itself."""

    rate: float
    ids: list[list[int]]
    report: DraftReport
    idle: float | None = None


Found = Mapping[tuple[str, int, float], Measured]
"""By side, concurrency and temperature."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least ratios of throughput: over none, at one greedy request over none, over the best fixed window, and
    that at 256 requests."""

    none: float = 0.98
    single: float = 0.98
    fixed: float = 0.98
    fixed_at_256: float = 0.98


def rows_of(found: Found, sides: Sequence[str], bounds: Bounds) -> list[Row]:
    rows: list[Row] = []
    most = max(key[1] for key in found)
    for count, temperature in sorted({key[1:] for key in found}):
        case = f"{count} requests, T = {temperature:g}"
        here = {side: found[side, count, temperature] for side in sides}
        rows += [Row(case, side, one.rate, "tok/s") for side, one in here.items()]
        chosen = here.get("adaptive")
        if chosen is None:
            continue
        fixed = [one.rate for side, one in here.items() if side.startswith("fixed")]
        if "none" in here:
            bound = bounds.single if (count, temperature) == (1, 0) else bounds.none
            rows.append(at_least(case, "adaptive / none", chosen.rate / here["none"].rate, "x", bound))
            # Each was stopped where it stood.
            pairs = zip(chosen.ids, here["none"].ids, strict=True)
            equal = np.mean([all(map(operator.eq, a, b)) for a, b in pairs])
            rows.append(Row(case, "samples equal to none's", float(equal), ""))
        if fixed:
            bound = bounds.fixed_at_256 if count == 256 else bounds.fixed
            rows.append(at_least(case, "adaptive / best fixed", chosen.rate / max(fixed), "x", bound))
        rows += _counted(case, chosen)
        whole = here.get(f"fixed {chosen.report.drafts}")
        if whole is not None:
            rows += _against_whole(case, chosen.report, whole.report, temperature == 1, count == most)
    return rows


def _counted(case: str, measured: Measured) -> list[Row]:
    """Planning goes on while a device runs rounds: what it adds is the time for which the device waits."""
    counted, idle = measured.report, measured.idle
    rows = [Row(case, f"adaptive: {name}", value, "") for name, value in counted.figures().items() if value == value]
    for domain in filter(None, counted.domains):
        rows.append(Row(case, f"adaptive: window, {domain}", _window(counted, domain), "drafts"))
    for name, value in counted.costs().items():
        if value == value and name == "planning_share":
            label = "adaptive: planning / step time"
            rows.append(Row(case, label, value, "") if idle is not None else at_most(case, label, value, "", 0.02))
        elif value == value and not name.startswith("utilisation"):
            rows.append(Row(case, f"adaptive: {name}", value, ""))
    if idle is not None:
        rows.append(at_most(case, "adaptive: device waits / round time", idle, "", 0.02))
    return rows


def _against_whole(case: str, chosen: DraftReport, whole: DraftReport, sampled: bool, highest: bool) -> list[Row]:
    """Targets hold for sampled traffic, those of utilisation at the highest concurrency."""
    (tokens, verified), (most_tokens, most_verified) = _a_step(chosen), _a_step(whole)
    used, share = tokens / most_tokens, verified / most_verified
    judged = sampled and highest
    rows = [
        Row(case, "tokens a step, whole windows", most_tokens, ""),
        Row(case, "adaptive: tokens a step", tokens, ""),
        at_least(case, "utilisation of the ceiling", used, "", 0.88) if judged else Row(case, "utilisation", used, ""),
        at_most(case, "share of full-window rows", share, "", 0.6) if judged else Row(case, "share of rows", share, ""),
        Row(case, "committed / verified rows", tokens / verified, ""),
        Row(case, "committed / verified rows, whole windows", most_tokens / most_verified, ""),
    ]
    domains = [domain for domain in whole.domains if domain and domain in chosen.domains]
    yields = {domain: whole.figures(domain=domain)["accept_length"] for domain in domains}
    rows += [Row(case, f"accept length, whole windows, {domain}", value, "") for domain, value in yields.items()]
    told_apart = [
        (_window(chosen, a) - _window(chosen, b)) * (yields[a] - yields[b]) > 0
        for a, b in itertools.combinations(domains, 2)
        if abs(yields[a] - yields[b]) > ALIKE * min(yields[a], yields[b])
    ]
    if sampled and told_apart:
        ordered = sum(told_apart) / len(told_apart)
        rows.append(at_least(case, "pairs of classes with windows in order", ordered, "", 1.0))
    return rows


def _a_step(counted: DraftReport) -> tuple[float, float]:
    """(tokens, verified rows) of a request's step; one that drafts nothing is a row and a token."""
    plain = counted.total("plain_steps")
    steps = counted.total("steps") + plain
    return ratio(counted.total("emitted") + plain, steps), ratio(counted.total("verify_rows") + plain, steps)


def _window(counted: DraftReport, domain: str) -> float:
    """Drafts verified a step, those without any included."""
    kept = sum(int(window) * count for window, count in counted.by("windows", "window", domain=domain).items())
    return ratio(kept, counted.total("steps", domain=domain) + counted.total("plain_steps", domain=domain))
