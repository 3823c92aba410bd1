"""What adapters add to the products of one step, by two kernels a site.

Owns the tables and the workspace of a step on a GPU, and which variant of the kernels serves its slots.
Ignores what launches compute (`lora.kernels`).

Shapes: T rows of the step, K inputs, N outputs of a site's parts side by side, D hidden.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from lora.device_pool import DevicePool
from lora.geometry import Kind
from lora.kernels.expand import lora_expand
from lora.kernels.shrink import MIN_RANK, lora_shrink, workspace_shape
from lora.segments import Segments, Tiles

SMALL_BLOCK, LARGE_BLOCK, MANY_ROWS = 16, 64, 512
"""Rows of a tile, and the rows of a step from which tiles are large."""


class KernelStep:
    """`slots_T` is each row's slot. With `fixed_tiles`, tiles are small however many rows there are: a row's
    bits do not depend on its batch."""

    def __init__(self, pool: DevicePool, slots_T: np.ndarray, fixed_tiles: bool = False) -> None:
        self._pool = pool
        self._slots_T = slots_T
        self._fixed = fixed_tiles
        segments = Segments.of(slots_T)
        pool.await_ready(segments.slots)
        block = LARGE_BLOCK if len(slots_T) >= MANY_ROWS and not fixed_tiles else SMALL_BLOCK
        self._num_rows = len(segments.rows_A)
        self._tiles = Tiles.empty(len(slots_T), len(segments.runs), block, pool.device)
        self._tiles.fill(segments)
        ranks = {pool.rank(slot) for slot in segments.slots}
        self._rank = max(ranks, default=0)
        self._biased = any(pool.biased(slot) for slot in segments.slots)
        self._mixed = {
            site: any(pool.layout(slot, site).rank not in (0, self._rank) for slot in segments.slots)
            for site in range(len(pool.geometry.sites))
            if any(pool.layout(slot, site).rank for slot in segments.slots)
        }
        """Sites that any of the slots adapts, and whether their ranks differ from the widest."""
        shapes = [self._shape(site) for site in self._mixed]
        size = max((math.prod(shape) for shape in shapes), default=0)
        self._work_U = torch.empty(size, dtype=torch.float32, device=pool.device)

    def add_(self, site: int, x_TK: torch.Tensor, y_TN: torch.Tensor, outputs: slice = slice(None)) -> None:
        if site in self._mixed:
            self._add(site, x_TK, y_TN, outputs)

    def add_embedding_(self, site: int, ids_T: torch.Tensor, y_TD: torch.Tensor) -> None:
        if site in self._mixed:
            self._add(site, ids_T, y_TD)

    def rows(self, rows_R: np.ndarray) -> KernelStep:
        return KernelStep(self._pool, self._slots_T[rows_R], self._fixed)

    def _add(self, site: int, x: torch.Tensor, y_TN: torch.Tensor, outputs: slice = slice(None)) -> None:
        shape, mixed = self._shape(site), self._mixed[site] or self._rank < MIN_RANK
        h_PGAR = self._work_U[: math.prod(shape)].view(shape)
        lora_shrink(self._pool, site, x, self._tiles, h_PGAR, mixed)
        lora_expand(self._pool, site, h_PGAR, self._tiles, y_TN, mixed, self._biased, outputs=outputs)

    def _shape(self, site: int) -> tuple[int, int, int, int]:
        geometry = self._pool.geometry
        if geometry.sites[site].kind is Kind.EMBEDDING:
            return 1, 1, max(1, self._num_rows), max(MIN_RANK, self._rank)
        return workspace_shape(geometry.inputs(site), len(geometry.widths(site)), self._num_rows, self._rank)
