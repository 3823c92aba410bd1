"""What is known of a request's chances before a step drafts.

Owns the memory of confidences of earlier steps, read with a delay, and the running estimates that stand
in where there are none: for new requests, after a pause, for drafters without a confidence head.
Ignores calibration (`engine.dspark.scaling`), which has been applied before, and what is decided.

Shapes: B requests, G drafts a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from engine.dspark.kinds import Kinds

_OLDEST = 24
"""Steps after which a remembered confidence says nothing any more: three launches."""
_MOST_POLICIES = 1024
_MOST_KINDS = 1024
_CLASS_THRESHOLD = 32.0
"""Drafts that are lost before a class is switched off."""
_SURE = 1e-3
"""Chances this close to 0 or 1 are told apart no more."""


class LaggedSurvivals:
    """Survivals by step and request, visible `lag` steps later. A request's key is its incarnation: one
    that was sent back to the queue comes again under another."""

    def __init__(self, lag: int = 2) -> None:
        self._lag = lag
        self._steps: OrderedDict[int, tuple[dict[Hashable, int], np.ndarray]] = OrderedDict()
        """Step -> which row was whose, and the rows."""

    def note(self, step: int, keys: Sequence[Hashable], survival_BG: np.ndarray) -> None:
        assert len(keys) == len(survival_BG), f"{len(keys)} keys, {len(survival_BG)} rows"
        self._steps[step] = dict(zip(keys, range(len(keys)), strict=True)), survival_BG
        while next(iter(self._steps)) <= step - self._lag - _OLDEST:
            self._steps.popitem(last=False)

    def known(self, step: int, keys: Sequence[Hashable], survival_BG: np.ndarray) -> list[int]:
        """Put the newest survivals that planning for `step` may use into the rows of `keys`. Returns the rows of
        those that none are known of."""
        missing = list(range(len(keys)))
        for noted in reversed(self._steps):
            if not missing or noted <= step - self._lag - _OLDEST:
                break
            if noted <= step - self._lag:
                places, noted_BG = self._steps[noted]
                found = [places.get(keys[b], -1) for b in missing]
                if -1 in found:
                    rows = [b for b, place in zip(missing, found, strict=True) if place >= 0]
                    missing = [b for b, place in zip(missing, found, strict=True) if place < 0]
                    found = [place for place in found if place >= 0]
                else:
                    rows, missing = missing, []
                survival_BG[rows] = noted_BG[found]
        return missing


def carried_on(survival_BG: np.ndarray, made_B: np.ndarray) -> np.ndarray:
    """Survivals beyond the drafts that were made of each request, at least one, as if each further draft had the
    mean chance of those: whoever was sure of a short block is asked for a longer one."""
    rows_B, last_B = np.arange(len(made_B)), made_B - 1
    # A survival of nothing stays one.
    known_B = np.maximum(survival_BG[rows_B, last_B], 1e-30)
    beyond_BG = np.arange(survival_BG.shape[1]) - last_B[:, None]
    carried_BG = known_B[:, None] * (known_B ** (1.0 / made_B))[:, None] ** beyond_BG
    return np.where(beyond_BG > 0, carried_BG, survival_BG)


@dataclass(slots=True)
class _Sums:
    """Of chances and of observations, by draft, as they stood after `passed` plain steps."""

    kept: list[float]
    seen: list[float]
    passed: int


class AcceptanceEstimate:
    """Running means of the chance that draft k is accepted given that those before were: over everything, by
    policy where there are several, by `kind` of requests where one is named, by group, and by request. A narrower
    mean leans on the wider one with the weight of `leaning` observations, so that a new request starts from its
    group, a new group from its kind, a new kind from its policy and a new policy from all. What sets a kind or policy
    apart at one draft (a factor of odds) it is taken to have at the next, until that says otherwise: where short
    windows are found good longer ones are tried. Of a single request so much is made of nothing.

    `fade` is what an observation of a group or request keeps of its weight with each later one, and with each step in
    which nobody drafted, as texts go on meanwhile; `fade_wide` that of the wider ones with each later step with drafts:
    they speak of all requests that ran, not of the last to end.
    """

    def __init__(
        self, max_drafts: int, start: float = 0.7, fade: float = 0.98, leaning: float = 32.0, fade_wide: float = 0.998
    ) -> None:
        self._start, self._fade, self._leaning, self._fade_wide = start, fade, leaning, fade_wide
        self._width = max_drafts
        self._wide: dict[Hashable, np.ndarray] = {}
        """Those of more than a group, float64 [2, G], by level and name."""
        self._groups: dict[Hashable, _Sums] = {}
        self._requests: dict[Hashable, _Sums] = {}
        self._policies: dict[Hashable, None] = {}
        self._kinds: dict[Hashable, None] = {}
        self._passed = 0
        """Steps in which nobody drafted."""

    def observe_kinds(
        self,
        names: Kinds[tuple[str | None, Hashable | None]],
        chances_NG: np.ndarray,
        steps: int = 1,
        weight: float = 1.0,
    ) -> None:
        """Chances of drafts of rows in so many steps, by the policies and kinds `names` of their requests, NaN where
        nothing was verified; 0 or 1 where only outcomes are known. Each row stands for `weight` of them."""
        seen_NG = ~np.isnan(chances_NG)
        parts_2NG = weight * np.stack((np.where(seen_NG, chances_NG, 0.0), seen_NG))
        added: dict[Hashable, np.ndarray] = {}
        for (policy, kind), _, own_2G in names.sums(parts_2NG):
            self._meet("policy", policy, self._policies, _MOST_POLICIES)
            self._meet("kind", None if kind is None else (policy, kind), self._kinds, _MOST_KINDS)
            for key in _wider(policy, kind):
                added[key] = added[key] + own_2G if key in added else own_2G
        fade = self._fade_wide**steps
        for key, own_2G in added.items():
            known = self._wide.get(key)
            self._wide[key] = own_2G if known is None else known * fade + own_2G

    def observe(self, group: Hashable | None, request: Hashable, chances: Sequence[float]) -> None:
        """The same of one request, of the drafts that a step verified, in order. None: it is its whole group, and what
        it showed would count twice."""
        count = min(len(chances), self._width)
        # A row's few numbers are quicker one by one than as arrays.
        width = self._width
        levels = [(self._requests, request)] if group is None else [(self._groups, group), (self._requests, request)]
        for level, key in levels:
            sums = level.get(key)
            if sums is None:
                sums = level[key] = _Sums([0.0] * width, [0.0] * width, self._passed)
            if sums.passed != self._passed:
                left = self._fade ** (self._passed - sums.passed)
                sums.kept[:], sums.seen[:] = [left * k for k in sums.kept], [left * s for s in sums.seen]
                sums.passed = self._passed
            kept, seen, fade = sums.kept, sums.seen, self._fade
            for k in range(count):
                kept[k] = kept[k] * fade + chances[k]
                seen[k] = seen[k] * fade + 1.0

    def passed(self, steps: int) -> None:
        """Steps in which nobody drafted."""
        self._passed += steps

    def survivals(
        self,
        groups: Sequence[Hashable],
        requests: Sequence[Hashable],
        names: Kinds[tuple[str | None, Hashable | None]],
    ) -> np.ndarray:
        """The chance that all drafts up to each position are accepted, float64 [B, G]; `names` are policies and kinds.
        What requests lean on is worked out once."""
        means_BG = names.each(np.array([self._widest(*pair) for pair in names.names]).reshape(-1, self._width))
        self._narrow(means_BG, self._groups, groups)
        self._narrow(means_BG, self._requests, requests)
        return np.multiply.accumulate(means_BG, axis=1)

    def _widest(self, policy: str | None, kind: Hashable | None) -> list[float]:
        """Means of all requests of a policy and kind."""
        means, leaning = [self._start] * self._width, self._leaning
        for key in _wider(policy, kind):
            if (sums_2G := self._wide.get(key)) is not None:
                apart = 1.0
                for k, (kept, seen, wider) in enumerate(zip(*sums_2G.tolist(), means, strict=True)):
                    odds = _odds(wider)
                    expected = apart * odds / (1.0 + apart * odds)
                    means[k] = (kept + leaning * expected) / (seen + leaning)
                    apart = _odds(means[k]) / odds
        return means

    def _narrow(self, means_BG: np.ndarray, level: dict[Hashable, _Sums], names: Sequence[Hashable]) -> None:
        """Put the means of `names`, where they have any, in place of the wider ones that they lean on."""
        known = [b for b, name in enumerate(names) if name in level]
        if known:
            # Thousands of numbers in lists: told one after another they are there in half the time.
            own = [level[names[b]] for b in known]
            numbers = chain.from_iterable(chain.from_iterable((sums.kept, sums.seen) for sums in own))
            sums_K2G = np.fromiter(numbers, np.float64).reshape(len(known), 2, self._width)
            passed_K = self._passed - np.fromiter((sums.passed for sums in own), np.int64)
            if passed_K.any():
                sums_K2G *= (self._fade**passed_K)[:, None, None]
            leant_KG = sums_K2G[:, 0] + self._leaning * means_BG[known]
            means_BG[known] = leant_KG / (sums_K2G[:, 1] + self._leaning)

    def renew(self, left: float) -> None:
        """Drafter or target are others: what is known weighs `left` of what it did."""
        self._wide = {key: left * sums_2G for key, sums_2G in self._wide.items()}
        for level in (self._groups, self._requests):
            for sums in level.values():
                for part in (sums.kept, sums.seen):
                    part[:] = [left * number for number in part]

    def forget_request(self, request: Hashable) -> None:
        self._requests.pop(request, None)

    def forget_group(self, group: Hashable) -> None:
        self._groups.pop(group, None)

    def _meet(self, level: str, name: Hashable | None, known: dict[Hashable, None], most: int) -> None:
        """Room for one more of those that nobody ends: the one that was met first makes it."""
        if name is None or name in known:
            return
        known[name] = None
        if len(known) > most:
            oldest = next(iter(known))
            del known[oldest]
            self._wide.pop((level, oldest), None)


def _odds(chance: float) -> float:
    chance = min(max(chance, _SURE), 1.0 - _SURE)
    return chance / (1.0 - chance)


def _wider(policy: str | None, kind: Hashable | None) -> Iterator[Hashable]:
    """Whose means those of a request's group lean on, the widest first."""
    yield ()
    if policy is not None:
        yield "policy", policy
    if kind is not None:
        yield "kind", (policy, kind)


