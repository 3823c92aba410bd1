"""Temperatures for a drafter's confidences, and a picture of what they do.

Owns the fit on held-out full-window rounds, its check on rounds the fit has not seen, and the reliability
diagram. The fit itself is `engine.dspark.scaling`'s. Ignores how rounds are played.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.dspark.reliability import Reliability
from engine.dspark.scaling import Rule, ScalingFit, StoredScaling, SurvivalScaling, fit_scaling
from engine.errors import InvalidRequest
from trainer_bridge.drafter.evaluation import reliability_of
from trainer_bridge.drafter.rounds import RoundLog


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """`raw` and `scaled` are sums over rounds that the fit has not seen."""

    fit: ScalingFit
    scaling: SurvivalScaling
    raw: Reliability
    scaled: Reliability

    def stored(self, dataset: str, rule: Rule, sampling_temperature: float, policy_version: int = 0) -> StoredScaling:
        """What is kept beside the drafter; its errors are those of the unseen rounds."""
        return StoredScaling(
            temperatures=self.fit.temperatures,
            shifts=self.fit.shifts,
            dataset=dataset,
            num_samples=self.fit.num_samples,
            ece_before=float(np.nanmean(self.raw.calibration_error())),
            ece_after=float(np.nanmean(self.scaled.calibration_error())),
            policy_version=policy_version,
            rule=rule,
            sampling_temperature=sampling_temperature,
        )


def calibrate(fitted: RoundLog, unseen: RoundLog) -> CalibrationResult:
    """Fit on one set of rounds, judge on another. Raises `InvalidRequest` where there is nothing to fit."""
    for name, log in (("fitted", fitted), ("unseen", unseen)):
        if not log.logits:
            raise InvalidRequest(field=name, expected="rounds with confidences", actual=f"{len(log.chances)} rounds")
    fit = fit_scaling(fitted.confidences(), fitted.labels())
    scaling = SurvivalScaling(fitted.drafts)
    scaling.assign(fit.temperatures, fit.shifts)
    return CalibrationResult(fit, scaling, reliability_of(unseen, None), reliability_of(unseen, scaling))


def draw_reliability(raw: Reliability, scaled: Reliability, image: Path) -> None:
    """Predicted against observed survival by draft position, before and after scaling, as PNG. The size of a
    point is its bin's share of the position's rounds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, raw.drafts)
    rows = -(-raw.drafts // columns)
    figure = Figure(figsize=(3.1 * columns, 3.1 * rows))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.9, bottom=0.12, hspace=0.35, wspace=0.25)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for place, axes in enumerate(panels):
        if place >= raw.drafts:
            axes.set_visible(False)
            continue
        axes.plot((0, 1), (0, 1), color="grey", linewidth=0.8)
        for sums, label, colour in ((raw, "raw", "tab:orange"), (scaled, "scaled", "tab:blue")):
            count_K = sums.count_GK[place]
            seen_K = count_K > 0
            error = sums.calibration_error()[place]
            axes.scatter(
                sums.predicted_GK[place][seen_K] / count_K[seen_K],
                sums.labels_GK[place][seen_K] / count_K[seen_K],
                s=10 + 150 * count_K[seen_K] / max(1.0, count_K.sum()),
                alpha=0.7,
                color=colour,
                label=f"{label}: ECE {100 * error:.1f} %",
            )
        axes.set_title(f"draft {place + 1}", fontsize=9)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
        axes.legend(fontsize=6, loc="upper left")
        axes.set_xlabel("predicted survival", fontsize=7)
        axes.set_ylabel("observed", fontsize=7)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=110)
