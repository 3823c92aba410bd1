"""Sequential temperature scaling: confidences that mean what they say.

Owns the temperatures by draft position and what is added to logits over them, their fit from left to right (arXiv
2607.05147, which adds nothing), online refits, and their file. Ignores who uses survivals. Both keep the order of
confidences within a position. A fit holds for one drafter, one rule of acceptance and one sampling temperature.

A head that has learnt how far target and drafter are apart promises too much of a rule that keeps less than that
allows (`coupled`), whatever it is divided by: a shift is what says so.

Labels are survivals: y_k = product over i <= k of the chance that draft i is accepted, which
verification yields for every draft it verified, reached or not. Drafts that were not verified have no
label and take no part: whether they were verified depended on what came before them only.

Shapes: N rounds, S of them with a label, G drafts, B rows.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.dspark.config import NGRAM, DSparkConfig, Rule
from engine.dspark.reliability import expected_calibration_error
from engine.errors import InvalidRequest
from engine.memory.transfer import staged

GRID = np.logspace(-1.0, 1.0, 41)
"""Temperatures that are tried."""
_PARTS = 8
"""Of a position's fit: what a host does between two launches has to be short."""
_MOST_SHIFT = 4.0
_LEANING = 2.0
"""What a shift of one costs, in survivals that are promised and were not: of few labels none is made."""
_NEAR_ONE = 0.5
"""What a temperature costs for each e-fold (squared) that it is from 1, in squared errors of survival: few labels say
nothing of it."""


@dataclass(frozen=True, slots=True)
class ScalingFit:
    """`before` and `after` are expected calibration errors of survival by position."""

    temperatures: list[float]
    shifts: list[float]
    num_samples: int
    before: list[float]
    after: list[float]


class StoredScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fit as stored beside its drafter (without `shifts`: none of any position); errors are means over positions."""

    temperatures: list[float]
    shifts: list[float] = []
    dataset: str
    num_samples: int
    ece_before: float
    ece_after: float
    policy_version: int = 0
    rule: Rule = "rejection"
    sampling_temperature: float = 1.0


def scaling_file(rule: Rule) -> str:
    """The name under which a drafter's folder keeps its temperatures for a rule."""
    return f"sts-{rule}.json"


def stored_scaling(config: DSparkConfig) -> Path | None:
    """The temperatures an engine starts with: those it is given, or those that its drafter's folder keeps for the
    rule in use."""
    if config.calibration is not None or config.drafter in ("none", NGRAM):
        return config.calibration
    kept = Path(config.drafter) / scaling_file(config.rule)
    return kept if kept.is_file() else None


def survival_labels(chances: Sequence[Sequence[float]], verified: Sequence[int], drafts: int) -> np.ndarray:
    """float64 [N, G] from the chances of a `Verdict` and the drafts verified by row; NaN where none was."""
    return labels_of(as_table(chances, drafts), np.asarray(verified))


def as_table(chances: Sequence[Sequence[float]], drafts: int) -> np.ndarray:
    """Chances of a `Verdict` as float64 [N, G], NaN behind those that are known."""
    table_NG = np.full((len(chances), drafts), np.nan)
    for row_G, known in zip(table_NG, chances, strict=True):
        row_G[: len(known)] = known
    return table_NG


def labels_of(chances_NG: np.ndarray, verified_N: np.ndarray) -> np.ndarray:
    """The same from a table. Where only outcomes are known, what is known of a row ends with the first draft that
    was not kept: survival is 0 from there to the last verified one."""
    labels_NG = np.cumprod(np.where(np.isnan(chances_NG), 0.0, chances_NG), axis=1)
    labels_NG[np.arange(chances_NG.shape[1]) >= verified_N.reshape(-1, 1)] = np.nan
    return labels_NG


def fit_scaling(logits_NG: np.ndarray, labels_NG: np.ndarray, weights_N: np.ndarray | None = None) -> ScalingFit:
    """The temperature of each position in turn that brings predicted survival closest to the labels, in squares, with
    the shift that has as much survive as did, those before it held; 1 and 0 for a position without labels. (Calibration
    error, which temperatures alone may be fitted by, is least where a shift makes one number of all.)"""
    fitting = _fit_in_parts(logits_NG, labels_NG, weights_N)
    while True:
        try:
            next(fitting)
        except StopIteration as done:
            return done.value


