"""What leaves the tree by eviction and is worth keeping elsewhere.

Owns the names of units that outlive the tree: a namespace, and a digest of all tokens up to where a unit ends.
The tree tells of evictions before it frees what is evicted. What was flushed, retired or belongs to an earlier epoch
is not kept, and what was kept of it is forgotten. Ignores where units go (`UnitKeeper`) and how they come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from engine.cache.component import Component
from engine.cache.full import FullAttention
from engine.cache.key import Namespace
from engine.cache.recurrent import NodeState, RecurrentState
from engine.cache.swa import SlidingWindow, WindowPages

if TYPE_CHECKING:
    from engine.cache.node import Node

DIGEST_BYTES = 20
_ID_BYTES = 4


class UnitKeeper(Protocol):
    """`units` are (digest, id); of those given at once the later ones are kept for longer."""

    def keep(self, kind: str, space: Namespace, units: Sequence[tuple[bytes, int]]) -> None: ...

    def forget(self, predicate: Callable[[Namespace], bool]) -> None: ...


def digests(space: Namespace, tokens: bytes, page_bytes: int, first: int, last: int) -> Iterator[bytes]:
    """What names the units that end `first + 1`, ... `last` pages deep."""
    prefix = blake2b(repr(tuple(space)).encode(), digest_size=DIGEST_BYTES)
    prefix.update(tokens[: first * page_bytes])
    for page in range(first, last):
        prefix.update(tokens[page * page_bytes : (page + 1) * page_bytes])
        yield prefix.copy().digest()


class Spiller:
    """`epoch` tells the cache's present one."""

    def __init__(
        self, keeper: UnitKeeper, components: tuple[Component, ...], page_bytes: int, epoch: Callable[[], int]
    ) -> None:
        self._keeper = keeper
        self._page_bytes = page_bytes
        self._epoch = epoch
        self._full: FullAttention | None = None
        self._windows: SlidingWindow | None = None
        self._states: RecurrentState | None = None
        for component in components:
            if isinstance(component, FullAttention):
                self._full = component
            elif isinstance(component, SlidingWindow):
                self._windows = component
            elif isinstance(component, RecurrentState):
                self._states = component

    def evicted(self, victims: list[Node], cut: Node | None = None, keep: int = 0) -> None:
        """These nodes go, children before their parents, which they still know; then the bytes of `cut` from `keep`
        on."""
        units: dict[Namespace, dict[str, list[tuple[bytes, int]]]] = {}
        for node in victims if cut is None else [*victims, cut]:
            if self._worth_keeping(node):
                first = keep // self._page_bytes if node is cut else 0
                self._collect(node, first, units.setdefault(node.root.namespace, {}))
        for space, kinds in units.items():
            for kind, found in kinds.items():
                self._keeper.keep(kind, space, found)

    def windows(self, node: Node, first: int, last: int) -> None:
        """Window pages [first, last) of the node go."""
        if self._windows is not None and self._worth_keeping(node):
            data: WindowPages = node.data[self._windows.index]
            named = self._named(node, first, last)
            units = [(digest, _unit(data.ids, first + place)) for place, digest in enumerate(named)]
            self._keeper.keep("swa", node.root.namespace, units[::-1])

    def state(self, node: Node) -> None:
        """The state at the node's end goes."""
        if self._states is not None and self._worth_keeping(node):
            data: NodeState = node.data[self._states.index]
            pages = len(node.edge) // self._page_bytes
            (digest,) = self._named(node, pages - 1, pages)
            self._keeper.keep("recurrent", node.root.namespace, [(digest, data.slot)])

    def forget(self, predicate: Callable[[Namespace], bool]) -> None:
        self._keeper.forget(predicate)

    def _worth_keeping(self, node: Node) -> bool:
        root = node.root
        return not root.retired and not root.doomed and root.namespace.epoch >= self._epoch()

    def _collect(self, node: Node, first: int, found: dict[str, list[tuple[bytes, int]]]) -> None:
        """Add the node's units from page `first` on, deep ones before shallow ones: those are lost first, as
        nobody finds them without what is above."""
        last = len(node.edge) // self._page_bytes
        named = list(enumerate(self._named(node, first, last), first))[::-1]
        assert self._full is not None, "a tree holds pages"
        pages: bytes = node.data[self._full.index]
        found.setdefault("full", []).extend((digest, _unit(pages, page)) for page, digest in named)
        if self._windows is not None:
            data: WindowPages = node.data[self._windows.index]
            live = [(digest, _unit(data.ids, page)) for page, digest in named if page >= data.holes]
            if live:
                found.setdefault("swa", []).extend(live)
        if self._states is not None and node.data[self._states.index].slot:
            found.setdefault("recurrent", []).append((named[0][1], node.data[self._states.index].slot))

    def _named(self, node: Node, first: int, last: int) -> list[bytes]:
        """Digests of the node's pages [first, last)."""
        parts = [node.edge]
        step = node.parent
        while step is not None:
            parts.append(step.edge)
            step = step.parent
        parts.reverse()
        path, page = b"".join(parts), self._page_bytes
        above = (len(path) - len(node.edge)) // page
        return list(digests(node.root.namespace, path, page, above + first, above + last))


def _unit(ids: bytes, place: int) -> int:
    return int.from_bytes(ids[_ID_BYTES * place : _ID_BYTES * (place + 1)], "little")
