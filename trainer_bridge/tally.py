"""Metrics as numerators and denominators, divided once at the end.

Owns adding up over micro-batches and ranks. Ignores what the numbers mean. Metrics that are no
plain mean (maxima, effective sample size) are derived by their owner from tallied sums.
"""

from __future__ import annotations

from collections.abc import Iterator


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, name: str, numerator: float, denominator: float) -> None:
        top, bottom = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (top + float(numerator), bottom + float(denominator))

    def merge(self, other: Tally) -> None:
        for name, (top, bottom) in other._sums.items():
            self.add(name, top, bottom)

    def mean(self, name: str) -> float:
        """NaN where nothing was counted: an absent measurement is not a zero."""
        top, bottom = self._sums.get(name, (0.0, 0.0))
        return top / bottom if bottom else float("nan")

    def numerator(self, name: str) -> float:
        return self._sums.get(name, (0.0, 0.0))[0]

    def means(self) -> dict[str, float]:
        return {name: self.mean(name) for name in self}

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)
