"""Attention of many examples' blocks in a few launches.

Owns the padding of examples to one size and who sees whom in it: a block sees its example's context before
its anchor and itself, never another block. The same as `engine.dspark.dense_attention` example by
example, whose launches cost a GPU's host more than they compute. Ignores where keys come from.

Examples of like size are a group, every group a stretch of one buffer of keys and values and of one of queries.
Rows are scattered there, each to a place of its own, so that gradients come back by plain gathers: had padding
been gathered, the gradients of thousands of copies of one row would be summed one after another.

Shapes: E examples of a group, A blocks and C context tokens of all examples, T = A * block slots, P context
tokens and S slots of a group's largest, W = P + S, N query heads, K key/value heads, H head size, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.dspark.block_model import Attend
from engine.memory.transfer import send_together
from engine.models.spec import ModelSpec

_WASTE = 2.0
"""A group's examples differ at most by this in blocks and in context, so that padding costs less than launches."""
_ALIGNED = 16
"""A mask's rows have a multiple of so many values; torch would copy it to such rows for every layer."""
_NOWHERE = 1 << 40
"""The position of what is no context token: after every anchor."""


@dataclass(frozen=True, slots=True)
class _Group:
    """`keys` and `queries` are its stretches [E * W] and [E * S] of the buffers."""

    examples: int
    context: int
    slots: int
    keys: slice
    queries: slice

    @property
    def wide(self) -> int:
        return self.context + self.slots


@dataclass(frozen=True, slots=True)
class _Places:
    """Where every example's first context token, first own slot's key and first query lie."""

    groups: list[_Group]
    context: np.ndarray
    keys: np.ndarray
    queries: np.ndarray


def packed_attention(
    shape: ModelSpec,
    block: int,
    k_LCKH: torch.Tensor,
    v_LCKH: torch.Tensor,
    anchors_A: torch.Tensor,
    positions_C: torch.Tensor,
    sizes: Sequence[tuple[int, int]],
    slots_A: torch.Tensor | None = None,
) -> Attend:
    """`attend` over given context keys and values; `sizes` are (blocks, context tokens) by example. Of each block
    only the first `slots_A` are seen, where those are given."""
    places, heads = _lay_out(sizes, block), shape.num_heads // shape.num_kv_heads
    contexts, slots = np.array([size[1] for size in sizes]), np.array([size[0] for size in sizes]) * block
    numbers = _rows(places.context, contexts), _rows(places.keys, slots), _rows(places.queries, slots)
    context_C, keys_T, queries_T = send_together(numbers, anchors_A.device)
    num_keys, num_queries = places.groups[-1].keys.stop, places.groups[-1].queries.stop
    anchors_Q = anchors_A.new_zeros(num_queries).index_copy(0, queries_T, anchors_A.repeat_interleave(block))
    slots_Q = None
    if slots_A is not None:
        slots_Q = slots_A.new_ones(num_queries).index_copy(0, queries_T, slots_A.repeat_interleave(block))
    positions_W = positions_C.new_full((num_keys,), _NOWHERE).index_copy(0, context_C, positions_C)
    windows = {layer.window for layer in shape.layers}
    given = block, anchors_Q, positions_W, slots_Q, windows, k_LCKH.dtype
    masks = [_masks(group, *given) for group in places.groups]
    kv_LCKH = torch.cat((k_LCKH, v_LCKH), dim=2)
    padded_LWKH = kv_LCKH.new_zeros(len(kv_LCKH), num_keys, *kv_LCKH.shape[2:])
    kv_L = padded_LWKH.index_copy(1, context_C, kv_LCKH).unbind(0)

    def attend(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, layer: int) -> torch.Tensor:
        kv_WKH = kv_L[layer].index_copy(0, keys_T, torch.cat((k_TKH, v_TKH), dim=1))
        q_QNH = q_TNH.new_zeros(num_queries, *q_TNH.shape[1:]).index_copy(0, queries_T, q_TNH)
        parts = []
        for group, mask in zip(places.groups, masks, strict=True):
            q_ENSH = q_QNH[group.queries].unflatten(0, (group.examples, group.slots)).transpose(1, 2)
            kv_EKWH = kv_WKH[group.keys].unflatten(0, (group.examples, group.wide)).transpose(1, 2)
            k_ENWH, v_ENWH = (part.repeat_interleave(heads, dim=1) for part in kv_EKWH.chunk(2, dim=1))
            with _backends(q_TNH.device):
                out_ENSH = F.scaled_dot_product_attention(
                    q_ENSH, k_ENWH, v_ENWH, attn_mask=mask[shape.layers[layer].window]
                )
            parts.append(out_ENSH.transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).index_select(0, queries_T)

    return attend


def _backends(device: torch.device) -> AbstractContextManager:
    """Shapes differ from step to step, and cuDNN would plan anew for each."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


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


def _lay_out(sizes: Sequence[tuple[int, int]], block: int) -> _Places:
    places = _Places([], *(np.zeros(len(sizes), np.int64) for _ in range(3)))
    keys, queries = 0, 0
    for members in _alike(sizes):
        slots = max(sizes[member][0] for member in members) * block
        context = max(sizes[member][1] for member in members)
        context += -(context + slots) % _ALIGNED
        wide, count = context + slots, np.arange(len(members))
        places.context[members] = keys + count * wide
        places.keys[members] = keys + count * wide + context
        places.queries[members] = queries + count * slots
        stretch = slice(keys, keys + len(members) * wide), slice(queries, queries + len(members) * slots)
        places.groups.append(_Group(len(members), context, slots, *stretch))
        keys, queries = stretch[0].stop, stretch[1].stop
    return places


def _rows(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """firsts[e], firsts[e] + 1 ... of every example, one after another."""
    return np.repeat(firsts - (counts.cumsum() - counts), counts) + np.arange(counts.sum())


def _masks(
    group: _Group,
    block: int,
    anchors_Q: torch.Tensor,
    positions_W: torch.Tensor,
    slots_Q: torch.Tensor | None,
    windows: set[int | None],
    dtype: torch.dtype,
) -> dict[int | None, torch.Tensor]:
    """What is added to scores [E, 1, S, W], by window. Padding sees its own block too, the first slot of it at least: a
    row that saw nothing would be no number."""
    device = anchors_Q.device
    anchors_ES1 = anchors_Q[group.queries].view(group.examples, group.slots, 1)
    positions_E1W = positions_W[group.keys].view(group.examples, 1, group.wide)
    slot_S, place_W = torch.arange(group.slots, device=device), torch.arange(group.wide, device=device) - group.context
    own_ESW = ((slot_S[:, None] // block == place_W // block) & (place_W >= 0))[None]
    if slots_Q is not None:
        own_ESW = own_ESW & (place_W % block < slots_Q[group.queries].view(group.examples, group.slots, 1))
    before_ESW = positions_E1W < anchors_ES1
    masks = {}
    for window in windows:
        seen_ESW = before_ESW
        if window is not None:
            seen_ESW = seen_ESW & (positions_E1W > anchors_ES1 + (block - 1 - window))
        mask_ESW = torch.zeros(seen_ESW.shape, dtype=dtype, device=device)
        masks[window] = mask_ESW.masked_fill_(~(seen_ESW | own_ESW), float("-inf"))[:, None]
    return masks
