"""What adapters add to the products of one step, by two kernels a site.

Owns the tables and the workspace of a step on a GPU, and which variant of the kernels serves its slots.
Ignores what launches compute (`lora.kernels`).

Shapes: T rows of the step, K inputs, N outputs of a site's parts side by side, D hidden, G parts, P splits,
R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from lora.device_pool import BASE, DevicePool
from lora.geometry import Kind
from lora.kernels.expand import lora_expand
from lora.kernels.shrink import MIN_RANK, ShrinkConfig, lora_shrink, num_splits
from lora.segments import Segments, Tiles, count_tiles, most_tiles, tile_tier
from lora.stack import Stack

FEW_BLOCK, SMALL_BLOCK, LARGE_BLOCK, MANY_ROWS = 4, 16, 64, 512
"""Rows of a tile where slots have few each, where they have more, and in steps of more rows than the last."""

MAX_RANK = 64
"""Of adapters whose products ride along with the model's: wider factors do not fit a program beside all else it
holds."""

MORE_TILES = 1.5
"""Times as many tiles that those of few rows may take."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What the launches of a step are made for. `rank` is the widest met, padded to what kernels take; without
    `mixed` every slot adapts a site at exactly that or not at all; `biased`, `embedding` and `head` say what
    some slot has. `tiles` bounds those of a step, `block` the rows of one. Where `stacked` is not 0, first products
    come out of the model's own, which have so many places for them (`lora.stack`)."""

    rank: int
    mixed: bool
    biased: bool
    embedding: bool
    head: bool
    block: int
    tiles: int
    stacked: int = 0

    @staticmethod
    def of(pool: DevicePool, slots_T: np.ndarray, fixed_tiles: bool = False, stack: Stack | None = None) -> Variant:
        """With `fixed_tiles`, tiles are the same however many rows there are: a row's bits do not depend on its
        batch. A step given a `stack` uses it where that has room."""
        block = SMALL_BLOCK if fixed_tiles else _block(slots_T)
        tiles = tile_tier(len(slots_T), count_tiles(slots_T, block), block)
        return Variant._of(pool, slots_T, block, tiles)._stacked_in(stack, slots_T, len(slots_T))

    @staticmethod
    def uneven(pool: DevicePool, slots: np.ndarray, rows: int, stack: Stack | None = None) -> Variant:
        """For `rows` rows, however many of them belong to each of these slots and to the base."""
        count = len(np.union1d(slots, [BASE]))
        few, small = (most_tiles(rows, count, block) for block in (FEW_BLOCK, SMALL_BLOCK))
        block = LARGE_BLOCK if rows > MANY_ROWS else FEW_BLOCK if few <= small * MORE_TILES else SMALL_BLOCK
        tiles = tile_tier(rows, most_tiles(rows, count, block), block)
        return Variant._of(pool, slots, block, tiles)._stacked_in(stack, slots, rows)

    def _stacked_in(self, stack: Stack | None, slots: np.ndarray, rows: int) -> Variant:
        if stack is None or rows > MANY_ROWS or self.rank > MAX_RANK:
            return self
        adapters = len(np.setdiff1d(slots, [BASE]))
        return replace(self, stacked=stack.places_for(adapters, self.rank))

    @staticmethod
    def _of(pool: DevicePool, slots: np.ndarray, block: int, tiles: int) -> Variant:
        traits = [pool.traits(slot) for slot in np.unique(slots).tolist() if slot != BASE]
        rank = max((trait.rank for trait in traits), default=0)
        return Variant(
            max(MIN_RANK, rank),
            rank < MIN_RANK or any(trait.least != rank for trait in traits),
            any(trait.biased for trait in traits),
            any(trait.embedding for trait in traits),
            any(trait.head for trait in traits),
            block,
            tiles,
        )


def _block(slots_T: np.ndarray) -> int:
    """Tiles of few rows waste less where slots have few, but where that makes many more tiles, factors are read
    more often."""
    if len(slots_T) > MANY_ROWS:
        return LARGE_BLOCK
    few, small = count_tiles(slots_T, FEW_BLOCK), count_tiles(slots_T, SMALL_BLOCK)
    return FEW_BLOCK if few <= small * MORE_TILES else SMALL_BLOCK


