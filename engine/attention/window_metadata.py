"""What the device must know to decode windowed layers whose pages are others than the rest's.

Owns the second set of buffers beside those of layers that see everything: tables of window pages, and work
items cut over windows alone, so that no program is sent where nothing is to be seen. Prefixes are not shared here:
rows that have come further than others no longer have the pages, and a window is little to read. Ignores who
holds which page.
"""

from __future__ import annotations

import torch

from engine.attention.decode_metadata import FIXED_SPLITS, DecodeMetadata, Workspace
from engine.kernels.decode_attention import TileConfig
from engine.kernels.decode_work import ITEM


def window_buffers(
    whole: DecodeMetadata,
    workspace: Workspace,
    tiles: TileConfig,
    page_tables_BP: torch.Tensor | None,
    window: int,
    deterministic: bool,
) -> DecodeMetadata:
    """Buffers for the rows of `whole`, whose lengths they share; a table as large as its own without another."""
    size, rows, device = whole.size, whole.max_rows, whole.seq_lens_B.device
    if page_tables_BP is None:
        page_tables_BP = torch.zeros_like(whole.page_tables_BP)
    num_items = rows * FIXED_SPLITS if deterministic else rows + whole.extra
    return DecodeMetadata(
        size=size,
        page_tables_BP=page_tables_BP,
        seq_lens_B=whole.seq_lens_B,
        write_slots_B=torch.zeros_like(whole.write_slots_B),
        own_start_B=torch.zeros(rows, dtype=torch.int32, device=device),
        prefix_parts_B=torch.zeros(rows, dtype=torch.int32, device=device),
        pieces_X8=torch.zeros(0, ITEM, dtype=torch.int32, device=device),
        items_W8=torch.full((num_items, ITEM), -1, dtype=torch.int32, device=device),
        partial=workspace.states("items", (num_items,), size.num_heads, size.head_dim),
        arrived_BK=whole.arrived_BK,
        decode_tiles=tiles,
        prefix_tiles=whole.prefix_tiles,
        extra=whole.extra,
        look=window,
        splits=FIXED_SPLITS if deterministic else 0,
    )
