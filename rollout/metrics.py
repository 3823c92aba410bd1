"""Prometheus text from counters.

Owns metric names and labels. Ignores what is counted (`engine.metrics`). Numerators and
denominators are exported apart and divided by whoever reads them. A counter's labels include the
engine's incarnation, so that no series ever decreases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import InvalidRequest

PREFIX = "sparkroll"
_PLANNED = f"{PREFIX}_engine_planned_"


@dataclass(slots=True)
class RouterCounters:
    """`groups_moved` groups went on elsewhere after an engine was lost, with `tokens_carried`
    tokens that were not decoded again. `updates_refused` would not have raised the version."""

    groups_moved: int = 0
    tokens_carried: int = 0
    updates_refused: int = 0

    def exposition(self, *, routable: int, parked: int) -> str:
        gauges = {"routable_engines": routable, "parked_samples": parked}
        return exposition("router", dataclasses.asdict(self), gauges, {})


class _Fixed:
    """Families collected as they are."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(
    subsystem: str, counters: Mapping[str, float], gauges: Mapping[str, float], labels: Mapping[str, str]
) -> str:
    """Prometheus text of `sparkroll_<subsystem>_<name>` metrics; counters end in `_total`."""
    families: list[Metric] = []
    for kind, values in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, value in values.items():
            family = kind(f"{PREFIX}_{subsystem}_{name}", name.replace("_", " "), labels=list(labels))
            family.add_metric(list(labels.values()), value)
            families.append(family)
    return written(families)


def plan_exposition(plan: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Gauges of an engine's memory plan (`MemoryPlan.to_dict`): bytes and units by part."""
    families: list[Metric] = []
    for name in ("bytes", "units"):
        family = GaugeMetricFamily(_PLANNED + name, f"Memory plan: {name} of a part.", labels=[*labels, "part", "unit"])
        for share in plan["shares"]:
            family.add_metric([*labels.values(), share["name"], share["unit"]], share[name])
        families.append(family)
    return written(families)


def read_plans(text: str) -> dict[str, dict[str, tuple[float, str, float]]]:
    """By engine and part, the units planned, their name, and bytes. Raises `InvalidRequest` where the text is no
    metrics text or no engine's."""
    plans: dict[str, dict[str, tuple[float, str, float]]] = {}
    try:
        samples = {
            (sample.name, sample.labels["engine"], sample.labels["part"]): sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(_PLANNED)
        }
    except (KeyError, ValueError) as error:
        raise InvalidRequest(field="metrics", expected="Prometheus text", actual=error) from error
    for (name, engine, part), sample in samples.items():
        if name == _PLANNED + "units":
            size = samples[_PLANNED + "bytes", engine, part].value
            plans.setdefault(engine, {})[part] = sample.value, sample.labels["unit"], size
    if not plans:
        raise InvalidRequest(field="metrics", expected="an engine's memory plan", actual="none")
    return plans


def written(families: list[Metric]) -> str:
    """Families as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(_Fixed(families))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


def merge_exposition(texts: Iterable[str]) -> str:
    """Join expositions of several processes; each family's header appears once, before all its
    samples, as the format demands."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for text in texts:
        family: tuple[list[str], list[str]] = ([], [])
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
            if line.startswith("#"):
                if line not in family[0]:
                    family[0].append(line)
            elif line:
                family[1].append(line)
    lines = [line for header, samples in families.values() for line in (*header, *samples)]
    return "\n".join(lines) + "\n"
