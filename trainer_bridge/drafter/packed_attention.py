"""Attention of many examples' blocks in a few launches.

Owns the padding of examples to one size and who sees whom in it: a block sees its example's context before
its anchor and itself, never another block. The same as `engine.dspark.dense_attention` example by
example, whose launches cost a GPU's host more than they compute. Ignores where keys come from.

Shapes: E examples of a group, A blocks and C context tokens of all examples, B blocks and P context tokens of
a group's largest, S = B * block slots, N query heads, K key/value heads, H head size, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.dspark.block_model import Attend
from engine.models.spec import ModelSpec

_WASTE = 2.0
"""A group's examples differ at most by this in blocks and in context, so that padding costs less than launches."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Examples padded to one size. `slots_ES` and `context_EP` say which block slot and context token lies where
    (0 where none does), `kept_T` where the group's slots lie in [E * S], in order, and `to_T` whose they are."""

    slots_ES: torch.Tensor
    context_EP: torch.Tensor
    kept_T: torch.Tensor
    to_T: torch.Tensor
    masks: dict[int | None, torch.Tensor]


def packed_attention(
    shape: ModelSpec,
    block: int,
    k_LCKH: torch.Tensor,
    v_LCKH: torch.Tensor,
    anchors_A: torch.Tensor,
    positions_C: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
) -> Attend:
    """`attend` over given context keys and values; `sizes` are (blocks, context tokens) by example."""
    windows = {layer.window for layer in shape.layers}
    groups = [_group(members, block, anchors_A, positions_C, sizes, windows) for members in _alike(sizes)]
    order_T = torch.cat([group.to_T for group in groups]).argsort()
    heads = shape.num_heads // shape.num_kv_heads

    def attend(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, layer: int) -> torch.Tensor:
        parts = []
        for group in groups:
            q, k, v = (
                torch.cat(tensors, dim=1).transpose(1, 2)
                for tensors in (
                    (q_TNH[group.slots_ES],),
                    (k_LCKH[layer][group.context_EP], k_TKH[group.slots_ES]),
                    (v_LCKH[layer][group.context_EP], v_TKH[group.slots_ES]),
                )
            )
            k, v = (tensor.repeat_interleave(heads, dim=1) for tensor in (k, v))
            mask = group.masks[shape.layers[layer].window]
            out_ENSH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            parts.append(out_ENSH.transpose(1, 2).flatten(0, 1)[group.kept_T])
        return torch.cat(parts)[order_T]

    return attend


def _alike(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Examples by context, in runs whose sizes differ by `_WASTE` at most."""
    groups: list[list[int]] = []
    for example in sorted(range(len(sizes)), key=lambda e: (sizes[e][1], sizes[e][0])):
        blocks = [sizes[member][0] for member in groups[-1]] if groups else []
        fits = bool(blocks) and sizes[example][1] <= _WASTE * sizes[groups[-1][0]][1]
        if fits and max(*blocks, sizes[example][0]) <= _WASTE * min(*blocks, sizes[example][0]):
            groups[-1].append(example)
        else:
            groups.append([example])
    return groups


def _group(
    members: list[int],
    block: int,
    anchors_A: torch.Tensor,
    positions_C: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    windows: set[int | None],
) -> _Group:
    device = anchors_A.device
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0) - torch.tensor(sizes, dtype=torch.int64)
    counts_E2, firsts_E2 = torch.tensor([sizes[e] for e in members]).to(device), ends[members].to(device)
    most = int(counts_E2[:, 0].max()), int(counts_E2[:, 1].max())
    slot_S, place_P = torch.arange(most[0] * block, device=device), torch.arange(most[1], device=device)
    real_ES, real_EP = slot_S < counts_E2[:, :1] * block, place_P < counts_E2[:, 1:]
    slots_ES = torch.where(real_ES, firsts_E2[:, :1] * block + slot_S, 0)
    context_EP = torch.where(real_EP, firsts_E2[:, 1:] + place_P, 0)
    anchors_ES, positions_EP = anchors_A[slots_ES // block], positions_C[context_EP]
    before_ESP = (positions_EP[:, None] < anchors_ES[..., None]) & real_EP[:, None] & real_ES[..., None]
    # Padding sees its own block too: a row that saw nothing would be no number.
    own_SS = (slot_S[:, None] // block == slot_S // block).expand(len(members), -1, -1)
    masks = {}
    for window in windows:
        seen = before_ESP
        if window is not None:
            seen = seen & (positions_EP[:, None] > (anchors_ES + block - 1 - window)[..., None])
        masks[window] = torch.cat((seen, own_SS), dim=2)[:, None]
    kept = real_ES.flatten().nonzero()[:, 0]
    return _Group(slots_ES, context_EP, kept, slots_ES.flatten()[kept], masks)