def _fit_in_parts(
    logits_NG: np.ndarray, labels_NG: np.ndarray, weights_N: np.ndarray | None = None
) -> Generator[None, None, ScalingFit]:
    """`fit_scaling`, with a pause after every few temperatures that were tried."""
    logits_NG, labels_NG = np.asarray(logits_NG, dtype=np.float64), np.asarray(labels_NG, dtype=np.float64)
    weights_N = np.ones(len(logits_NG)) if weights_N is None else weights_N
    plain_N, scaled_N = np.ones(len(logits_NG)), np.ones(len(logits_NG))
    temperatures, shifts, before, after = [], [], [], []
    for g in range(logits_NG.shape[1]):
        seen_N = ~np.isnan(labels_NG[:, g])
        y, w, z = labels_NG[seen_N, g], weights_N[seen_N], logits_NG[:, g]
        plain_N = plain_N * _sigmoid(z)
        known_S, z_S = scaled_N[seen_N], z[seen_N]
        losses: list[float] = []
        tried: list[float] = []
        for part in np.array_split(GRID, _PARTS):
            for t in part:
                tried.append(_shift(known_S, z_S / t, y, w, tried[-1] if tried else 0.0))
                missed_S = known_S * _sigmoid(z_S / t + tried[-1]) - y
                losses.append(float((w * missed_S**2).sum()) + _NEAR_ONE * np.log(t) ** 2)
            yield
        best = int(np.argmin(losses))
        temperatures.append(float(GRID[best]))
        shifts.append(tried[best])
        scaled_N = scaled_N * _sigmoid(z / GRID[best] + tried[best])
        before.append(expected_calibration_error(plain_N[seen_N], y, w))
        after.append(expected_calibration_error(scaled_N[seen_N], y, w))
    return ScalingFit(temperatures, shifts, len(logits_NG), before, after)


def _shift(known_S: np.ndarray, logits_S: np.ndarray, y: np.ndarray, w: np.ndarray, start: float) -> float:
    """What to add to logits so that as much survives as did, by Newton's method from what did for others like them."""
    shift = start
    for _ in range(4):
        chance_S = _sigmoid(logits_S + shift)
        promised_S = w * known_S * chance_S
        too_much = float(promised_S.sum() - (w * y).sum()) + _LEANING * shift
        slope = float((promised_S * (1.0 - chance_S)).sum()) + _LEANING
        shift -= min(1.0, max(-1.0, too_much / slope))
        shift = min(_MOST_SHIFT, max(-_MOST_SHIFT, shift))
    return shift


class SurvivalScaling:
    """The temperatures and shifts in use, `scales_2G`, in one tensor that keeps its address: captured graphs see every
    change, and never half of one."""

    def __init__(self, drafts: int, device: torch.device | str = "cpu") -> None:
        self._known_2G = np.stack((np.ones(drafts), np.zeros(drafts)))
        """The same on the host, which need not ask the device."""
        self.scales_2G = torch.from_numpy(self._known_2G).float().to(device)

    @property
    def temperatures_G(self) -> torch.Tensor:
        return self.scales_2G[0]

    def assign(self, temperatures: Sequence[float], shifts: Sequence[float] = ()) -> None:
        """Without shifts none is made."""
        expected = self.scales_2G.shape[1]
        if len(temperatures) != expected or not all(np.isfinite(t) and t > 0 for t in temperatures):
            raise InvalidRequest(field="temperatures", expected=f"{expected} positive numbers", actual=temperatures)
        if len(shifts) not in (0, expected) or not all(np.isfinite(shift) for shift in shifts):
            raise InvalidRequest(field="shifts", expected=f"{expected} numbers, or none", actual=shifts)
        shifts = shifts if len(shifts) else [0.0] * expected
        self._known_2G = np.array((temperatures, shifts), dtype=np.float64)
        self.scales_2G.copy_(staged(self._known_2G.astype(np.float32), self.scales_2G.device), non_blocking=True)

    def survival(self, logits_BG: torch.Tensor) -> torch.Tensor:
        """float32 [B, G] from raw confidence logits."""
        temperatures_G, shifts_G = self.scales_2G[:, : logits_BG.shape[1]]
        return torch.cumprod(torch.sigmoid(logits_BG.float() / temperatures_G + shifts_G), dim=1)

    def known_survival(self, logits_NG: np.ndarray) -> np.ndarray:
        """The same on the host."""
        temperatures_G, shifts_G = self._known_2G[:, : logits_NG.shape[1]]
        return np.cumprod(_sigmoid(logits_NG / temperatures_G + shifts_G), axis=1)

    def save(self, path: Path, stored: StoredScaling) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(stored), indent=1))

    def load(self, path: Path, rule: Rule) -> StoredScaling:
        """Take a stored fit; one of another length or rule is refused."""
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredScaling)
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(field=str(path), expected="stored temperatures", actual=error) from error
        if stored.rule != rule:
            raise InvalidRequest(field=str(path), expected=f"a fit for {rule} verification", actual=stored.rule)
        self.assign(stored.temperatures, stored.shifts)
        return stored


