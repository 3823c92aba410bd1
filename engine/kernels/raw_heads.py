"""Heads as the projection left them: normed and rotated by the attention kernels that read them.

Owns what a kernel needs for that, and how it does it, with the roundings of `rope_kv_write`. Ignores
attention itself. It saves a launch a layer.

Shapes: B rows, N query heads, K key/value heads, H head size, M query rows of a tile, D = H padded to a
power of two, C positions.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import LOG2E
from engine.kernels.rope_kv_write import QKNorm


@dataclass(frozen=True, slots=True)
class RawHeads:
    """Beside queries that are a view of a fused projection [B, N + 2K, H], key and value heads following:
    where each row's key and value go (-1: nowhere), the norms, and the rotation's tables [C, H]."""

    write_slots_B: torch.Tensor
    norm: QKNorm | None
    cos_CH: torch.Tensor
    sin_CH: torch.Tensor


@triton.jit
def rotated_heads(
    head_ptr_M1, position_M1, mask_M1, weight_ptr, cos_ptr, sin_ptr, eps,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads [M, D] from where they begin: normed, then turned by their positions (one for all if [1, 1]), in
    the storage dtype."""
    dtype: tl.constexpr = head_ptr_M1.dtype.element_ty
    d_1D = tl.arange(0, BLOCK_D)[None, :]
    other_1D = (d_1D + HEAD_DIM // 2) % HEAD_DIM
    real_1D = d_1D < HEAD_DIM
    mask_MD = mask_M1 & real_1D
    x_MD = tl.load(head_ptr_M1 + d_1D, mask=mask_MD, other=0.0).to(tl.float32)
    y_MD = tl.load(head_ptr_M1 + other_1D, mask=mask_MD, other=0.0).to(tl.float32)
    if NORM:
        scale_M1 = tl.rsqrt(tl.sum(x_MD * x_MD, 1)[:, None] * (1.0 / HEAD_DIM) + eps)
        weight_1D = tl.load(weight_ptr + d_1D, mask=real_1D, other=0.0).to(tl.float32)
        weight_other_1D = tl.load(weight_ptr + other_1D, mask=real_1D, other=0.0).to(tl.float32)
        x_MD = ((x_MD * scale_M1).to(dtype).to(tl.float32) * weight_1D).to(dtype).to(tl.float32)
        y_MD = ((y_MD * scale_M1).to(dtype).to(tl.float32) * weight_other_1D).to(dtype).to(tl.float32)
    table_MD = position_M1.to(tl.int64) * HEAD_DIM + d_1D
    inside_MD = real_1D & (position_M1 >= 0)
    cos_MD = tl.load(cos_ptr + table_MD, mask=inside_MD, other=0.0).to(tl.float32)
    sin_MD = tl.load(sin_ptr + table_MD, mask=inside_MD, other=0.0).to(tl.float32)
    turned_MD = (x_MD * cos_MD).to(dtype).to(tl.float32) + (y_MD * sin_MD).to(dtype).to(tl.float32)
    return turned_MD.to(dtype)


@triton.jit
def one_token_state(q_MD, k_1D, v_1D, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """The softmax state of a single key and value: (acc_MD, sum_M, top_M)."""
    score_M = tl.sum(q_MD.to(tl.float32) * k_1D.to(tl.float32), 1) * SCALE
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (1 + exp(2x)), which saturates rightly where exp overflows.
        score_M = SOFTCAP - 2 * SOFTCAP / (1 + tl.exp2(score_M * (2 * LOG2E / SOFTCAP)))
    acc_MD = tl.zeros(q_MD.shape, tl.float32) + v_1D.to(tl.float32)
    return acc_MD, score_M * 0.0 + 1.0, score_M * LOG2E
