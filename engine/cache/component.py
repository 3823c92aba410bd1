"""What the tree asks of each kind of attention state.

Owns the contract between the tree and a state kind. The tree knows tokens, nodes and pins; a
component knows which of its states a node holds and where a hit may end. Everything here is
bookkeeping on opaque per-node values: methods return new values and what has become surplus, and
the tree puts them in place, so that a failing operation can be undone by putting the old ones
back. Ignores device memory altogether.

Units: `start`, `end`, `at`, `keep` are tokens, multiples of the page size. A *payload* is what a
request hands over for a stretch of tokens; a *piece* is part of a payload or of a node's value that
changes hands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.cache.node import Node
    from engine.cache.radix_tree import RadixTree
    from engine.memory.allocator import PageAllocator


class Component(ABC):
    """One kind of attention state along the tree's paths."""

    name: str
    allocator: PageAllocator
    """Of the units that its values name."""
    every_boundary = False
    """True if a hit may end at every page boundary the tree knows; `accepts`, `pin`, `unpin`, `used`,
    `placed`, `demoted` and `removed` are then never called, for the tree's own path pins suffice. Of the others
    the tree calls `pin`, `used` and `placed` where they are overridden."""
    until_copied = False
    """True if only a receipt that has just been acquired holds its states, until they are copied."""
    index: int
    """The component's place in every node's `data`; the tree sets it."""

    def accepts(self, node: Node, boundary: int) -> bool:
        """Whether a hit may end `boundary` tokens deep, inside `node` or at its end.

        Where it may not, it may not end earlier within this node either: the tree asks nodes from below,
        each for the deepest boundary that it could give.
        """
        return True

    def pin(self, node: Node, length: int) -> Any:
        """Hold what a hit of `length` tokens ending at `node` needs and the pins of its path's nodes do not
        keep: None for nothing.

        Name it by depth, not by a list of nodes: a node may be split while it is held.
        """
        return None

    def unpin(self, held: Any) -> None:
        """Let go of exactly what `pin` returned."""
        return None

    def used(self, node: Node, length: int) -> None:
        """A receipt that ends at `node` has been released: what it used is the most recently used."""
        return None

    @abstractmethod
    def attach(self, payload: Any, start: int, end: int) -> tuple[Any, list[Any]]:
        """Value of a new node for payload tokens [start, end), and the pieces it takes over."""

    def enter(self, payload: Any, length: int) -> Any:
        """`attach` a payload's `length` tokens and `adopt` what they take over, in one step: the value. All or
        nothing. Most inserts are this, so components may override it by something faster."""
        value, pieces = self.attach(payload, 0, length)
        if pieces:
            self.adopt(pieces)
        return value

    def leave(self, value: Any) -> None:
        """Undo `enter`."""
        pieces = self.pieces(value)
        if pieces:
            self.disown(pieces)

    def lengthen(self, data: Any, payload: Any, length: int) -> Any:
        """`grow` by a payload's `length` tokens and `adopt`, in one step: the node's new value, or None."""
        grown = self.grow(data, payload, 0, length)
        if grown is None:
            return None
        value, pieces = grown
        if pieces:
            self.adopt(pieces)
        return value

    @abstractmethod
    def pieces(self, value: Any) -> list[Any]:
        """All that a node's value holds; empty if nothing."""

    @abstractmethod
    def grow(self, data: Any, payload: Any, start: int, end: int) -> tuple[Any, list[Any]] | None:
        """As `attach`, for a node extended at its end; None if its present end must stay a node."""

    @abstractmethod
    def overlap(self, data: Any, payload: Any, start: int, end: int) -> tuple[Any, list[Any], list[Any]]:
        """Payload tokens [start, end) met a whole node the tree already has.

        Returns the node's new value, the pieces it takes over, and the surplus pieces.
        """

    @abstractmethod
    def split(self, data: Any, at: int) -> tuple[Any, Any]:
        """Values of the two halves of a node cut `at` tokens below its start, pins included."""

    @abstractmethod
    def trim(self, data: Any, keep: int) -> tuple[Any, list[Any]]:
        """Value of an unpinned leaf cut to its first `keep` tokens, and the pieces to be released."""

    def placed(self, node: Node) -> None:
        """The node is new, or the tree has put another value in its place."""
        return None

    def demoted(self, node: Node) -> None:
        """The node's root was retired: what it holds goes before everything else."""
        return None

    def removed(self, nodes: list[Node]) -> None:
        """These nodes are no longer in the tree; `drop` frees what they held."""
        return None

    @abstractmethod
    def adopt(self, pieces: list[Any]) -> None:
        """Pieces pass from a request to the tree. All or nothing."""

    @abstractmethod
    def disown(self, pieces: list[Any]) -> None:
        """Undo `adopt`."""

    @abstractmethod
    def discard(self, pieces: list[Any]) -> None:
        """Free a request's surplus pieces. All or nothing."""

    @abstractmethod
    def release(self, pieces: list[Any]) -> None:
        """Free pieces the tree held."""

    @abstractmethod
    def drop(self, values: list[Any]) -> None:
        """Free all that the given nodes' values hold: these nodes are gone."""

    @abstractmethod
    def evict(self, tree: RadixTree, want: int) -> int:
        """Free up to `want` of this component's units, least recently used first; the number freed."""

    @abstractmethod
    def evictable(self, tree: RadixTree) -> int:
        """Units that `evict` could free now."""

    @abstractmethod
    def count(self, data: Any) -> int:
        """Units a node's value holds."""

    @abstractmethod
    def check(self, held: list[tuple[Any, int]]) -> None:
        """Assert that the (value, tokens) of all nodes are sound and agree with the allocator."""


Held = tuple[Component, Any]
"""A component, and what its `pin` returned."""
