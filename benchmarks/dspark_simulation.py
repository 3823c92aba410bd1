"""The planner against fixed windows, over simulated acceptance and a table of step times.

Owns three classes of requests that accept each draft with a fixed chance, given that those before were
accepted, and a clock that a table of times drives. What decides is the product's: planner, cost model
(which sees noisy times and never the table), survivals two steps old, spending, priors. Ignores devices;
`benchmarks.dspark --shape` runs the same classes through an engine.

Shapes: B requests, G drafts a request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from benchmarks.report import Row, at_least
from engine.dspark.cost_model import CostModel, StepShape, sweep_shapes
from engine.dspark.kinds import Kinds
from engine.dspark.persistence import Foresight
from engine.dspark.planner import Outlook, Planner, drafted, spend
from engine.dspark.survival import AcceptanceEstimate, carried_on

CLASSES = {"math": 0.95, "chat": 0.85, "poetry": 0.60}
"""Conditional acceptance of each draft."""
DRAFTS, CONTEXT, NEW = 7, 512, 256
FIXED = (1, 3, 5, 7)
_MEASURED = 0.5
"""Share of a run that counts; what comes before is warm-up."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step's parts, each piecewise linear: verifying so many rows without attention, reading
    1,000 tokens of context, drafting so many slots without attention. `tiers` are the verify rows that
    graphs exist for."""

    name: str
    verify: dict[int, float]
    per_1000_tokens: float
    draft: dict[int, float]
    draft_per_1000_tokens: float
    tiers: tuple[int, ...]

    def tier(self, rows: int) -> int:
        return next(tier for tier in self.tiers if tier >= rows)

    def seconds(self, requests: int, rows: int, slots: float, tokens_read: float) -> float:
        """A step of `requests`, of which each drafts `slots` tokens on average (0: none) and `rows` go through the
        target."""
        value = _along(self.verify, rows) + self.per_1000_tokens * tokens_read / 1e3
        if slots:
            value += _along(self.draft, requests * slots) + self.draft_per_1000_tokens * tokens_read / 1e3
        return value / 1e3


def _tiers(most: int) -> tuple[int, ...]:
    found, size = {1, 2, 4, 6}, 8
    while size <= most:
        found |= {size + part * size // 4 for part in range(4)}
        size *= 2
    return (*sorted(tier for tier in found if tier < most), most)


H200_QWEN3_8B = StepTimes(
    name="H200, Qwen3-8B: decode and prefill as measured, drafting estimated",
    # Steps of 1 to 256 rows (docs/performance.md) less the reading of 576 tokens a row at 3.9 TB/s; beyond,
    # prompts at 43,000 tokens a second.
    verify={1: 4.04, 32: 5.0, 128: 5.3, 256: 7.4, 512: 12.4, 1024: 23.8, 2048: 47.6},
    per_1000_tokens=0.038,
    # Five layers and the head read 3.2 GB; 3.2 GFLOP a slot at 600 TFLOP/s; W2 of the Markov head each slot.
    draft={1: 0.95, 128: 1.1, 256: 1.7, 512: 2.9, 1024: 5.6, 1792: 9.7},
    draft_per_1000_tokens=0.0053,
    tiers=_tiers(2048),
)


def _along(points: dict[int, float], value: float) -> float:
    return float(np.interp(value, list(points), list(points.values())))


@dataclass(slots=True)
class Outcome:
    """Of the steps that count. `verified` are drafts, of `drafted`; `whole` is what whole windows would have
    emitted on the same chances."""

    seconds: float = 0.0
    tokens: int = 0
    verified: int = 0
    drafted: int = 0
    whole: float = 0.0
    windows: dict[str, list[float]] = field(default_factory=dict)
    planning: float = 0.0
    steps: int = 0
    cost_error: float = float("nan")

    @property
    def rate(self) -> float:
        return float(self.tokens / self.seconds)


class Traffic:
    """`concurrency` requests, classes in equal thirds; one that has emitted all its tokens is replaced by a new
    one of its class. A draft's chance given the drafts before is its class's, and what the drafter believes
    of it is off by `noise` in log-odds, drawn anew for each draft."""

    def __init__(self, concurrency: int, seed: int, noise: float) -> None:
        self.rng = np.random.default_rng([seed, concurrency])
        names = list(CLASSES)
        # A single request is each class in turn, so that a rate at one is over all of them.
        self.kinds_B = np.arange(concurrency) % len(names)
        self.single = concurrency == 1
        self.chances = np.array(list(CLASSES.values()))
        self.emitted_B = self.rng.integers(0, NEW, concurrency)
        self.keys_B = np.arange(concurrency)
        self.noise = noise
        self._next = concurrency

    @property
    def context_B(self) -> np.ndarray:
        return CONTEXT - NEW // 2 + self.emitted_B.astype(float)

    def believed(self) -> np.ndarray:
        """Survival float64 [B, G] as a confidence head would tell it."""
        chance_BG = np.repeat(self.chances[self.kinds_B][:, None], DRAFTS, axis=1)
        odds_BG = np.log(chance_BG / (1 - chance_BG)) + self.noise * self.rng.standard_normal(chance_BG.shape)
        return np.cumprod(1 / (1 + np.exp(-odds_BG)), axis=1)

    def advance(self, lens_B: np.ndarray) -> np.ndarray:
        """Tokens emitted by each request, int64 [B]."""
        passed_BG = self.rng.random((len(lens_B), DRAFTS)) < self.chances[self.kinds_B][:, None]
        accepted_B = np.minimum(np.cumprod(passed_BG, axis=1).sum(1), lens_B)
        tokens_B = np.minimum(accepted_B + 1, NEW - self.emitted_B)
        self.emitted_B = self.emitted_B + tokens_B
        for b in np.flatnonzero(self.emitted_B >= NEW):
            self.emitted_B[b], self.keys_B[b] = 0, self._next
            self._next += 1
            if self.single:
                self.kinds_B[b] = (self.kinds_B[b] + 1) % len(self.chances)
        return tokens_B

    def whole(self) -> float:
        """What whole windows are expected to emit in the next step."""
        chance_B = self.chances[self.kinds_B]
        expected_B = 1 + sum(chance_B ** (place + 1) for place in range(DRAFTS))
        return float(np.minimum(expected_B, NEW - self.emitted_B).sum())


def fixed(times: StepTimes, traffic: Traffic, window: int, steps: int) -> Outcome:
    """Every request drafts and verifies `window` tokens a step; 0 drafts none."""
    result, rows = Outcome(), len(traffic.kinds_B)
    for step in range(steps):
        whole, read = traffic.whole(), traffic.context_B.sum()
        lens_B = np.minimum(window, NEW - traffic.emitted_B - 1)
        tokens = int(traffic.advance(lens_B).sum())
        if step >= steps * (1 - _MEASURED):
            result.seconds += times.seconds(rows, times.tier(rows + int(lens_B.sum())), window, read)
            result.tokens += tokens
            result.verified += int(lens_B.sum())
            result.drafted += DRAFTS * rows
            result.whole += whole
            result.steps += 1
    return result


def adaptive(times: StepTimes, traffic: Traffic, steps: int, ragged: bool) -> Outcome:
    """The planner's windows, at times it learns from measured steps of 3 % noise. Where blocks are `ragged` it
    also chooses how many drafts of each request are made; else the drafter always makes all."""
    result, rows = Outcome(windows={name: [] for name in CLASSES}), len(traffic.kinds_B)
    knots = sorted({1 << power for power in range(12)} | {rows})
    cost = CostModel([knot for knot in knots if knot <= max(rows, 2)], [t for t in times.tiers if t <= rows * 8])
    tiers = (*(t for t in times.tiers if t < rows * (1 + DRAFTS)), times.tier(rows * (1 + DRAFTS)))

    def measured(shape: StepShape) -> float:
        exact = times.seconds(shape.rows, shape.tier, shape.drafting * shape.share * DRAFTS, shape.tokens_read)
        return exact * float(np.exp(0.03 * traffic.rng.standard_normal()))

    shapes = sweep_shapes([knot for knot in knots if knot <= rows], tiers, DRAFTS, (64, 1024))
    shapes += [replace(shape, share=d / DRAFTS) for shape in shapes if shape.drafting for d in (1, 2, 4) if ragged]
    cost.seed([(shape, measured(shape)) for shape in shapes])
    planner, foresight = Planner(cost, tiers, ragged=ragged), Foresight()
    estimate = AcceptanceEstimate(DRAFTS)
    names = list(CLASSES)
    for step in range(steps):
        whole, context_B, counts = traffic.whole(), traffic.context_B, step >= steps * (1 - _MEASURED)
        keys, kinds_B = traffic.keys_B.tolist(), traffic.kinds_B.copy()
        most_B = np.minimum(DRAFTS, NEW - traffic.emitted_B - 1)
        nameless = Kinds.of([(None, None)] * rows)
        began = time.thread_time()
        prior_BG = estimate.survivals(keys, [0] * rows, nameless)
        prior_BG = foresight.survivals(step, keys, nameless, prior_BG)
        outlook = Outlook(prior_BG, np.zeros(rows, int), most_B, context_B, float(context_B.sum()))
        choice = planner.choose(outlook)
        planning = time.thread_time() - began
        lens_B = np.zeros(rows, dtype=np.int64)
        if choice.drafting:
            fresh_BG = traffic.believed()
            made_B = drafted(outlook, choice.slots)
            lens_B = spend(
                torch.from_numpy(fresh_BG), torch.zeros(rows), torch.from_numpy(made_B), choice.budget
            ).numpy()
            if ragged:
                # Nobody was told of drafts that were not made.
                some = np.flatnonzero(made_B)
                foresight.note(step, [keys[b] for b in some], carried_on(fresh_BG[some], made_B[some]))
            else:
                foresight.note(step, keys, fresh_BG)
        tokens_B = traffic.advance(lens_B)
        tier = times.tier(rows + int(lens_B.sum()))
        shape = StepShape(
            rows=rows,
            tier=tier,
            drafting=choice.drafting,
            tokens_read=float(context_B.sum()),
            context_queries=float((context_B * (1 + lens_B)).sum()),
            share=choice.slots / (rows * DRAFTS) if ragged and choice.drafting else 1.0,
        )
        seconds = times.seconds(rows, tier, choice.drafting * shape.share * DRAFTS, shape.tokens_read)
        began = time.thread_time()
        cost.observe(shape, measured(shape))
        planning += time.thread_time() - began
        accepted_B1, place_G = tokens_B[:, None] - 1, np.arange(DRAFTS)
        told_BG = (place_G <= accepted_B1) & (place_G < lens_B[:, None])
        chances_BG = np.where(told_BG, place_G < accepted_B1, np.nan)
        estimate.observe_kinds(nameless, chances_BG)
        for key, chances_G in zip(keys, chances_BG.tolist(), strict=True):
            estimate.observe(key, 0, [chance for chance in chances_G if chance == chance])
        if counts:
            result.seconds += seconds
            result.tokens += int(tokens_B.sum())
            result.verified += int(lens_B.sum())
            result.drafted += DRAFTS * rows
            result.whole += whole
            result.planning += planning
            result.steps += 1
            for b, length in enumerate(lens_B.tolist()):
                result.windows[names[kinds_B[b]]].append(length)
    result.cost_error = cost.errors.absolute / cost.errors.measured
    return result


def simulate(times: StepTimes, concurrency: list[int], noise: float, seed: int = 0, tokens: int = 40_000) -> list[Row]:
    """Rows of every concurrency; each policy meets the same traffic for about `tokens` tokens."""
    lines = []
    for count in concurrency:
        case, steps = f"simulated, {count} requests", max(200, 2 * tokens // (3 * count))
        none = fixed(times, Traffic(count, seed, noise), 0, steps).rate
        lines.append(Row(case, "no drafts", none, "tok/s"))
        by_window = {k: fixed(times, Traffic(count, seed, noise), k, steps).rate for k in FIXED}
        lines += [Row(case, f"fixed {k}", rate, "tok/s") for k, rate in by_window.items()]
        best = max(by_window.values())
        for ragged in (False, True):
            chosen = adaptive(times, Traffic(count, seed, noise), steps, ragged)
            lines += _adaptive_rows(case, "adaptive blocks" if ragged else "adaptive", chosen, count, none, best)
    return lines


def _adaptive_rows(case: str, name: str, chosen: Outcome, count: int, none: float, best: float) -> list[Row]:
    bound = 1.06 if count == 256 else 0.98
    lines = [
        Row(case, name, chosen.rate, "tok/s"),
        at_least(case, f"{name} / no drafts", chosen.rate / none, "x", 0.98),
        at_least(case, f"{name} / best fixed", chosen.rate / best, "x", bound),
    ]
    for kind, lengths in chosen.windows.items():
        lines.append(Row(case, f"{name}: mean window, {kind}", float(np.mean(lengths)) if lengths else 0.0, "drafts"))
    share = (chosen.verified + count * chosen.steps) / (chosen.drafted + count * chosen.steps)
    return [
        *lines,
        Row(case, f"{name}: utilisation of the ceiling", float(chosen.tokens / chosen.whole), ""),
        Row(case, f"{name}: verified rows / full windows", float(share), ""),
        Row(case, f"{name}: error of predicted step times", chosen.cost_error, ""),
        Row(case, f"{name}: planning", 1e3 * chosen.planning / max(1, chosen.steps), "ms"),
    ]
