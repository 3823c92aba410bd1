"""Units of cached memory as rows of bytes that can travel.

Owns a row's layout: all that lies under one id (keys and values of every layer, index keys, a drafter's states; or
a recurrent state) and a trailer of a checksum and a tag, so that a row says by itself whether it is whole and whose
it is. Rows are made and read on the device. Ignores where rows are kept.

Shapes: N rows, X bytes of a row, W 32-bit words of it, G groups of words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.unit_copy import UnitAddresses, gather_units_reference, scatter_units_reference, unit_copy

TRAILER = 16
"""Bytes of a checksum and a tag, 64 bits each."""

_GROUP = 64
"""Words that a checksum adds before it weighs them by place."""
_SEED = 0x1D8AF066A5C3
"""So that a row of zeros is not whole."""


class UnitLayout:
    """`tensors` are [units, ...] and contiguous, at the same addresses for life."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        assert tensors, "a unit of nothing"
        self._tensors = list(tensors)
        self.device = tensors[0].device
        self._starts: list[int] = []
        end = 0
        for tensor in tensors:
            self._starts.append(end)
            end += -(-tensor[0].nbytes // 16) * 16
        self._payload = -(-end // (4 * _GROUP)) * 4 * _GROUP
        self.row_bytes = self._payload + TRAILER
        self._addresses = UnitAddresses(tensors, self._starts) if self.device.type == "cuda" else None
        groups = torch.arange(self._payload // (4 * _GROUP), device=self.device)
        self._odd_G = (2 * groups + 1) * 0x9E3779B97F4A7

    def pack(self, ids_N: torch.Tensor, tags_N: torch.Tensor, rows_NX: torch.Tensor) -> None:
        """Copy units into rows (uint8) and seal them."""
        if self._addresses is not None:
            unit_copy(self._addresses, ids_N, rows_NX, scatter=False)
        else:
            gather_units_reference(self._tensors, self._starts, ids_N, rows_NX)
        trailer_N2 = rows_NX[:, self._payload :].view(torch.int64)
        trailer_N2[:, 0] = self._sums(rows_NX)
        trailer_N2[:, 1] = tags_N

    def whole(self, rows_NX: torch.Tensor, tags_N: torch.Tensor) -> torch.Tensor:
        """Which rows are as they were packed, under these tags: bool [N]."""
        trailer_N2 = rows_NX[:, self._payload :].view(torch.int64)
        return (trailer_N2[:, 0] == self._sums(rows_NX)) & (trailer_N2[:, 1] == tags_N)

    def unpack(self, rows_NX: torch.Tensor, ids_N: torch.Tensor) -> None:
        """Copy rows to units."""
        if self._addresses is not None:
            unit_copy(self._addresses, ids_N, rows_NX, scatter=True)
        else:
            scatter_units_reference(self._tensors, self._starts, ids_N, rows_NX)

    def _sums(self, rows_NX: torch.Tensor) -> torch.Tensor:
        """A sum by row that a change of any one word changes, and so do groups of words in another order."""
        words_NGW = rows_NX[:, : self._payload].view(torch.int32).unflatten(1, (-1, _GROUP))
        return (words_NGW.sum(-1, dtype=torch.int64) * self._odd_G).sum(-1) + _SEED
