"""Everything that speculation counted, as sums that add up over steps, domains and engines.

Owns the names of the sums, what is divided by what when they are shown, and nothing that grows
(`engine.dspark.record`). A report is a flat table of labelled sums, so that what is exported, read back,
subtracted and added is one and the same thing. Ignores how it is exported or drawn.

Shapes: G drafts, K calibration bins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from engine.dspark.reliability import CALIBRATION_BINS, Reliability, divided
from engine.dspark.stats import DraftStats

Series = tuple[str, Mapping[str, str], float]
"""A sum's name, its labels and its value."""

BY_DOMAIN = {
    "steps": "steps",
    "plain_steps": "plain_steps",
    "proposed": "drafted",
    "verified": "proposed",
    "accepted": "accepted",
    "emitted": "emitted",
    "verify_rows": "verify_rows",
}
"""Names of a domain's (and a policy's) sums, and the fields of `DraftStats` that hold them."""
_HISTOGRAMS = {"accepted_at": "position", "windows": "window", "lengths": "length"}
_BINNED = {"survival_count": "count_GK", "survival_predicted": "predicted_GK", "survival_actual": "labels_GK"}


@dataclass(slots=True)
class DraftReport:
    """Sums by name and labels; names are without prefix or suffix."""

    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    @staticmethod
    def of(series: Iterable[Series]) -> DraftReport:
        """Sums of equal name and labels are added."""
        report = DraftReport()
        for name, labels, value in series:
            key = name, tuple(sorted(labels.items()))
            report.values[key] = report.values.get(key, 0.0) + float(value)
        return report

    def series(self) -> Iterator[Series]:
        for (name, labels), value in self.values.items():
            yield name, dict(labels), value

    def plus(self, other: DraftReport) -> DraftReport:
        return DraftReport.of([*self.series(), *other.series()])

    def since(self, earlier: DraftReport) -> DraftReport:
        """What came after `earlier`, which is an older report of the same engines."""
        return DraftReport.of([*self.series(), *((name, labels, -value) for name, labels, value in earlier.series())])

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name that carry these labels."""
        wanted = set(labels.items())
        return sum(value for (known, own), value in self.values.items() if known == name and wanted <= set(own))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the value of one label."""
        found: dict[str, float] = {}
        wanted = set(labels.items())
        for (known, own), value in self.values.items():
            if known == name and wanted <= set(own):
                place = dict(own).get(label, "")
                found[place] = found.get(place, 0.0) + value
        return found

    def column(self, name: str, label: str, size: int, **labels: str) -> np.ndarray:
        """float64 [size]: the same where the label counts from 0."""
        values = np.zeros(size)
        for place, value in self.by(name, label, **labels).items():
            values[int(place)] += value
        return values

    @property
    def drafts(self) -> int:
        return len(self.by("accepted_at", "position"))

    @property
    def domains(self) -> list[str]:
        return sorted(self.by("steps", "domain"))

    @property
    def adapters(self) -> list[str]:
        return sorted(self.by("steps", "adapter"))

    def bins(self, name: str) -> np.ndarray:
        """float64 [G, K] of a sum over calibration bins."""
        return np.array(
            [self.column(name, "bin", CALIBRATION_BINS, position=str(place)) for place in range(self.drafts)]
        ).reshape(self.drafts, CALIBRATION_BINS)

    def figures(self, **labels: str) -> dict[str, float]:
        """What the sums of a domain (of all where none is named) come to; NaN where nothing was counted.

        `accept_length` is tokens a verify step, `verify_rate` tokens a verified row, `window` drafts
        verified a step, `drafting` the share of rows' steps that drafted."""
        steps, rows = self.total("steps", **labels), self.total("verify_rows", **labels)
        kept = sum(int(window) * count for window, count in self.by("windows", "window", **labels).items())
        return {
            "accept_length": ratio(self.total("emitted", **labels), steps),
            "window": ratio(kept, steps),
            "verify_rate": ratio(self.total("emitted", **labels), rows),
            "accepted": ratio(self.total("accepted", **labels), self.total("verified", **labels)),
            "drafting": ratio(steps, steps + self.total("plain_steps", **labels)),
        }

    def costs(self) -> dict[str, float]:
        """How well step times were predicted, what planning took of them, and bounds of the share of what whole
        windows would have yielded."""
        measured, emitted = self.total("cost_measured_seconds"), self.total("ceiling_emitted")
        return {
            "utilisation_low": ratio(emitted, self.total("ceiling_upper")),
            "utilisation_high": ratio(emitted, self.total("ceiling_lower")),
            "cost_error": ratio(self.total("cost_absolute_error_seconds"), measured),
            "cost_bias": ratio(self.total("cost_predicted_seconds") - measured, measured),
            "planning_share": ratio(self.total("planning_seconds"), measured),
        }

    def calibration(self) -> dict[str, np.ndarray]:
        """float64 [G] by name: predicted and actual survival, ECE, AUC and Brier score of each position."""
        count_GK, predicted_GK, actual_GK = (self.bins(name) for name in _BINNED)
        squared_G, won_G, pairs_G = (
            self.column(name, "position", self.drafts)
            for name in ("survival_squared_error", "survival_pairs_won", "survival_pairs")
        )
        count_G = count_GK.sum(1)
        return {
            "predicted": divided(predicted_GK.sum(1), count_G),
            "actual": divided(actual_GK.sum(1), count_G),
            "ece": divided(np.abs(predicted_GK - actual_GK).sum(1), count_G),
            "auc": divided(won_G, pairs_G),
            "brier": divided(squared_G, count_G),
        }

    def metrics(self) -> dict[str, float]:
        """All of it as flat numbers for a tracker."""
        flat = self.figures() | self.costs()
        for name, values_G in self.calibration().items():
            flat |= {f"{name}_{place}": float(value) for place, value in enumerate(values_G)}
        for domain in self.domains:
            if domain:
                flat |= {f"{name}/{domain}": value for name, value in self.figures(domain=domain).items()}
        for adapter in self.adapters:
            if adapter:
                figures = self.figures(adapter=adapter)
                flat |= {f"{name}/adapter/{adapter}": value for name, value in figures.items()}
        return {f"draft/{name}": value for name, value in flat.items()}


def ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")


def series_of(
    classes: Mapping[tuple[str, str], DraftStats], reliability: Reliability, others: Mapping[str, float]
) -> Iterator[Series]:
    """What a record holds as labelled sums; a class is a domain and the name of a LoRA policy."""
    for (domain, adapter), stats in classes.items():
        labels = {"domain": domain, "adapter": adapter}
        for name, held in BY_DOMAIN.items():
            yield name, labels, getattr(stats, held)
        for name, label in _HISTOGRAMS.items():
            for place, count in enumerate(getattr(stats, name)):
                yield name, {**labels, label: str(place)}, float(count)
    for name, value in others.items():
        yield name, {}, value
    for name, held in _BINNED.items():
        for (place, bin), value in np.ndenumerate(getattr(reliability, held)):
            yield name, {"position": str(place), "bin": str(bin)}, float(value)
    won_G, pairs_G = reliability.pairs()
    columns = {"survival_squared_error": reliability.squared_G, "survival_pairs_won": won_G, "survival_pairs": pairs_G}
    for name, values_G in columns.items():
        for place, value in enumerate(values_G):
            yield name, {"position": str(place)}, float(value)
