"""What the device must know to decode a step: buffers, and how shared prefixes become pieces.

Owns the fixed buffers that captured graphs read, their filling from the host when the batch's
composition changes, and the workspace. Ignores the kernels that read them.

Shapes: B rows, P page-table columns, N query heads, K key/value heads, H head size, W work items,
X prefix pieces, S prefix states a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.attention.fixed_prefixes import lay_out_fixed
from engine.batch import SharedPrefix
from engine.kernels.attention_tile import ceil_div, power_of_two
from engine.kernels.decode_attention import States, TileConfig
from engine.kernels.decode_pieces import SHORT, cut_pieces, whole_pieces
from engine.kernels.decode_work import ITEM, cut_rows
from engine.memory.transfer import staged

MIN_PREFIX_PIECE = 256
"""Tokens; shorter pieces spend more on storing states than they gain in parallelism."""

STATE_BYTES = 64 << 20
"""Bound on prefix states of a batch."""

MIN_SAVED_BYTES = 12 << 20
"""Reading less than this again costs less than the additional launch (about 3 us of a fast GPU)."""

MIN_SAVED_SEGMENT_BYTES = 256 << 10
"""A prefix that saves less is not worth its pieces."""

WAVES = 2
"""Programs a multiprocessor should have to choose from where rows are few or of unequal length."""

FIXED_SPLITS = 4
"""Items of a row's tail in the deterministic engine, at most; only long rows' tails have more than one."""


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """What buffers are sized by."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    itemsize: int
    processors: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Of a query's stored state, in fp32."""
        return 4 * self.num_heads * (self.head_dim + 1)


