"""Which products a decode step consists of.

Owns the lanes of running rows and of prefixes they share, from step to step, and the index tensors
of one step. Ignores the products themselves (`engine.attention.torch_fast`).

Shapes: B decode rows, L lanes, M rows of a shared prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.attention.lanes import Arena, Context, Lanes, LaneViews
from engine.attention.torch_ref import context_slots
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool


@dataclass(slots=True)
class OwnTile:
    """Rows over their own lanes. `rows_L` are batch rows in lane order, None for 0 to B - 1;
    `cells_L` is where each row's new token goes."""

    arena: Arena
    views: LaneViews
    rows_L: torch.Tensor | None
    cells_L: torch.Tensor


@dataclass(slots=True)
class SharedTile:
    """Rows over the prefixes they share. `rows_LM` are each prefix's rows, padded by repetition;
    entry `source[i]` of [L * M] is the result of batch row `rows[i]`. Both are None where the
    tile is exactly rows 0 to B - 1."""

    views: LaneViews
    rows_LM: torch.Tensor
    source: torch.Tensor | None
    rows: torch.Tensor | None


@dataclass(slots=True)
class DecodePlan:
    """`gathered` rows found no lane and read their whole context from the pool."""

    own: list[OwnTile] = field(default_factory=list)
    shared: list[SharedTile] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)


class DecodePlanner:
    """`min_saved_tokens` is how many repeated reads a shared prefix must save to become a tile."""

    def __init__(self, kv_pool: KVPool, budget_bytes: int, min_saved_tokens: int) -> None:
        self._pool = kv_pool
        self._own_lanes = Lanes(kv_pool, budget_bytes)
        self._prefix_lanes = Lanes(kv_pool, budget_bytes)
        self._min_saved_tokens = min_saved_tokens
        self._contexts: dict[int, Context] = {}
        self._prefixes: dict[int, Context] = {}

    @property
    def bytes(self) -> int:
        return self._own_lanes.bytes + self._prefix_lanes.bytes

    def plan(self, batch: ForwardBatch) -> DecodePlan:
        keys = batch.row_keys[: batch.num_decode]
        members = self._share(batch, keys)
        plan = DecodePlan()
        self._forget_absent(keys)
        present: list[Context] = []
        for row, key in enumerate(keys):
            context = self._place(batch, row, key)
            if context is None:
                plan.gathered.append(row)
                if key in self._prefixes:
                    members[self._prefixes[key]].remove(row)
            else:
                present.append(context)
        for context in present:
            self._catch_up(batch, context)
        for arena in self._own_lanes.arenas.values():
            plan.own.append(self._own_tile(arena, batch))
        for arena in self._prefix_lanes.arenas.values():
            plan.shared.append(self._shared_tile(arena, members, batch))
        return plan

    def _share(self, batch: ForwardBatch, keys: list[int]) -> dict[Context, list[int]]:
        """Find or load the step's shared prefixes; returns the rows of each."""
        members: dict[Context, list[int]] = {}
        prefixes: dict[int, Context] = {}
        for shared in batch.shared_prefixes:
            tokens = shared.num_pages * self._pool.page_size
            rows = range(shared.start, min(shared.end, batch.num_decode))
            if (len(rows) - 1) * tokens < self._min_saved_tokens:
                continue
            known = (self._prefixes.get(keys[row]) for row in rows)
            prefix = next((known for known in known if known is not None and known.length == tokens), None)
            if prefix is None:
                prefix = Context(start=0)
                if not self._prefix_lanes.place(prefix, tokens):
                    continue
                self._load(prefix, batch, rows[0], tokens)
            members.setdefault(prefix, []).extend(rows)
            prefixes.update((keys[row], prefix) for row in rows)
        for prefix in {id(prefix): prefix for prefix in self._prefixes.values()}.values():
            if prefix not in members:
                self._prefix_lanes.drop(prefix)
        self._prefixes = prefixes
        return members

    def _forget_absent(self, keys: list[int]) -> None:
        for key in self._contexts.keys() - set(keys):
            self._own_lanes.drop(self._contexts.pop(key))

    def _place(self, batch: ForwardBatch, row: int, key: int) -> Context | None:
        """The row's context with room for this step's token, or None without a lane."""
        prefix = self._prefixes.get(key)
        start = 0 if prefix is None else prefix.length
        needed = batch.seq_lens[row] - start
        context = self._contexts.get(key)
        if context is not None and context.arena is not None:
            if context.start == start and needed <= context.arena.capacity:
                context.row = row
                return context
            self._own_lanes.drop(context)
        context = Context(start=start, row=row)
        if not self._own_lanes.place(context, needed):
            self._contexts.pop(key, None)
            return None
        self._contexts[key] = context
        return context

    def _catch_up(self, batch: ForwardBatch, context: Context) -> None:
        """Make the context end just before this step's token, then make room for it: earlier
        tokens come from the pool, and tokens taken back are forgotten."""
        before = batch.seq_lens[context.row] - 1
        held = context.start + context.length
        assert context.arena is not None
        if held > before:
            context.arena.truncate(context, before - context.start)
        elif held < before:
            self._load(context, batch, context.row, before)
        context.length += 1

    def _load(self, context: Context, batch: ForwardBatch, row: int, end: int) -> None:
        assert context.arena is not None
        slots = context_slots(batch, row, self._pool.page_size, end)
        context.arena.load(context, slots[context.start + context.length :])

    def _own_tile(self, arena: Arena, batch: ForwardBatch) -> OwnTile:
        rows = [context.row for context in arena.contexts]
        cells = [context.lane * arena.capacity + context.length - 1 for context in arena.contexts]
        device = batch.input_ids_T.device
        cells_L = torch.tensor(cells, device=device)
        arena.reveal(cells_L)
        whole = rows == list(range(batch.num_decode))
        return OwnTile(arena, arena.views(), None if whole else torch.tensor(rows, device=device), cells_L)

    def _shared_tile(self, arena: Arena, members: dict[Context, list[int]], batch: ForwardBatch) -> SharedTile:
        groups = [members[context] for context in arena.contexts]
        width = max(1, max(len(rows) for rows in groups))
        padded = [rows + (rows or [0])[:1] * (width - len(rows)) for rows in groups]
        device = batch.input_ids_T.device
        rows_LM = torch.tensor(padded, device=device)
        if [row for rows in padded for row in rows] == list(range(batch.num_decode)):
            return SharedTile(arena.views(), rows_LM, None, None)
        source = [lane * width + i for lane, rows in enumerate(groups) for i in range(len(rows))]
        rows = [row for rows in groups for row in rows]
        return SharedTile(
            arena.views(),
            rows_LM,
            torch.tensor(source, dtype=torch.long, device=device),
            torch.tensor(rows, dtype=torch.long, device=device),
        )
