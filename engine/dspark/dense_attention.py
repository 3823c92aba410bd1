"""A drafter's attention in plain dense form.

Owns who sees whom, in the form that others are held against: any number of blocks over the contexts of
packed sequences. The engine computes the same from pages (`engine.dspark.block_drafter`). A window
counts back from the last slot of a block and is the same for all its queries.

Shapes: A blocks (anchors), G slots of a block, T = A * G block tokens, C context tokens, N query heads,
K key/value heads, H head size, L layers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.dspark.block_model import Attend
from engine.models.spec import ModelSpec


def block_mask(
    anchors_A: torch.Tensor,
    anchor_sequences_A: torch.Tensor,
    positions_C: torch.Tensor,
    sequences_C: torch.Tensor,
    block: int,
    window: int | None,
) -> torch.Tensor:
    """bool [T, C + T]: context of the same sequence before the anchor, and the whole own block.

    `anchors_A` are positions within their sequences, as `positions_C` are.
    """
    before_AC = (positions_C < anchors_A[:, None]) & (sequences_C == anchor_sequences_A[:, None])
    if window is not None:
        before_AC = before_AC & (positions_C > (anchors_A + block - 1 - window)[:, None])
    blocks_T = torch.arange(len(anchors_A), device=anchors_A.device).repeat_interleave(block)
    own_TT = blocks_T[:, None] == blocks_T[None, :]
    return torch.cat((before_AC.repeat_interleave(block, dim=0), own_TT), dim=1)


def dense_attention(
    shape: ModelSpec,
    block: int,
    k_LCKH: torch.Tensor,
    v_LCKH: torch.Tensor,
    anchors_A: torch.Tensor,
    positions_C: torch.Tensor,
    anchor_sequences_A: torch.Tensor | None = None,
    sequences_C: torch.Tensor | None = None,
) -> Attend:
    """`attend` over given context keys and values; one sequence where none are named."""
    anchor_sequences_A = torch.zeros_like(anchors_A) if anchor_sequences_A is None else anchor_sequences_A
    sequences_C = torch.zeros_like(positions_C) if sequences_C is None else sequences_C
    group = shape.num_heads // shape.num_kv_heads
    masks = {
        window: block_mask(anchors_A, anchor_sequences_A, positions_C, sequences_C, block, window)
        for window in {layer.window for layer in shape.layers}
    }

    def attend(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, layer: int) -> torch.Tensor:
        k = torch.cat((k_LCKH[layer], k_TKH)).repeat_interleave(group, dim=1).transpose(0, 1)
        v = torch.cat((v_LCKH[layer], v_TKH)).repeat_interleave(group, dim=1).transpose(0, 1)
        mask_TC = masks[shape.layers[layer].window]
        return F.scaled_dot_product_attention(q_TNH.transpose(0, 1), k, v, attn_mask=mask_TC).transpose(0, 1)

    return attend
