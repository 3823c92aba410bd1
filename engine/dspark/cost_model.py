"""How long a step will take.

Owns one linear model of step time, refined by every measured step, and its record of being wrong.
Ignores what a step is worth (`engine.dspark.planner`).

    T = plain(R) or rows(R) + draft(R · share) + tier(M), + κ₁ · tokens read + κ₂ · Σ context · queries

The functions are piecewise linear between knots: the number of requests, and the real graph tiers, so that a
staircase of tiers is met exactly. Steps without drafts have coefficients of their own: what rounds cost beside the
device's work says nothing of them. Tokens read are distinct ones, as a prefix shared by a group is read once. The
fit is recursive least squares on relative error, from a start-up sweep on, over coefficients that may wander (a
Kalman filter), so that old steps fade where new ones speak, and nowhere else. No such sum is all of a device: where
it is off by the same share again and again, those steps and the ones like them are corrected
(`engine.dspark.nearby_steps`), and a step tells the fit less the more of its kind have told it, or hours of one size
would bend it until it were exact there and absurd elsewhere. It never sees which tokens were drafted, so that
planning on it leaks nothing.

Shapes: D coefficients, C candidates.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from engine.dspark.nearby_steps import MeasuredKind, NearbySteps, lifted, point, points
from engine.errors import InvalidRequest

_KV_UNIT = 65_536.0
"""Tokens per unit of the context terms, to keep coefficients of one size."""
_FIRST_VARIANCE = 100.0
"""Of a coefficient, in units of the first step's time; also the most that is ever left unknown."""
_CONTEXT_VARIANCE, _CONTEXT_LIKENESS = 1.0, 0.95
"""Of what so many tokens cost (a device that computes a step reads a few such units in its time), and how alike reading
one and attending to it are. Nothing shared is what a start measures, where the two are one number: with sharing they
part, and one slow step of few tokens would say anything of many."""
_OCTAVES = 3.0
"""Distance of knots over which their heights are alike."""
_NOISE_VARIANCE = 0.05**2
"""Of the mean time of a kind of steps around what the sum makes of it, relative."""
_SCALE_FADE = 0.98


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides a step's time: `rows` requests and `tier` verify rows, both with padding, whether a draft is
    made and which `share` of the rows' whole blocks, distinct context tokens read, and the sum over
    requests of context times queries. `even`: all rows have one window, and none of the launches that spend a budget
    over them are there."""

    rows: int
    tier: int
    drafting: bool
    tokens_read: float = 0.0
    context_queries: float = 0.0
    share: float = 1.0
    even: bool = False


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Of steps with drafts: how much of each coefficient they take, float64 [C, D - 4], all but what they read; where
    they lie among steps that were measured (`nearby_steps.lifted`), float64 [C, 6]."""

    terms_CD: np.ndarray
    lifted_C6: np.ndarray


class CostKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a fitted model holds for; a table of another key is refused."""

    model: str
    device: str
    graphs: str


@dataclass(slots=True)
class CostErrors:
    """Prediction against measurement, of predictions made before the step was seen; seconds."""

    steps: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    predicted: float = 0.0
    measured: float = 0.0
    outliers: int = 0


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    key: CostKey
    row_knots: list[int]
    tier_knots: list[int]
    coefficients: list[float]
    covariance: list[list[float]]
    unit: float
    observed: int
    shortest: tuple[float | None, float | None]
    kinds: list[MeasuredKind]


class CostModel:
    """`wander` is how far a coefficient may move between two steps, in units of a step's time; a few
    hundred steps outweigh what was known before at the default."""

    def __init__(self, row_knots: Sequence[int], tier_knots: Sequence[int], wander: float = 2e-4) -> None:
        self._row_knots, self._tier_knots = _knots(row_knots), _knots(tier_knots)
        self._rows_K, self._tiers_K = np.array(self._row_knots), np.array(self._tier_knots)
        self._wander = wander
        # The first tier costs nothing beside its rows, or the two would be told apart by nothing.
        size = 3 * len(self._row_knots) + len(self._tier_knots) - 1 + 4
        self._coefficients_D = np.zeros(size)
        self._covariance_DD = np.eye(size) * _FIRST_VARIANCE
        start = 0
        for knots in (*[self._row_knots] * 3, self._tier_knots[1:]):
            block = slice(start, start + len(knots))
            self._covariance_DD[block, block] = _FIRST_VARIANCE * _likeness(knots)
            start += len(knots)
        for pair in (slice(size - 4, size - 2), slice(size - 2, size)):
            alike_22 = np.full((2, 2), _CONTEXT_LIKENESS) + (1.0 - _CONTEXT_LIKENESS) * np.eye(2)
            self._covariance_DD[pair, pair] = _CONTEXT_VARIANCE * alike_22
        self._nearby = NearbySteps(size)
        self._residual_scale = 0.05
        self._unit = 1.0
        self._shortest, self._shortest_round = math.inf, math.inf
        self.observed = 0
        self.errors = CostErrors()
        self.on_observed: Callable[[CostModel], None] | None = None
        """Called after every measured step: whoever keeps the model (`engine.dspark.cost_file`)."""

    def seed(self, sweep: Sequence[tuple[StepShape, float]]) -> None:
        """Fit the start-up sweep, as one and without counting errors."""
        for shape, seconds in sweep:
            self._learn(shape, seconds, 0.0, bounded=False)

    def observe(self, shape: StepShape, seconds: float, steps: int = 1) -> None:
        """Take in a measured step, or the mean of `steps` that were measured as one. One that is further off what was
        predicted than that was unsure moves the fit a bounded way."""
        if not (np.isfinite(seconds) and seconds > 0.0):
            return
        if self.observed:
            (predicted,) = self.predict([shape]).tolist()
            self.errors.steps += steps
            self.errors.absolute += abs(predicted - seconds) * steps
            self.errors.relative += abs(predicted - seconds) / seconds * steps
            self.errors.predicted += predicted * steps
            self.errors.measured += seconds * steps
        self._learn(shape, seconds, self._wander, bounded=True, steps=steps)
        if self.on_observed is not None:
            self.on_observed(self)

    def predict(self, shapes: Sequence[StepShape]) -> np.ndarray:
        """Seconds float64 [C], never below a tenth of the shortest step seen."""
        # Few coefficients are met: quicker one by one than as arrays.
        known_D = self._coefficients_D
        sums = [sum(float(known_D[place]) * weight for place, weight in self._terms(shape)) for shape in shapes]
        fitted_C = np.array([max(seconds * self._unit, self._floor) for seconds in sums])
        return fitted_C * self._corrections(lifted(np.array([_point(shape) for shape in shapes])))

    def weights(
        self, rows_C: np.ndarray, tiers_C: np.ndarray, shares_C: np.ndarray, even_C: np.ndarray | bool = False
    ) -> StepWeights:
        """What the times of steps with drafts are made of. It stays as it is, whatever the fit learns."""
        count = len(self._row_knots)
        weights_CD = np.zeros((len(rows_C), len(self._coefficients_D) - 4))
        weights_CD[:, count : 2 * count] = _spread(self._rows_K, rows_C)
        weights_CD[:, 2 * count : 3 * count] = _spread(self._rows_K, rows_C * shares_C)
        weights_CD[:, 3 * count :] = _spread(self._tiers_K, tiers_C)[:, 1:]
        return StepWeights(weights_CD, lifted(points(rows_C, tiers_C, rows_C * shares_C, even_C)))

    def times(self, weights: StepWeights, tokens_read: float, context_queries_C: np.ndarray) -> np.ndarray:
        """Seconds float64 [C], as `predict`, of steps of one batch that differ in what they draft and verify, and in
        rows where some pad them."""
        per_read, per_query = (self._coefficients_D[-2:] / _KV_UNIT).tolist()
        drafted_C = weights.terms_CD @ self._coefficients_D[:-4]
        seconds_C = drafted_C + per_read * tokens_read + per_query * context_queries_C
        return np.maximum(seconds_C * self._unit, self._floor) * self._corrections(weights.lifted_C6)

    def _corrections(self, lifted_C6: np.ndarray) -> np.ndarray:
        return self._nearby.corrections(lifted_C6, self._coefficients_D * self._unit, self._floor)

    @property
    def least_extra(self) -> float:
        """Seconds that drafting and verifying take at least beside a step of as many rows: what they take a single
        one, as far as such were seen."""
        return max(0.0, self._shortest_round - self._shortest) if math.isfinite(self._shortest_round) else 0.0

    @property
    def _floor(self) -> float:
        shortest = min(self._shortest, self._shortest_round)
        return 0.1 * shortest if math.isfinite(shortest) else 1e-9

    def save(self, path: Path, key: CostKey) -> None:
        table = _Table(
            key=key,
            row_knots=[int(k) for k in self._row_knots],
            tier_knots=[int(k) for k in self._tier_knots],
            coefficients=self._coefficients_D.tolist(),
            covariance=self._covariance_DD.tolist(),
            unit=self._unit,
            observed=self.observed,
            shortest=(_known(self._shortest), _known(self._shortest_round)),
            kinds=self._nearby.kept(),
        )
        # Whole or not at all: another engine may read it at any time.
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(table))
        os.replace(partial, path)

    @staticmethod
    def load(path: Path, key: CostKey) -> CostModel:
        """Raises `InvalidRequest` where the file is not a table of exactly this key."""
        try:
            table = msgspec.json.decode(path.read_bytes(), type=_Table)
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(field=str(path), expected="a stored cost table", actual=error) from error
        if table.key != key:
            raise InvalidRequest(field=str(path), expected=f"a table for {key}", actual=table.key)
        model = CostModel(table.row_knots, table.tier_knots)
        coefficients_D, covariance_DD = np.array(table.coefficients), np.array(table.covariance)
        sizes = {len(features) for kind in table.kinds for features in kind.features} | {len(coefficients_D)}
        if sizes != {len(model._coefficients_D)} or covariance_DD.shape != model._covariance_DD.shape:
            raise InvalidRequest(
                field=str(path), expected=f"{len(model._coefficients_D)} coefficients", actual="others"
            )
        model._coefficients_D, model._covariance_DD = coefficients_D, covariance_DD
        model._unit, model.observed = table.unit, table.observed
        model._shortest, model._shortest_round = (math.inf if s is None else s for s in table.shortest)
        model._nearby.restore(table.kinds)
        return model

    def _features(self, shape: StepShape) -> np.ndarray:
        """float64 [D]."""
        features_D = np.zeros(len(self._coefficients_D))
        for place, weight in self._terms(shape):
            features_D[place] = weight
        return features_D

    def _terms(self, shape: StepShape) -> list[tuple[int, float]]:
        """Coefficients and how much of each a step takes."""
        count, size = len(self._row_knots), len(self._coefficients_D)
        first = count * shape.drafting
        terms = [(first + place, weight) for place, weight in _between(self._row_knots, shape.rows)]
        if shape.drafting:
            drafted, tiers = _between(self._row_knots, shape.rows * shape.share), _between(self._tier_knots, shape.tier)
            terms += [(2 * count + place, weight) for place, weight in drafted]
            terms += [(3 * count + place - 1, weight) for place, weight in tiers if place]
        at = size - 2 if shape.drafting else size - 4
        return [*terms, (at, shape.tokens_read / _KV_UNIT), (at + 1, shape.context_queries / _KV_UNIT)]

    def _learn(self, shape: StepShape, seconds: float, wander: float, bounded: bool, steps: int = 1) -> None:
        """One update of the filter on the relative error, 1 - prediction / seconds."""
        if not self.observed:
            self._unit = float(seconds)
        features_D = self._features(shape)
        same = self._nearby.add(_point(shape), features_D, seconds)
        scaled_D = features_D * (self._unit / seconds)
        residual = 1.0 - float(scaled_D @ self._coefficients_D)
        covariance_DD = self._covariance_DD
        reach_D = covariance_DD @ scaled_D
        noise = _NOISE_VARIANCE * same
        spread = noise + float(scaled_D @ reach_D)
        told = abs(residual)
        if bounded:
            limit = 4.0 * max(self._residual_scale, math.sqrt(spread))
            told = min(told, limit)
            if abs(residual) > limit:
                self.errors.outliers += 1
                residual = math.copysign(limit, residual)
        self._coefficients_D = self._coefficients_D + reach_D * (residual / spread)
        root_D = reach_D / math.sqrt(spread)
        covariance_DD -= np.outer(root_D, root_D)
        variances_D = np.einsum("dd->d", covariance_DD)
        variances_D += wander**2 * steps
        if variances_D.max() > _FIRST_VARIANCE or variances_D.min() < 0.0:
            # What no step touches would grow without bound; scaling both sides keeps the matrix a covariance.
            shrink_D = np.sqrt(np.minimum(1.0, _FIRST_VARIANCE / variances_D.clip(min=1e-30)))
            covariance_DD *= np.outer(shrink_D, shrink_D)
        fade = _SCALE_FADE**steps
        self._residual_scale = fade * self._residual_scale + (1.0 - fade) * told
        if shape.drafting:
            self._shortest_round = min(self._shortest_round, float(seconds))
        else:
            self._shortest = min(self._shortest, float(seconds))
        self.observed += steps


def _known(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _point(shape: StepShape) -> np.ndarray:
    return point(shape.rows, shape.tier, shape.rows * shape.share * shape.drafting, shape.drafting + shape.even)


def sweep_shapes(
    row_knots: Sequence[int], tiers: Sequence[int], max_drafts: int, contexts: Sequence[int]
) -> list[StepShape]:
    """Steps worth measuring once at start-up: every row knot without drafts and with the smallest, the
    middle and the largest tier it can fill, at each context length."""
    shapes = []
    for rows in row_knots:
        fitting = [tier for tier in tiers if rows <= tier <= rows * (1 + max_drafts)]
        plain = min((tier for tier in tiers if tier >= rows), default=rows)
        for context in contexts:
            read = float(rows * context)
            shapes.append(StepShape(rows, plain, False, read, read))
            for tier in sorted({fitting[0], fitting[len(fitting) // 2], fitting[-1]} if fitting else set()):
                shapes.append(StepShape(rows, tier, True, read, float(tier * context)))
    return shapes


def _knots(values: Sequence[int]) -> list[float]:
    knots = sorted({float(value) for value in values})
    assert knots and knots[0] >= 0, "a cost model needs knots"
    return knots


def _likeness(knots: list[float]) -> np.ndarray:
    """Correlation of a function's heights at its knots before anything is known: a knot that was never met
    follows its neighbours, in octaves."""
    octaves = np.log2(np.maximum(1.0, np.array(knots)))
    return np.exp(-np.abs(octaves[:, None] - octaves[None, :]) / _OCTAVES)


def _between(knots: list[float], value: float) -> list[tuple[int, float]]:
    """Knots and their weights in a piecewise linear function at `value`: flat below the first knot, straight
    on above the last."""
    if len(knots) == 1:
        return [(0, 1.0)]
    right = min(max(bisect.bisect_left(knots, value), 1), len(knots) - 1)
    share = max(0.0, (value - knots[right - 1]) / (knots[right] - knots[right - 1]))
    return [(right - 1, 1.0 - share), (right, share)]


def _spread(knots_K: np.ndarray, values_C: np.ndarray) -> np.ndarray:
    """The same of many values, float64 [C, K]."""
    last, rows_C = len(knots_K) - 1, np.arange(len(values_C))
    if not last:
        return np.ones((len(values_C), 1))
    right_C = np.minimum(np.maximum(np.searchsorted(knots_K, values_C), 1), last)
    left_C = right_C - 1
    shares_C = np.maximum(0.0, (values_C - knots_K[left_C]) / (knots_K[right_C] - knots_K[left_C]))
    weights_CK = np.zeros((len(values_C), last + 1))
    weights_CK[rows_C, left_C], weights_CK[rows_C, right_C] = 1.0 - shares_C, shares_C
    return weights_CK
