"""What speculation counted, as Prometheus text and back.

Owns the metrics' names. Ignores what the sums mean (`engine.dspark.report`). Sums of several engines,
and of an engine's earlier incarnations where a collector kept them, add up when read.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from engine.dspark.report import DraftReport
from engine.errors import InvalidRequest
from rollout.metrics import PREFIX, written

_FAMILY = f"{PREFIX}_engine_draft_"
_OWN = ("engine", "incarnation")


def draft_exposition(report: DraftReport, labels: Mapping[str, str]) -> str:
    """Counters `sparkroll_engine_draft_<name>_total`, each under `labels` and its own."""
    families: dict[str, Metric] = {}
    for name, own, value in report.series():
        family = families.get(name)
        if family is None:
            text = f"Speculation: {name.replace('_', ' ')}."
            family = families[name] = CounterMetricFamily(_FAMILY + name, text, labels=[*labels, *own])
        assert isinstance(family, CounterMetricFamily)
        family.add_metric([*labels.values(), *own.values()], value)
    return written(list(families.values()))


def read_report(text: str) -> DraftReport:
    """The report in a metrics text. Raises `InvalidRequest` where the text is none, or no engine drafts."""
    try:
        report = DraftReport.of(
            (
                family.name.removeprefix(_FAMILY),
                {label: value for label, value in sample.labels.items() if label not in _OWN},
                sample.value,
            )
            for family in text_string_to_metric_families(text)
            if family.name.startswith(_FAMILY)
            for sample in family.samples
            if sample.name.endswith("_total")
        )
    except ValueError as error:
        raise InvalidRequest(field="metrics", expected="Prometheus text", actual=error) from error
    if not report.values:
        expected = "those of a service that drafts (serve --drafter FOLDER or ngram)"
        raise InvalidRequest(field="metrics", expected=expected, actual="no sums of speculation")
    return report