class OnlineScaling:
    """Refits from what serving shows, at once or a little with each step, as a device may wait. It keeps the last
    `capacity` rounds of one rule and sampling temperature; after a policy update older rounds weigh `fade` of what
    they did."""

    def __init__(self, scaling: SurvivalScaling, capacity: int = 2048, least: int = 512, fade: float = 0.25) -> None:
        drafts = scaling.scales_2G.shape[1]
        self._scaling = scaling
        self._least, self._fade = least, fade
        self._logits_NG, self._labels_NG = np.zeros((2, capacity, drafts))
        self._weights_N = np.zeros(capacity)
        self._next = 0
        self._fitting: Generator[None, None, ScalingFit] | None = None
        self._seen: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        """Logits, labels and weights that are being fitted."""
        self.fit: ScalingFit | None = None

    def observe(self, logits_BG: np.ndarray, labels_BG: np.ndarray) -> None:
        """A step's raw confidence logits, and its `survival_labels`. Rounds that verified nothing say nothing."""
        seen = np.flatnonzero(~np.isnan(labels_BG[:, 0]))[-len(self._weights_N) :]
        places = (self._next + np.arange(len(seen))) % len(self._weights_N)
        self._logits_NG[places], self._labels_NG[places] = logits_BG[seen], labels_BG[seen]
        self._weights_N[places] = 1.0
        self._next += len(seen)

    def new_policy(self) -> None:
        self._weights_N *= self._fade
        self._fitting = None

    def refit(self) -> ScalingFit | None:
        """Fit and put in use, once there is enough to fit. A fit that is worse than what is in use by its
        own data is kept from use."""
        self._fitting = None
        self.begin()
        if self._fitting is None:
            return None
        while self._fitting is not None:
            self.advance()
        return self.fit

    def begin(self) -> None:
        """Start to `refit` from what is there, if that is enough and none is under way."""
        held = self._weights_N > 0
        if self._fitting is None and held.sum() >= self._least:
            self._seen = self._logits_NG[held], self._labels_NG[held], self._weights_N[held]
            self._fitting = _fit_in_parts(*self._seen)

    def advance(self) -> None:
        """A part of the fit that has begun, if one has."""
        if self._fitting is None:
            return
        try:
            next(self._fitting)
        except StopIteration as done:
            self._fitting, self.fit = None, done.value
            assert self._seen is not None
            logits, labels, weights = self._seen
            current = self._scaling.known_survival(logits)
            if np.mean(done.value.after) <= np.mean(_errors(current, labels, weights)):
                self._scaling.assign(done.value.temperatures, done.value.shifts)


def _errors(predicted_NG: np.ndarray, labels_NG: np.ndarray, weights_N: np.ndarray) -> list[float]:
    seen_NG = ~np.isnan(labels_NG)
    return [
        expected_calibration_error(predicted_NG[seen, g], labels_NG[seen, g], weights_N[seen])
        for g, seen in enumerate(seen_NG.T)
    ]


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * values))
