"""Shared prefixes of rows that verify drafts: what the device must know to read them once for all their queries.

Owns the fixed buffers that captured rounds read and their filling: which tokens rows of a batch share comes from the
host when its composition changes, which queries they have from the device, round by round
(`engine.kernels.verify_pieces`). Ignores the kernels that read the buffers, and rows of one query
(`engine.attention.decode_metadata`).

Shapes: B rows, R queries of all of them, E ranges of rows, X pieces, S stored states a query.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.decode_metadata import STATE_BYTES, AttentionSize, Workspace, fit_prefixes, wanted_pieces
from engine.batch import SharedPrefix
from engine.kernels.decode_attention import TileConfig
from engine.kernels.decode_work import ITEM
from engine.kernels.prefill_attention import Before
from engine.kernels.verify_pieces import list_pieces, most_pieces
from engine.memory.transfer import staged

LEAST_STATES, MOST_STATES = 2, 16
"""Pieces of its prefixes that a query has room for: at least what all share and what its group shares."""


@dataclass(slots=True)
class VerifyPrefixes:
    """`starts_B1` are the first queries of rows, `ends_R` where queries stand, counted from 1; both are the caller's,
    on the device. `list` follows once before the layers, whenever they or the prefixes have changed."""

    size: AttentionSize
    tiles: TileConfig
    starts_B1: torch.Tensor
    ends_R: torch.Tensor
    packed: torch.Tensor
    """`before`'s columns, then the ranges [E, 8]."""
    pieces_X8: torch.Tensor
    count_1: torch.Tensor
    before: Before

    @staticmethod
    def empty(
        size: AttentionSize, tiles: TileConfig, workspace: Workspace, starts_B1: torch.Tensor, ends_R: torch.Tensor
    ) -> VerifyPrefixes:
        """Nobody shares anything yet. States lie in the room of those of decode rows, which no step needs at the
        same time."""
        device, rows, queries = starts_B1.device, starts_B1.shape[0] - 1, ends_R.shape[0]
        heads = (size.num_heads, size.head_dim)
        fitting = max(workspace.fitting("prefix", *heads), STATE_BYTES // 4 // size.state_bytes)
        num_states = max(LEAST_STATES, min(MOST_STATES, fitting // queries))
        ranges = rows + wanted_pieces(size)
        packed = torch.zeros(2 * rows + ITEM * ranges, dtype=torch.int32, device=device)
        pieces = most_pieces(queries, ranges, num_states, tiles.block_m // size.group)
        states = workspace.states("prefix", (num_states, queries), *heads)
        return VerifyPrefixes(
            size=size,
            tiles=tiles,
            starts_B1=starts_B1,
            ends_R=ends_R,
            packed=packed,
            pieces_X8=torch.zeros(pieces, ITEM, dtype=torch.int32, device=device),
            count_1=torch.zeros(1, dtype=torch.int32, device=device),
            before=Before(packed[:rows], packed[rows : 2 * rows], states),
        )

    @property
    def ranges_E8(self) -> torch.Tensor:
        return self.packed[2 * (self.starts_B1.shape[0] - 1) :].view(-1, ITEM)

    def set(self, prefixes: list[SharedPrefix], queries: float) -> int:
        """Have rows [start, end) of each prefix, with about `queries` queries each, read its pages once. Returns how
        many prefixes were kept. As `DecodeMetadata.set_prefixes`; a row's queries all stand behind its prefix."""
        rows, num_states = self.starts_B1.shape[0] - 1, self.before.states.lse_IN.shape[0]
        given = (prefixes, self.size, self.tiles, rows, num_states, self.ranges_E8.shape[0])
        kept, (own_start, parts, ranges) = fit_prefixes(*given, queries)
        flat = np.zeros(self.packed.shape[0], dtype=np.int32)
        values = own_start + parts + [value for each in ranges for value in each]
        flat[: len(values)] = values
        self.packed.copy_(staged(flat, self.packed.device), non_blocking=True)
        return kept

    def list(self) -> None:
        """List the pieces of the queries that rows have on the device now."""
        queries = self.tiles.block_m // self.size.group
        list_pieces(self.starts_B1, self.ranges_E8, self.pieces_X8, self.count_1, queries)