class KernelStep:
    """A step of `len(slots_T)` rows, `slots_T` being each row's slot. A captured one is filled anew for others
    of its variant."""

    def __init__(
        self,
        pool: DevicePool,
        slots_T: np.ndarray,
        fixed_tiles: bool = False,
        variant: Variant | None = None,
        stack: Stack | None = None,
    ) -> None:
        """With a `variant` that is stacked, in that `stack`."""
        self.pool = pool
        self.slots_T = slots_T
        self.variant = Variant.of(pool, slots_T, fixed_tiles) if variant is None else variant
        self._fixed = fixed_tiles
        self._tiles: Tiles | None = None
        self._works: dict[int, torch.Tensor] = {}
        assert stack is not None or not self.variant.stacked, "a stacked step has a stack"
        self.stack = stack if self.variant.stacked else None
        self.prepare(slots_T)

    @property
    def tiles(self) -> Tiles:
        """Every row, those of the base first. Made when a site first needs them, so that a step which needs none
        costs nothing; a step that will be captured asks for them before."""
        if self._tiles is None:
            self._tiles = Tiles(len(self.slots_T), self.variant.tiles, self.variant.block, self.pool.device)
            self._tiles.fill(Segments.of(self.slots_T, with_base=True))
        return self._tiles

    def fill(self, slots_T: np.ndarray) -> int:
        """Serve these rows from the next launch on. Returns as `prepare` does."""
        assert len(slots_T) == len(self.slots_T), f"{len(slots_T)} rows, made for {len(self.slots_T)}"
        copied = self.prepare(slots_T)
        if not np.array_equal(slots_T, self.slots_T):
            self.slots_T = slots_T
            self.tiles.fill(Segments.of(slots_T, with_base=True))
        return copied

    def prepare(self, slots: np.ndarray) -> int:
        """Have what launches read of these slots where they read it. Returns how many adapters had to be copied
        behind the weights for that."""
        adapters = set(slots.tolist()) - {BASE}
        self.pool.await_ready(adapters)
        if self.stack is None:
            return 0
        return self.stack.ensure(adapters, self.variant.stacked, self.variant.rank)

    def weight(self, site: int, weight_NK: torch.Tensor) -> torch.Tensor:
        """What the model's product at a site takes for its weight."""
        if self.stack is None:
            return weight_NK
        return self.stack.weight(site, self.variant.stacked, self.variant.rank)

    def add_(self, site: int, x_TK: torch.Tensor, y_TN: torch.Tensor, outputs: slice = slice(None)) -> None:
        if self.variant.head or self.pool.geometry.sites[site].kind is not Kind.HEAD:
            self._expand(site, self.shrunk(site, x_TK), y_TN, outputs)

    def add_embedding_(self, site: int, ids_T: torch.Tensor, y_TD: torch.Tensor) -> None:
        if self.variant.embedding:
            self._expand(site, self.shrunk(site, ids_T), y_TD)

    def padded(self, rows: int) -> KernelStep:
        """The same with rows of the base behind, up to `rows`."""
        padding_P = np.full(rows - len(self.slots_T), BASE, dtype=self.slots_T.dtype)
        return KernelStep(self.pool, np.concatenate((self.slots_T, padding_P)), self._fixed)

    def rows(self, rows_R: np.ndarray) -> KernelStep:
        return KernelStep(self.pool, self.slots_T[rows_R], self._fixed)

    def shrunk(
        self, site: int, x_TK: torch.Tensor, splits: int | None = None, warps: int = ShrinkConfig().warps
    ) -> torch.Tensor:
        """The first product [P, G, T, R], good until the next of its size. `splits` of the inputs, if not as
        many as follow from their number."""
        geometry = self.pool.geometry
        gathered = geometry.sites[site].kind is Kind.EMBEDDING
        splits = 1 if gathered else splits or num_splits(geometry.inputs(site))
        h_PGTR = self.work(site % 2, splits, len(geometry.widths(site)))
        lora_shrink(self.pool, site, x_TK, self.tiles, h_PGTR, self.variant.mixed, ShrinkConfig(warps=warps))
        return h_PGTR

    def work(self, place: int, splits: int, parts: int) -> torch.Tensor:
        """Room for a first product [P, G, T, R]. Two `place`s do not overlap."""
        shape = splits, parts, max(1, len(self.slots_T)), self.variant.rank
        work_U = self._works.get(place)
        if work_U is None or work_U.numel() < math.prod(shape):
            work_U = torch.empty(math.prod(shape), dtype=torch.float32, device=self.pool.device)
            self._works[place] = work_U
        return work_U[: math.prod(shape)].view(shape)

    def _expand(self, site: int, h_PGTR: torch.Tensor, y_TN: torch.Tensor, outputs: slice = slice(None)) -> None:
        variant = self.variant
        lora_expand(self.pool, site, h_PGTR, self.tiles, y_TN, variant.mixed, variant.biased, outputs=outputs)
