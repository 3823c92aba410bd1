"""What the queue asks of the host tier.

Owns when restores begin: for those at the queue's head ahead of their turn, and for whoever's turn it is. Ignores
how they go (`engine.scheduler.restores`). Without a tier nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.cache.key import Namespace
from engine.cache.prefix_cache import Match
from engine.cache.radix_tree import TOKEN_BYTES
from engine.request import Group, Sample
from engine.scheduler.pages import PageManager

AHEAD = 4
"""Of those who wait, so many have what they will hit brought from the host."""


class Prefetch:
    def __init__(self, pages: PageManager, namespace_of: Callable[[Group], Namespace]) -> None:
        self._pages = pages
        self._namespace_of = namespace_of
        self._asked: set[tuple[int, int]] = set()
        self.waits = True
        """Whether a hit waits for what is on its way."""

    def restored(self, match: Match) -> Match | None:
        """The match with what the host had for it; None while that is on its way."""
        restores, cache = self._pages.restores, self._pages.cache
        if restores is None or not self.waits:
            return match
        if restores.prefetch(match):
            return None
        if match.changes == cache.tree.changes:
            return match
        return cache.match(match.namespace, match.tokens, match.num_bytes // TOKEN_BYTES)

    def ahead(self, samples: list[Sample]) -> None:
        """Begin to bring what these will hit. Those of before are asked for no further time."""
        restores = self._pages.restores
        if restores is None:
            return
        asked = set()
        for sample in samples:
            if sample.order not in self._asked:
                tokens = sample.tokens()
                limited = restores.busy
                match = self._pages.match(self._namespace_of(sample.group), tokens, len(tokens) - 1)
                if not restores.prefetch(match, ahead=True) and limited:
                    continue  # perhaps for want of room
            asked.add(sample.order)
        self._asked = asked
