"""Attention of absorbed queries over all latent rows that a token sees, through pages.

Owns the launcher for dense layers: decode rows and tokens of prompts alike, each with its own context length.
The inner loop is `mla_tile`'s; the reference is `engine.attention.mla`.

Shapes: T tokens, N heads, C numbers of a row, L its latent, B rows, P page-table columns.
"""

from __future__ import annotations

import torch

from engine.kernels.decode_attention import States, TileConfig
from engine.kernels.mla_tile import LatentShape, launch_latents


def mla_decode(
    q_TNC: torch.Tensor,
    rows: torch.Tensor,
    page_tables_BP: torch.Tensor,
    row_of_T: torch.Tensor,
    visible_T: torch.Tensor,
    out_TNL: torch.Tensor,
    shape: LatentShape,
    pieces: int,
    partial: States | None,
    config: TileConfig,
    piece: int = 0,
) -> None:
    """Write out_TNL: each token over the first `visible_T` tokens of its row of the page tables, in `pieces` of
    equal length or of `piece` tokens, which then are enough for any. `partial` holds [pieces, T] states."""
    launch_latents(
        q_TNC, rows, page_tables_BP, row_of_T, visible_T, None, out_TNL, shape, pieces, piece, partial, config
    )