class Workspace:
    """Room that batches take turns in: whoever asks for no more than the largest before shares it.
    Outgrown rooms stay: captured graphs hold their addresses."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._rooms: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []
        self._arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def states(self, name: str, leading: tuple[int, ...], heads: int, size: int) -> States:
        count = heads
        for length in leading:
            count *= length
        room = self._rooms.get(name)
        if room is None or room.shape[0] < count * (size + 1):
            if room is not None:
                self._outgrown.append(room)
            room = self._rooms[name] = torch.empty(count * (size + 1), dtype=torch.float32, device=self._device)
        mean = room[: count * size].view(*leading, heads, size)
        return States(mean, room[count * size : count * (size + 1)].view(*leading, heads))

    def fitting(self, name: str, heads: int, size: int) -> int:
        """States that a room holds now."""
        room = self._rooms.get(name)
        return 0 if room is None else room.shape[0] // (heads * (size + 1))

    def arrived(self, count: int) -> torch.Tensor:
        """Zeros that every launch leaves as zeros."""
        if self._arrived.shape[0] < count:
            self._outgrown.append(self._arrived)
            self._arrived = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._arrived[:count]


@dataclass(slots=True)
class FixedPieces:
    """Of each row's pieces the first `shared_B` are in a list of counts_2[0]; `cut` adds what is missing
    and leaves the number of all in counts_2[1]."""

    shared_B: torch.Tensor
    counts_2: torch.Tensor


@dataclass(slots=True)
class DecodeMetadata:
    """Buffers of at most B rows. Lengths, tables and write slots may be written on the device at any
    time; rows of length 0 are no-ops whose output is zeros. `cut` follows once before the layers.

    `own_start_B` and `prefix_parts_B` say where a row's own tokens start and how many stored states
    cover those before; with `pieces_X8` they come from `set_prefixes`. With `fixed`, they follow from
    the lengths in `cut`, and `set_prefixes` only says which pieces are read for several rows.
    """

    size: AttentionSize
    page_tables_BP: torch.Tensor
    seq_lens_B: torch.Tensor
    write_slots_B: torch.Tensor
    own_start_B: torch.Tensor
    prefix_parts_B: torch.Tensor
    pieces_X8: torch.Tensor
    items_W8: torch.Tensor
    partial: States
    arrived_BK: torch.Tensor
    decode_tiles: TileConfig
    prefix_tiles: TileConfig
    extra: int
    prefix: States | None = None
    packed: torch.Tensor | None = field(default=None, repr=False)
    """What `own_start_B`, `prefix_parts_B` and `pieces_X8` are views of; with `fixed`, its parts."""
    fixed: FixedPieces | None = None
    window: DecodeMetadata | None = None
    """What windowed layers read, where their pages are others (`engine.attention.window_metadata`)."""
    look: int = 0
    """The last tokens of rows that are cut into items; 0 for all."""
    splits: int = 0
    """Items a row's tokens are cut into at most, by their number alone; 0 where rows share the device's room."""

    @property
    def max_rows(self) -> int:
        return self.seq_lens_B.shape[0]

    def cut(self) -> None:
        """Cut the rows, by the lengths on the device now, into work items."""
        multiple, fixed = self.decode_tiles.block_n, self.fixed
        least = max(SHORT, multiple) if self.splits else multiple
        if fixed is not None:
            cut_pieces(
                self.seq_lens_B,
                fixed.shared_B,
                self.pieces_X8,
                fixed.counts_2,
                self.own_start_B,
                self.prefix_parts_B,
            )
        cut_rows(
            self.seq_lens_B,
            self.own_start_B,
            self.prefix_parts_B,
            self.items_W8,
            self.extra,
            least,
            multiple,
            self.splits,
            self.look,
        )
        if self.window is not None:
            self.window.cut()

    def set_prefixes(self, prefixes: list[SharedPrefix]) -> int:
        """Have rows [start, end) of each prefix read its pages once. Returns how many were kept.

        Ranges may nest, the outer with fewer pages: then the inner prefix starts where the outer
        ends. While prefixes are set, row `start` of each must keep its page-table entries, and rows of
        it that are not of length 0 must be longer than it. Those that save the least are left out
        where the buffers are too small. One copy to the device.
        """
        assert self.packed is not None
        if self.prefix is None:
            assert not prefixes, "the buffers were planned without shared prefixes"
            return 0
        rows, capacity, max_states = self.max_rows, self.pieces_X8.shape[0], self.prefix.lse_IN.shape[0]
        if self.fixed is not None:
            per_tile = self.prefix_tiles.block_m // self.size.group
            shared, pieces = lay_out_fixed(prefixes, self.size.page_size, per_tile, rows)
            self._copy([len(pieces), 0, *shared, *(value for piece in pieces for value in piece)])
            return len(prefixes)
        given = (prefixes, self.size, self.prefix_tiles, rows, max_states, capacity)
        kept, (own_start, parts, pieces) = fit_prefixes(*given)
        flat = own_start + parts + [value for piece in pieces for value in piece]
        self._copy(flat + [0] * (self.packed.shape[0] - len(flat)))
        return kept

    def _copy(self, flat: list[int]) -> None:
        assert self.packed is not None
        values = staged(np.array(flat, dtype=np.int32), self.packed.device)
        self.packed[: len(flat)].copy_(values, non_blocking=True)


def lay_out_prefixes(
    prefixes: list[SharedPrefix],
    size: AttentionSize,
    tiles: TileConfig,
    num_rows: int,
    max_states: int,
    capacity: int,
    queries: float | None = None,
) -> tuple[list[int], list[int], list[list[int]]] | None:
    """(own_start_B, prefix_parts_B, pieces_X8) of nested prefixes, or None where they do not fit.

    Rows of more queries than one have about `queries` each: their pieces are not cut into tiles, and end at
    multiples of a tile's tokens, at the expense of the prefix.
    """
    own_start, parts = [0] * num_rows, [0] * num_rows
    per_tile = tiles.block_m // size.group
    segments = []
    for prefix in sorted(prefixes, key=lambda prefix: prefix.num_pages):
        end, first = prefix.num_pages * size.page_size, own_start[prefix.start]
        if queries is not None:
            end = end // tiles.block_n * tiles.block_n
        covered = set(own_start[prefix.start : prefix.end])
        assert covered == {first}, f"rows {prefix.start} to {prefix.end} share nested prefixes in part only"
        assert prefix.end <= num_rows, f"rows to {prefix.end} of {num_rows}"
        if end > first:
            segments.append((prefix.start, prefix.end, first, end))
            own_start[prefix.start : prefix.end] = [end] * (prefix.end - prefix.start)
    wanted = wanted_pieces(size)
    each = queries or 1
    work = sum(ceil_div(int((stop - start) * each), per_tile) * (end - first) for start, stop, first, end in segments)
    length = max(MIN_PREFIX_PIECE, ceil_div(work, wanted))
    length = ceil_div(length, tiles.block_n) * tiles.block_n
    pieces: list[list[int]] = []
    for start, stop, first, end in segments:
        state = parts[start]
        room = (max_states - state + 1) // 2 if len(segments) > 1 else max_states
        if room < 1:
            return None
        count = min(ceil_div(end - first, length), room)
        piece = ceil_div(ceil_div(end - first, count), tiles.block_n) * tiles.block_n
        count = ceil_div(end - first, piece)
        together = per_tile if queries is None else stop - start
        for split in range(count):
            lo, hi = first + split * piece, min(first + (split + 1) * piece, end)
            for row in range(start, stop, together):
                pieces.append([row, min(together, stop - row), lo, hi, start, state + split, 0, 0])
        parts[start:stop] = [state + count] * (stop - start)
    return None if len(pieces) > capacity else (own_start, parts, pieces)


def fit_prefixes(
    prefixes: list[SharedPrefix],
    size: AttentionSize,
    tiles: TileConfig,
    num_rows: int,
    max_states: int,
    capacity: int,
    queries: float | None = None,
) -> tuple[int, tuple[list[int], list[int], list[list[int]]]]:
    """How many prefixes were kept, and their layout: those that save the least are left out where they do not fit."""
    kept = list(prefixes)
    while True:
        laid = lay_out_prefixes(kept, size, tiles, num_rows, max_states, capacity, queries)
        if laid is not None:
            return len(kept), laid
        kept.remove(min(kept, key=lambda prefix: (prefix.end - prefix.start - 1) * prefix.num_pages))


def wanted_pieces(size: AttentionSize) -> int:
    """Pieces that fill the device."""
    return ceil_div(2 * size.processors, size.num_kv_heads)


def worthwhile(prefixes: list[SharedPrefix], size: AttentionSize, queries: float | None = None) -> list[SharedPrefix]:
    """The prefixes, if reading them once saves more than the additional launch costs. Rows of more queries than
    one have about `queries` each, whose states are written and read again."""
    saved = saved_bytes(prefixes, size, queries)
    chosen = [i for i, value in enumerate(saved) if value >= MIN_SAVED_SEGMENT_BYTES]
    return [prefixes[i] for i in chosen] if sum(saved[i] for i in chosen) >= MIN_SAVED_BYTES else []


def saved_bytes(prefixes: list[SharedPrefix], size: AttentionSize, queries: float | None = None) -> list[float]:
    """What reading each of them once saves in a layer."""
    page_bytes = size.page_size * size.token_bytes
    state_bytes = 0.0 if queries is None else queries * size.state_bytes * 2
    return [
        (prefix.end - prefix.start - 1) * prefix.num_pages * page_bytes - (prefix.end - prefix.start) * state_bytes
        for prefix in prefixes
    ]


def decode_buffers(
    size: AttentionSize,
    workspace: Workspace,
    tiles: tuple[TileConfig, TileConfig],
    max_rows: int,
    device: torch.device | str,
    tables: torch.Tensor | int,
    shared: bool,
    fixed: bool = False,
    max_pieces: int | None = None,
) -> DecodeMetadata:
    """Buffers for batches of up to `max_rows`, all rows of length 0. `tables` is a table to use or the
    number of columns of a new one; `max_pieces` bounds a batch known in advance. With `fixed`, rows
    are cut at positions that do not depend on each other, shared or not."""
    decode_tiles, prefix_tiles = tiles
    extra = ceil_div(WAVES * size.processors, size.num_kv_heads) + max_rows // 4
    if isinstance(tables, int):
        tables = torch.zeros((max_rows, tables), dtype=torch.int32, device=device)
    num_states = max(2, min(64, STATE_BYTES // (max_rows * size.state_bytes)))
    if max_pieces is None:
        per_tile = prefix_tiles.block_m // size.group
        max_pieces = ceil_div(max_rows, per_tile) + max_rows // 4 + wanted_pieces(size)
    num_items = max_rows * FIXED_SPLITS if fixed else max_rows + extra
    if fixed:
        assert SHORT % prefix_tiles.block_n == 0, f"pieces of {SHORT} in tiles of {prefix_tiles.block_n}"
        num_states = max(1, whole_pieces(tables.shape[1] * size.page_size))
        max_pieces = max_rows * num_states
    pieces = max_pieces if shared or fixed else 0
    heads = (size.num_heads, size.head_dim)
    lead = 2 + max_rows if fixed else 2 * max_rows
    packed = torch.zeros(lead + ITEM * pieces, dtype=torch.int32, device=device)
    columns = torch.zeros(2 * max_rows, dtype=torch.int32, device=device) if fixed else packed
    return DecodeMetadata(
        size=size,
        page_tables_BP=tables,
        seq_lens_B=torch.zeros(max_rows, dtype=torch.int32, device=device),
        write_slots_B=torch.zeros(max_rows, dtype=torch.int64, device=device),
        own_start_B=columns[:max_rows],
        prefix_parts_B=columns[max_rows : 2 * max_rows],
        pieces_X8=packed[lead:].view(pieces, ITEM),
        items_W8=torch.full((num_items, ITEM), -1, dtype=torch.int32, device=device),
        partial=workspace.states("items", (num_items,), *heads),
        arrived_BK=workspace.arrived(max_rows * size.num_kv_heads),
        decode_tiles=decode_tiles,
        prefix_tiles=prefix_tiles,
        extra=extra,
        prefix=workspace.states("prefix", (num_states, max_rows), *heads) if shared or fixed else None,
        packed=packed,
        fixed=FixedPieces(packed[2:lead], packed[:2]) if fixed else None,
        splits=FIXED_SPLITS if fixed else 0,
    )


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number elsewhere, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def padded_head_dim(head_dim: int) -> int:
    return max(16, power_of_two(head_dim))
