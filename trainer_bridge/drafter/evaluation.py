"""How good a drafter is.

Owns the figures and their definitions, from whatever counted them: full-window rounds played here, the
statistics of an engine that speculates, or acceptance under teacher forcing. Ignores how they are shown.

`accept_length` counts the bonus, `accepted` does not. Curves are by draft position: `survival[k]` is the
share of steps that kept more than k drafts, `conditional[k]` the same among steps that kept k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch

from engine.dspark.reliability import Reliability
from engine.dspark.scaling import SurvivalScaling
from engine.dspark.stats import DraftStats
from trainer_bridge.drafter.rounds import RoundLog


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How well predicted survival matches what happened, by draft position; NaN where nothing was observed."""

    ece: list[float]
    auc: list[float]
    brier: list[float]


class DomainReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`verify_rate` is tokens kept per verified row. `repetition` is the share of 4-grams that an answer had
    said before: looping answers are easy to draft, and say so here."""

    steps: int
    tokens: int
    accept_length: float
    accepted: float
    verify_rate: float
    survival: list[float]
    conditional: list[float]
    repetition: float | None = None


class EvaluationReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`overall` is over all steps of all domains."""

    rule: str
    temperature: float
    overall: DomainReport
    domains: dict[str, DomainReport]
    raw: Calibration | None = None
    scaled: Calibration | None = None

    def metrics(self) -> dict[str, float]:
        """For a tracker."""
        values = {"eval/accept_length": self.overall.accept_length, "eval/verify_rate": self.overall.verify_rate}
        values |= {f"eval/accept_length/{name}": one.accept_length for name, one in self.domains.items()}
        for name, one in (("raw", self.raw), ("scaled", self.scaled)):
            if one is not None:
                values[f"eval/ece_{name}"] = known_mean(one.ece)
                values[f"eval/auc_{name}"] = known_mean(one.auc)
        return values


def report_of_statistics(
    stats: Mapping[str, DraftStats],
    *,
    rule: str,
    temperature: float,
    texts: Mapping[str, Sequence[np.ndarray]] | None = None,
    raw: Reliability | None = None,
    scaled: Reliability | None = None,
) -> EvaluationReport:
    """From counters by domain, wherever they were counted; `raw` and `scaled` are the sums of predictions
    before and after temperature scaling."""
    said = texts or {}
    total = DraftStats(max(one.max_drafts for one in stats.values()))
    for one in stats.values():
        total.add(one)
    return EvaluationReport(
        rule=rule,
        temperature=temperature,
        overall=_domain(total, [text for group in said.values() for text in group]),
        domains={name: _domain(one, said.get(name, ())) for name, one in sorted(stats.items())},
        raw=None if raw is None else _calibration(raw),
        scaled=None if scaled is None else _calibration(scaled),
    )


def report_of_rounds(
    log: RoundLog, *, rule: str, temperature: float, scaling: SurvivalScaling | None = None
) -> EvaluationReport:
    """From full-window rounds; confidences are judged with `scaling` too where it is given."""
    raw = None if not log.logits else reliability_of(log, None)
    scaled = None if scaling is None or not log.logits else reliability_of(log, scaling)
    return report_of_statistics(log.stats, rule=rule, temperature=temperature, texts=log.texts, raw=raw, scaled=scaled)


def reliability_of(log: RoundLog, scaling: SurvivalScaling | None) -> Reliability:
    """Predicted survival against its labels; raw confidences where no scaling is given."""
    scaling = SurvivalScaling(log.drafts) if scaling is None else scaling
    result = Reliability(log.drafts)
    logits_NG = torch.from_numpy(log.confidences()).float().to(scaling.scales_2G.device)
    result.observe(scaling.survival(logits_NG).double().cpu().numpy(), log.labels())
    return result


def known_mean(values: Sequence[float]) -> float:
    """Mean over the positions where something was observed; NaN where nothing was."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else float("nan")


def repetition_rate(texts: Sequence[np.ndarray], n: int = 4) -> float | None:
    """Share of n-grams that occurred before in the same text; None where no text is long enough."""
    seen_before = total = 0
    for text in texts:
        ids, known = text.tolist(), set()
        for start in range(len(ids) - n + 1):
            gram = tuple(ids[start : start + n])
            seen_before += gram in known
            known.add(gram)
            total += 1
    return seen_before / total if total else None


def _domain(stats: DraftStats, texts: Sequence[np.ndarray]) -> DomainReport:
    before = np.concatenate(([stats.steps], stats.accepted_at[:-1]))
    return DomainReport(
        steps=stats.steps,
        tokens=stats.emitted,
        accept_length=stats.accept_length,
        accepted=stats.accepted / stats.steps if stats.steps else float("nan"),
        verify_rate=stats.emitted / stats.verify_rows if stats.verify_rows else float("nan"),
        survival=(stats.accepted_at / max(1, stats.steps)).tolist(),
        conditional=[float(a / b) if b else float("nan") for a, b in zip(stats.accepted_at, before, strict=True)],
        repetition=repetition_rate(texts),
    )


def _calibration(sums: Reliability) -> Calibration:
    return Calibration(ece=sums.calibration_error().tolist(), auc=sums.auc().tolist(), brier=sums.brier().tolist())
