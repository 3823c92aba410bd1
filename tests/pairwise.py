"""Test cases in which every two values of different factors meet.

Owns the choice of few combinations out of many. Ignores what the values mean.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

CANDIDATES = 60


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases that together contain every pair of values; the same for the same factors and seed.

    Greedy: the next case is the one of some random candidates that contains most pairs still missing,
    each candidate grown from one of those.
    """
    noise = random.Random(seed)
    names = list(factors)
    counts = [len(factors[name]) for name in names]
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(counts[a])
        for j in range(counts[b])
    }
    cases = []
    while missing:
        wanted = sorted(missing)
        best: tuple[int, ...] = ()
        most = 0
        for _ in range(CANDIDATES):
            choice = [noise.randrange(count) for count in counts]
            for factor, value in noise.choice(wanted):
                choice[factor] = value
            covered = len(_pairs(choice) & missing)
            if covered > most:
                best, most = tuple(choice), covered
        missing -= _pairs(best)
        cases.append({name: factors[name][value] for name, value in zip(names, best, strict=True)})
    return cases


def _pairs(choice: Sequence[int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(choice), 2))
