"""Attention of absorbed queries over the latent rows that an index chose, gathered through pages.

Owns the launcher for layers that choose. The inner loop is `mla_tile`'s; the reference is `engine.attention.mla`.

Shapes: T tokens, N heads, C numbers of a row, L its latent, K tokens chosen, B rows, P page-table columns.
"""

from __future__ import annotations

import torch

from engine.kernels.decode_attention import States, TileConfig
from engine.kernels.mla_tile import LatentShape, launch_latents


def dsa_attention(
    q_TNC: torch.Tensor,
    rows: torch.Tensor,
    page_tables_BP: torch.Tensor,
    row_of_T: torch.Tensor,
    visible_T: torch.Tensor,
    chosen_TK: torch.Tensor,
    out_TNL: torch.Tensor,
    shape: LatentShape,
    pieces: int,
    partial: States | None,
    config: TileConfig,
    piece: int = 0,
) -> None:
    """Write out_TNL: each token over the positions `chosen_TK` (int32, as many as it sees and at most K).
    They are read in `pieces` of equal length or of `piece`; `partial` holds [pieces, T] states."""
    assert chosen_TK.dtype == torch.int32 and chosen_TK.is_contiguous()
    launch_latents(
        q_TNC, rows, page_tables_BP, row_of_T, visible_T, chosen_TK, out_TNL, shape, pieces, piece, partial, config
    )