class DriftAlarm:
    """One-sided cumulative sum of (predicted - actual) accepted drafts per verified one.

    Sounds when more than `threshold` drafts, beyond `slack` of each, were missing from what was predicted
    (calibration or drafter no longer fit the policy), and first drafts brought clearly less than they cost since the
    sum began to grow: predictions that are too high, of drafts that pay all the same, are for calibration to mend.
    """

    def __init__(self, threshold: float = 64.0, slack: float = 0.05) -> None:
        self._threshold, self._slack = threshold, slack
        self.level = 0.0
        self._lost = 0.0

    def observe(self, predicted: float, accepted: int, verified: int, lost: float) -> bool:
        """Drafts of a step, and how many more first ones would have had to be accepted for those to bring most of what
        they cost (`engine.dspark.record`); less than 0 where they did."""
        self.level = max(0.0, self.level + predicted - accepted - self._slack * verified)
        self._lost = self._lost + lost if self.level else 0.0
        if self.level <= self._threshold:
            return False
        if self._lost >= 0.0:
            return True
        self.reset()
        return False

    def reset(self) -> None:
        self.level, self._lost = 0.0, 0.0


class DraftSwitch:
    """Whether drafting is allowed: off above `max_rows` requests, for `cooldown` steps after a drift alarm, and
    for requests of a class of which drafts are lost, twice as long after each alarm. Classes are LoRA policies, and
    lengths, told apart by powers of two, as a drafter fails past those it was trained at. Probes
    (`engine.dspark.planner`) go on while drafting is off, and a class is tried again when its time is over; a new
    drafter or policy turns everything on again."""

    def __init__(self, max_rows: int | None = None, cooldown: int = 256, alarm: DriftAlarm | None = None) -> None:
        self._max_rows = max_rows
        self._cooldown = cooldown
        self._whole = _Off(alarm or DriftAlarm(), cooldown)
        self._classes: dict[Hashable, _Off] = {}
        self._barred_until = 0
        """Step from which on no class is off."""

    def allows(self, step: int, rows: int) -> bool:
        return step >= self._whole.until and (self._max_rows is None or rows <= self._max_rows)

    def barred(self, step: int) -> set[Hashable]:
        """Classes that are off."""
        if step >= self._barred_until:
            return set()
        return {name for name, off in self._classes.items() if step < off.until}

    def observe_class(
        self, step: int, name: Hashable, predicted: float, accepted: int, verified: int, lost: float
    ) -> bool:
        """A step's outcomes of one class; whether its alarm sounds. It does before that of all, which then starts
        over: one class that has drifted switches nobody else off."""
        off = self._classes.get(name)
        if off is None:
            if len(self._classes) >= _MOST_KINDS:
                allowed = (other for other, known in self._classes.items() if step >= known.until)
                del self._classes[next(allowed, next(iter(self._classes)))]
            off = self._classes[name] = _Off(DriftAlarm(_CLASS_THRESHOLD), self._cooldown)
        until = off.until
        off.observe(step, predicted, accepted, verified, lost)
        if off.until == until:
            return False
        self._barred_until = max(self._barred_until, off.until)
        self._whole.forgive()
        return True

    def observe(self, step: int, predicted: float, accepted: int, verified: int, lost: float) -> None:
        """A step's expected and actual accepted drafts, those that were verified, and those that were `DriftAlarm`'s
        lost."""
        self._whole.observe(step, predicted, accepted, verified, lost)

    def renew(self) -> None:
        self._whole.renew()
        self._classes.clear()
        self._barred_until = 0


class _Off:
    """An alarm, and until which step it switched off what it watches."""

    def __init__(self, alarm: DriftAlarm, cooldown: int) -> None:
        self._alarm = alarm
        self._first = self._cooldown = cooldown
        self.until = 0

    def observe(self, step: int, predicted: float, accepted: int, verified: int, lost: float) -> None:
        if self._alarm.observe(predicted, accepted, verified, lost):
            self._alarm.reset()
            self.until = step + self._cooldown
            self._cooldown *= 2

    def forgive(self) -> None:
        """What was lost so far is accounted for."""
        self._alarm.reset()

    def renew(self) -> None:
        self._alarm.reset()
        self.until, self._cooldown = 0, self._first
