"""What callers of the prefix cache hold: matches, receipts, extensions and statistics.

Owns these records. Ignores how they come about. A match holds nothing and may be dropped at will;
a receipt holds a pinned path until it is released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine.cache.full import path_pages
from engine.cache.key import Namespace

if TYPE_CHECKING:
    from engine.cache.component import Held
    from engine.cache.node import Node


class ReceiptError(AssertionError):
    """A receipt was used after its release."""


class Match(msgspec.Struct, frozen=True, eq=False):  # made for every request: a dataclass takes thrice as long
    """What the tree knew of a prompt when it was asked. Lengths are in tokens, whole pages.

    `structural` is how deep the tree knows the tokens, `usable` how deep every component can
    resume, `limited_by` the component that made the difference, "" without one. Where the two
    differ, `structural` is the branch point at which the coming prefill should keep a state.
    """

    namespace: Namespace
    tokens: bytes
    num_bytes: int
    node: Any
    """The node that holds the boundary; None for no namespace."""
    structural: int
    usable: int
    limited_by: str
    changes: int

    def __repr__(self) -> str:
        return f"Match(structural={self.structural}, usable={self.usable}, limited_by={self.limited_by!r})"


class Receipt:
    """A pinned path: `length` tokens whose states stay until this receipt is released.

    `held` lists what the restricting components took for it, and nothing else is given back.
    """

    __slots__ = ("held", "length", "node")

    def __init__(self, node: Node, length: int, held: list[Held] | None) -> None:
        self.node: Node | None = node
        """The node that ends at `length`; None once released."""
        self.length = length
        self.held = held

    @property
    def live(self) -> bool:
        return self.node is not None

    @property
    def namespace(self) -> Namespace:
        return live_node(self).root.namespace

    def pages(self) -> np.ndarray:
        """Page ids of tokens [0, length): int32 [length / page_size], read-only."""
        return path_pages(live_node(self))


class Extension(msgspec.Struct, frozen=True, eq=False):
    """The outcome of an insert: tokens [start, end) are now in the tree.

    `pages` are their canonical page ids, int32 [(end - start) / page_size]; the first `duplicates`
    of them were in the tree already, and the request's own pages for those have been freed.
    """

    start: int
    end: int
    pages: np.ndarray
    duplicates: int


def live_node(receipt: Receipt) -> Node:
    """The receipt's node; raises `ReceiptError` after release."""
    node = receipt.node
    if node is None:
        raise ReceiptError("the receipt has been released")
    return node


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts in tokens, nodes, roots and receipts. The hit rate is `hit_tokens / lookup_tokens`,
    both summed over acquired matches."""

    epoch: int
    tokens: int
    pinned_tokens: int
    evictable_tokens: int
    nodes: int
    roots: int
    receipts: int
    lookup_tokens: int
    hit_tokens: int
    inserted_tokens: int
    duplicate_tokens: int
    evicted_tokens: int
    flushed_tokens: int
