"""Dense copies of contexts that lie scattered over pages.

Owns lanes: contiguous storage where a running context is copied once and then only appended to, so
that decoding reads rows in order instead of gathering pages in every layer of every step. Ignores
which contexts deserve a lane and what attends to them.

Lanes are grouped by capacity (powers of two) into arenas, so that one product covers all lanes of an
arena and at most half of it is padding.

Shapes: L lanes, S tokens, K key/value heads, H head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.memory.kv_pool import KVPool

MIN_CAPACITY = 64
READ_MULTIPLE = 16


@dataclass(slots=True, eq=False)
class Context:
    """Positions [start, start + length) of a row, or of a prefix shared by rows."""

    start: int
    length: int = 0
    arena: Arena | None = None
    lane: int = -1
    row: int = -1
    """The batch row it belongs to in the step being planned."""


@dataclass(slots=True)
class LaneViews:
    """What one product over an arena reads: `mask_L11S` hides what a lane does not hold."""

    mask_L11S: torch.Tensor | None
    k_LKSH: list[torch.Tensor]
    v_LKSH: list[torch.Tensor]


class Arena:
    """Lanes [0, count) are in use, without holes. Storage past a lane's length is finite."""

    def __init__(self, capacity: int, kv_pool: KVPool) -> None:
        self.capacity = capacity
        self.contexts: list[Context] = []
        self._pool = kv_pool
        self._lanes = 0
        self._layers: list[torch.Tensor] = []
        self._cells: list[torch.Tensor] = []
        self._mask_LS = torch.empty(0)
        self._masked: LaneViews | None = None
        self._masked_for = (0, 0)

    @property
    def count(self) -> int:
        return len(self.contexts)

    def bytes_with(self, lanes: int) -> int:
        """Bytes of storage once it has room for `lanes`."""
        room = self._lanes if lanes <= self._lanes else max(lanes, 2 * self._lanes)
        return room * self.capacity * self._pool.token_bytes

    def add(self, context: Context) -> None:
        if self.count == self._lanes:
            self._grow(max(self.count + 1, 2 * self._lanes))
        context.arena, context.lane = self, self.count
        self.contexts.append(context)
        self._mask_LS[context.lane].fill_(float("-inf"))
        for layer in self._layers:
            layer[context.lane].zero_()

    def remove(self, context: Context) -> None:
        """The last lane moves into the gap."""
        last = self.contexts.pop()
        if last is not context:
            for layer in self._layers:
                layer[context.lane, : last.length].copy_(layer[last.lane, : last.length])
                layer[context.lane, last.length :].zero_()
            self._mask_LS[context.lane].copy_(self._mask_LS[last.lane])
            last.lane = context.lane
            self.contexts[last.lane] = last
        context.arena, context.lane, context.length = None, -1, 0

    def load(self, context: Context, slots: torch.Tensor) -> None:
        """Append the pool's tokens at `slots`, in every layer."""
        start, end = context.length, context.length + slots.shape[0]
        assert end <= self.capacity, f"{end} tokens in a lane of {self.capacity}"
        for index, layer in enumerate(self._layers):
            torch.index_select(self._pool.tokens(index), 0, slots, out=layer[context.lane, start:end])
        self._mask_LS[context.lane, start:end].zero_()
        context.length = end

    def reveal(self, cells: torch.Tensor) -> None:
        """Make cells (lane * capacity + offset) readable."""
        self._mask_LS.view(-1).index_fill_(0, cells, 0.0)

    def cells(self, layer: int) -> torch.Tensor:
        """View [L * S, 2K, H] of a layer, to write into."""
        return self._cells[layer]

    def truncate(self, context: Context, length: int) -> None:
        """Forget what a context holds past `length` tokens."""
        self._mask_LS[context.lane, length:].fill_(float("-inf"))
        context.length = length

    def views(self) -> LaneViews:
        """Views over the lanes in use. Lanes of one length need no mask; otherwise the views reach
        a little past the longest and are kept until that moves on or the count changes."""
        lengths = {context.length for context in self.contexts}
        longest = max(lengths)
        if len(lengths) == 1:
            return self._views_of(longest, None)
        reach = min(-(-longest // READ_MULTIPLE) * READ_MULTIPLE, self.capacity)
        if self._masked is None or self._masked_for != (self.count, reach):
            self._masked = self._views_of(reach, self._mask_LS[: self.count, None, None, :reach])
            self._masked_for = (self.count, reach)
        return self._masked

    def _views_of(self, reach: int, mask_L11S: torch.Tensor | None) -> LaneViews:
        heads, size = self._pool.num_kv_heads, self._pool.head_dim
        shape = (self.count, heads, reach, size)
        token = 2 * heads * size
        strides = (self.capacity * token, size, token, 1)
        return LaneViews(
            mask_L11S,
            [layer.as_strided(shape, strides) for layer in self._layers],
            [layer.as_strided(shape, strides, heads * size) for layer in self._layers],
        )

    def _grow(self, lanes: int) -> None:
        pool = self._pool
        shape = (lanes, self.capacity, 2 * pool.num_kv_heads, pool.head_dim)
        for index in range(pool.num_layers):
            grown = torch.zeros(shape, dtype=pool.dtype, device=pool.device)
            if self._lanes:
                grown[: self._lanes].copy_(self._layers[index])
                self._layers[index] = grown
            else:
                self._layers.append(grown)
        self._cells = [layer.view(-1, *shape[2:]) for layer in self._layers]
        mask = torch.full((lanes, self.capacity), float("-inf"), dtype=pool.dtype, device=pool.device)
        mask[: self._lanes].copy_(self._mask_LS.view(self._lanes, -1) if self._lanes else mask[:0])
        self._mask_LS, self._lanes, self._masked = mask, lanes, None


class Lanes:
    """All arenas of one purpose, within a budget of bytes."""

    def __init__(self, kv_pool: KVPool, budget_bytes: int) -> None:
        self._pool = kv_pool
        self._budget = budget_bytes
        self.arenas: dict[int, Arena] = {}

    @property
    def bytes(self) -> int:
        return sum(arena.bytes_with(0) for arena in self.arenas.values())

    def place(self, context: Context, tokens: int) -> bool:
        """Give a context a lane with room for `tokens`; false where the budget forbids it."""
        capacity = max(MIN_CAPACITY, 1 << (tokens - 1).bit_length())
        arena = self.arenas.get(capacity) or Arena(capacity, self._pool)
        grown = arena.bytes_with(arena.count + 1) - (arena.bytes_with(0) if capacity in self.arenas else 0)
        if self.bytes + grown > self._budget:
            return False
        self.arenas[capacity] = arena
        arena.add(context)
        return True

    def drop(self, context: Context) -> None:
        arena = context.arena
        if arena is None:
            return
        arena.remove(context)
        if not arena.count:
            del self.arenas[arena.capacity]
