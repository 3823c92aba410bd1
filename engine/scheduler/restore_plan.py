"""How far a prompt's hit could reach with what the host keeps.

Owns the choice of the boundary: the deepest one at which every component has what a hit needs, on the device or on
the host. Changes nothing. Ignores how units travel (`engine.scheduler.restores`).

Pages are counted from the start of the prompt: page p holds tokens up to (p + 1) pages, and a boundary of b pages
ends page b - 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.cache.node import Node
from engine.cache.prefix_cache import Match, PrefixCache
from engine.cache.recurrent import RecurrentState
from engine.cache.spill import digests
from engine.cache.swa import SlidingWindow
from engine.memory.host_arena import HostRow
from engine.memory.host_tier import HostTier


@dataclass(slots=True)
class RestorePlan:
    """A hit of `depth` pages instead of `usable`, of which the tree has `known`. `rows` are what is missing: pages
    by number, `state` the one at the end."""

    match: Match
    depth: int
    usable: int
    known: int
    key: bytes
    """What names the first page beyond the present hit."""
    pages: list[HostRow] = field(default_factory=list)
    windows: dict[int, HostRow] = field(default_factory=dict)
    state: HostRow | None = None


class RestorePlanner:
    def __init__(self, tier: HostTier, cache: PrefixCache) -> None:
        self._tier = tier
        self._cache = cache
        self._windows: SlidingWindow | None = None
        self._states: RecurrentState | None = None
        for component in cache.components:
            if isinstance(component, SlidingWindow):
                self._windows = component
            elif isinstance(component, RecurrentState):
                self._states = component

    def plan(self, match: Match) -> RestorePlan | None:
        """None where nothing on the host makes the hit longer."""
        tier, space = self._tier, match.namespace
        if not tier.knows(space):
            return None
        size, page_bytes = self._cache.page_size, self._cache.tree.page_bytes
        known, usable, limit = match.structural // size, match.usable // size, match.num_bytes // page_bytes
        reach = 0 if self._windows is None else self._windows.reach // size
        first = max(0, usable - reach)
        named: list[bytes] = []
        pages: list[HostRow] = []
        for page, digest in enumerate(digests(space, match.tokens, page_bytes, first, limit), first):
            if page >= known:
                row = tier.find("full", space, digest)
                if row is None:
                    break
                pages.append(row)
            named.append(digest)
        last = first + len(named)
        if last <= usable:
            return None
        nodes = self._path(match)
        missing = self._missing_windows(match, nodes, first, named, reach)
        depth = next((b for b in range(last, usable, -1) if self._reachable(match, b, nodes, first, named, missing)), 0)
        if not depth:
            return None
        plan = RestorePlan(match, depth, usable, known, named[usable - first], pages[: max(0, depth - known)])
        plan.windows = {
            page: row for page, row in missing.items() if row is not None and max(0, depth - reach) <= page < depth
        }
        if self._states is not None and not self._has_state(nodes, depth):
            plan.state = tier.find("recurrent", space, named[depth - 1 - first])
        return plan

    def _path(self, match: Match) -> list[Node]:
        """The nodes that the tree knows of the prompt, the last one perhaps in part."""
        tree = self._cache.tree
        root = tree.roots.get(match.namespace)
        if root is None:
            return []
        node, _, child, _ = tree.descend(root, match.tokens, 0, match.num_bytes)
        nodes, step = [] if child is None else [child], node
        while step.parent is not None:
            nodes.append(step)
            step = step.parent
        return nodes

    def _missing_windows(
        self, match: Match, nodes: list[Node], first: int, named: list[bytes], reach: int
    ) -> dict[int, HostRow | None]:
        """Pages from `first` on whose window pages the device has not: the host's, or None."""
        if self._windows is None:
            return {}
        size, index = self._cache.page_size, self._windows.index
        present = np.zeros(first + len(named), dtype=bool)
        for node in nodes:
            assert node.parent is not None, "roots are on no path"
            start, data = node.parent.end // size, node.data[index]
            present[start + data.holes : start + len(data)] = True
        present[match.structural // size :] = False
        return {
            page: self._tier.find("swa", match.namespace, digest)
            for page, digest in enumerate(named, first)
            if not present[page]
        }

    def _reachable(
        self,
        match: Match,
        depth: int,
        nodes: list[Node],
        first: int,
        named: list[bytes],
        missing: dict[int, HostRow | None],
    ) -> bool:
        if (
            self._states is not None
            and not self._has_state(nodes, depth)
            and self._tier.find("recurrent", match.namespace, named[depth - 1 - first]) is None
        ):
            return False
        if self._windows is None:
            return True
        low = max(0, depth - self._windows.reach // self._cache.page_size)
        return all(missing.get(page, match) is not None for page in range(low, depth))

    def _has_state(self, nodes: list[Node], depth: int) -> bool:
        assert self._states is not None, "the model has states"
        end, index = depth * self._cache.page_size, self._states.index
        return any(node.end == end and node.data[index].slot for node in nodes)
