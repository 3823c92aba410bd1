"""From the fused projection to attention's inputs, in one launch.

Owns the optional norm of query and key heads, their rotation, and the write of keys and values to
the page pool. Rounds where `engine.layers` does: as `rms_norm`, then each rotation product, then
their sum. A token whose slot is -1 (padding) is skipped: nothing of it is written. Slots and positions come
from at least two launches before (`engine.kernels.early`).

Shapes: T tokens, N query heads, K key/value heads, H head size, C positions, S slots of the pool.
`qkv_TE` is [T, (N + 2K) * H], query, key, value heads side by side. `cos_CH`, `sin_CH` are
`engine.layers.rotary.Rotary`'s tables: the first half of a sine row is negated.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.rms_norm import rms_norm_reference

HEADS_PER_PROGRAM = 8


@dataclass(slots=True, frozen=True)
class QKVShape:
    """How a projected row divides into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(slots=True, frozen=True)
class QKNorm:
    """Weights [H] of the query and key norms."""

    q_weight_H: torch.Tensor
    k_weight_H: torch.Tensor
    eps: float


def rope_kv_write_reference(
    qkv_TE: torch.Tensor,
    shape: QKVShape,
    norm: QKNorm | None,
    cos_CH: torch.Tensor,
    sin_CH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv_S2KH: torch.Tensor,
) -> torch.Tensor:
    """Query heads [T, N, H] (those of skipped tokens as they were); keys and values go to `kv_S2KH`."""
    heads, rotated, size = shape.num_heads, shape.num_heads + shape.num_kv_heads, shape.head_dim
    real_R = (slots_T >= 0).nonzero()[:, 0]
    qkv_THE = qkv_TE.view(len(qkv_TE), rotated + shape.num_kv_heads, size)
    rows_RHE = qkv_THE[real_R]
    if norm is not None:
        rows_RHE[:, :heads] = rms_norm_reference(rows_RHE[:, :heads], norm.q_weight_H, norm.eps)
        rows_RHE[:, heads:rotated] = rms_norm_reference(rows_RHE[:, heads:rotated], norm.k_weight_H, norm.eps)
    cos_R1H, sin_R1H = cos_CH[positions_T[real_R].long(), None], sin_CH[positions_T[real_R].long(), None]
    turned = rows_RHE[:, :rotated]
    rows_RHE[:, :rotated] = turned * cos_R1H + torch.roll(turned, size // 2, -1) * sin_R1H
    kv_S2KH[slots_T[real_R].long()] = rows_RHE[:, heads:]
    out_TNH = qkv_THE[:, :heads].clone()
    out_TNH[real_R] = rows_RHE[:, :heads]
    return out_TNH


@triton.jit
def _norm_weight(q_weight_ptr, k_weight_ptr, at, real, is_query):
    query = tl.load(q_weight_ptr + at, mask=real, other=0.0).to(tl.float32)
    key = tl.load(k_weight_ptr + at, mask=real, other=0.0).to(tl.float32)
    return tl.where(is_query, query, key)


@triton.jit
def rope_kv_write_kernel(
    qkv_ptr,
    q_out_ptr,
    kv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    qkv_stride,
    q_out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    await_inputs(EARLY)
    release_next(EARLY)
    if slot < 0:
        return
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    real = at < H // 2
    inside = (head < N + 2 * K) & real
    source = qkv_ptr + token * qkv_stride + head * H + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + H // 2, mask=inside, other=0.0).to(tl.float32)
    is_query, is_value = head < N, head >= N + K
    turned_first, turned_second = first, second
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] * (1.0 / H) + eps)
        weight_first = _norm_weight(q_weight_ptr, k_weight_ptr, at, real, is_query)
        weight_second = _norm_weight(q_weight_ptr, k_weight_ptr, at + H // 2, real, is_query)
        turned_first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
        turned_second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    table = position * H + at
    cos_first = tl.load(cos_ptr + table, mask=real, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + table, mask=real, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + table + H // 2, mask=real, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + table + H // 2, mask=real, other=0.0).to(tl.float32)
    rotated_first = (turned_first * cos_first).to(dtype).to(tl.float32) + (turned_second * sin_first).to(dtype).to(
        tl.float32
    )
    rotated_second = (turned_second * cos_second).to(dtype).to(tl.float32) + (turned_first * sin_second).to(dtype).to(
        tl.float32
    )
    out_first = tl.where(is_value, first, rotated_first).to(dtype)
    out_second = tl.where(is_value, second, rotated_second).to(dtype)
    q_target = q_out_ptr + token * q_out_stride + head * H + at
    tl.store(q_target, out_first, mask=inside & is_query)
    tl.store(q_target + H // 2, out_second, mask=inside & is_query)
    kv_target = kv_ptr + slot * (2 * K * H) + (head - N) * H + at
    written = inside & (head >= N)
    tl.store(kv_target, out_first, mask=written)
    tl.store(kv_target + H // 2, out_second, mask=written)


def rope_kv_write(
    qkv_TE: torch.Tensor,
    shape: QKVShape,
    norm: QKNorm | None,
    cos_CH: torch.Tensor,
    sin_CH: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    kv_S2KH: torch.Tensor,
    q_out: torch.Tensor | None = None,
    heads_per_program: int = HEADS_PER_PROGRAM,
    warps: int | None = None,
) -> torch.Tensor:
    """Query heads [T, N, H]: in `q_out` (contiguous), or in place in `qkv_TE`, of which they are a view.

    `kv_S2KH` is one layer of the pool by slot, contiguous, in the dtype of `qkv_TE`.
    """
    tokens, size = qkv_TE.shape[0], shape.head_dim
    assert qkv_TE.stride(1) == 1 and kv_S2KH.is_contiguous(), "rows must be contiguous"
    assert qkv_TE.dtype == kv_S2KH.dtype, f"projection {qkv_TE.dtype}, pool {kv_S2KH.dtype}"
    q_TE = qkv_TE[:, : shape.num_heads * size] if q_out is None else q_out.view(tokens, shape.num_heads * size)
    half = triton.next_power_of_2(size // 2)
    total = shape.num_heads + 2 * shape.num_kv_heads
    heads = min(heads_per_program, triton.next_power_of_2(total))
    early = is_early(qkv_TE)
    if tokens:
        rope_kv_write_kernel[(tokens, triton.cdiv(total, heads))](
            qkv_TE,
            q_TE,
            kv_S2KH,
            qkv_TE if norm is None else norm.q_weight_H,
            qkv_TE if norm is None else norm.k_weight_H,
            cos_CH,
            sin_CH,
            positions_T,
            slots_T,
            0.0 if norm is None else norm.eps,
            qkv_TE.stride(0),
            q_TE.stride(0),
            N=shape.num_heads,
            K=shape.num_kv_heads,
            H=size,
            HALF=half,
            HEADS=heads,
            NORM=norm is not None,
            EARLY=early,
            num_warps=warps or max(1, min(4, heads * half // 128)),
            enable_fp_fusion=False,
            **options(early),
        )
    return q_TE.view(tokens, shape.num_heads, size)
