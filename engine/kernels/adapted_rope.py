"""From a projection whose rows have adapters to attention's inputs, in one launch.

Owns the norm's factor that the projection lacks (`adapted_tile`), the model's bias, the adapters' second product,
and then what `rope_kv_write` does: norms of heads, rotation, the write of keys and values. Rounds as that does.
Ignores the products themselves. Slots and positions come from at least two launches before.

Shapes: as in `rope_kv_write`; A sorted rows, P planes, R ranks. A program computes one head of a tile's rows, or
several one after the other.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.adapted_sum import Adapted
from engine.kernels.adapted_tile import (
    choice,
    factor_rows,
    first_product,
    norm_factor,
    plane_squares,
    stacked_place,
    tables,
    tile_rows,
    with_ones,
)
from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write_reference
from lora.kernel_step import KernelStep
from lora.kernels.early import held
from lora.kernels.expand import lora_expand_reference


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rope's tables [C, H], positions [T], slots [T] of the pool, and a layer of it [S, 2K, H]."""

    cos_CH: torch.Tensor
    sin_CH: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    kv_S2KH: torch.Tensor


def adapted_rope_reference(
    step: KernelStep,
    adapted: Adapted,
    qkv_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    squares_TP: torch.Tensor,
    width: int,
    eps: float,
    shape: QKVShape,
    norm: QKNorm | None,
    rotation: Rotation,
) -> torch.Tensor:
    factor_T = torch.rsqrt(squares_TP.sum(1) / width + eps)
    qkv_TE, h_PGAR = adapted.planes(step, qkv_TE)
    qkv_TE = qkv_TE * factor_T[:, None].to(qkv_TE.dtype)
    if bias_E is not None:
        qkv_TE += bias_E
    h_PGAR = h_PGAR * factor_T[step.tiles.rows_T.long()][:, None]
    lora_expand_reference(step.pool, adapted.site, h_PGAR, step.tiles, qkv_TE)
    at = rotation
    return rope_kv_write_reference(qkv_TE, shape, norm, at.cos_CH, at.sin_CH, at.positions_T, at.slots_T, at.kv_S2KH)


@triton.jit
def _rotated(first, second, sign_cos, sign_sin, dtype: tl.constexpr):
    return (first * sign_cos).to(dtype).to(tl.float32) + (second * sign_sin).to(dtype).to(tl.float32)


@triton.jit
def _factors(
    values_ptr, offset, head, at, active, rank, H: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Second factors of both halves of a head."""
    real_E = at < H // 2
    first_b_ER = factor_rows(values_ptr, offset, head * H, at, real_E & active, rank, R, MIXED)
    return first_b_ER, factor_rows(values_ptr, offset, head * H + H // 2, at, real_E & active, rank, R, MIXED)


@triton.jit(do_not_specialize=["site", "h_rows"])
def adapted_rope_kernel(
    qkv_ptr, bias_ptr, squares_ptr, h_ptr, kv_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, positions_ptr,
    slots_ptr, values_ptr, offsets_ptr, ranks_ptr, scales_ptr, places_ptr, rows_ptr, tiles_ptr, site, sites, h_rows,
    stride, eps, head_eps,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, D: tl.constexpr, PLANES: tl.constexpr,
    SQUARES: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, MIXED: tl.constexpr, BIASED: tl.constexpr, STACKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # A program's heads are all of one part.
    head = tl.program_id(0) * STEPS
    slot, count, entry_M, real_M1, row_M = tile_rows(rows_ptr, tiles_ptr, tl.program_id(1), BM)
    here = slot * sites + site
    rank = tl.multiple_of(tl.load(ranks_ptr + here * 4), 8)
    part = (head >= N).to(tl.int32) + (head >= N + K).to(tl.int32)
    scale = tl.load(scales_ptr + here * 3 + part)
    offset = tl.multiple_of(tl.load(offsets_ptr + here * 2 + 1), 64)
    active = (rank > 0) & (scale != 0.0)
    place = stacked_place(places_ptr, slot, STACKED)
    at = tl.arange(0, HALF)
    real_E = at < H // 2
    first_b_ER, second_b_ER = _factors(values_ptr, offset, head, at, active, rank, H, R, MIXED)
    if NORM:
        weight_ptr = tl.where(head < N, q_weight_ptr, k_weight_ptr) + at
        first_weight_E = tl.load(weight_ptr, mask=real_E, other=0.0)
        second_weight_E = tl.load(weight_ptr + H // 2, mask=real_E, other=0.0)
    # Where rows stand is known for long: angles need not be a second trip either.
    position_M1 = tl.load(positions_ptr + row_M[:, None], mask=real_M1, other=0).to(tl.int64)
    pool_M1 = tl.load(slots_ptr + row_M[:, None], mask=real_M1, other=-1).to(tl.int64)
    real_ME = real_M1 & real_E[None, :]
    turned_ME = real_ME & (head < N + K)
    table_ME = position_M1 * H + at[None, :]
    first_cos = tl.load(cos_ptr + table_ME, mask=turned_ME, other=0.0)
    first_sin = tl.load(sin_ptr + table_ME, mask=turned_ME, other=0.0)
    second_cos = tl.load(cos_ptr + table_ME + H // 2, mask=turned_ME, other=0.0)
    second_sin = tl.load(sin_ptr + table_ME + H // 2, mask=turned_ME, other=0.0)
    await_inputs(EARLY)
    release_next(EARLY)
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    if count > 0:
        qkv_ME_ptr = qkv_ptr + row_M[:, None] * stride + head * H + at[None, :]
        first = tl.load(qkv_ME_ptr, mask=real_ME, other=0.0)
        second = tl.load(qkv_ME_ptr + H // 2, mask=real_ME, other=0.0)
        squares_MP = plane_squares(squares_ptr, row_M, real_M1, SQUARES, WIDE)
        h_MR = first_product(
            h_ptr, part, entry_M, row_M, real_M1 & active, h_rows, place, stride, (N + 2 * K) * H, PLANES, 3, R, STACKED
        )
        for step in tl.static_range(STEPS):
            if step + 1 < STEPS:
                # What the next head needs is under way while this one is computed.
                later_first_b, later_second_b = _factors(values_ptr, offset, head + 1, at, active, rank, H, R, MIXED)
                later_first = tl.load(qkv_ME_ptr + H, mask=real_ME, other=0.0)
                later_second = tl.load(qkv_ME_ptr + H + H // 2, mask=real_ME, other=0.0)
            first_b_ER, second_b_ER = held(first_b_ER, EARLY), held(second_b_ER, EARLY)
            if step == 0:
                h_MR = held(h_MR.to(tl.float32), EARLY)
            first, second = held(first, EARLY).to(tl.float32), held(second, EARLY).to(tl.float32)
            if step == 0:
                cos, sin = held(first_cos, EARLY).to(tl.float32), held(first_sin, EARLY).to(tl.float32)
                other_cos, other_sin = held(second_cos, EARLY).to(tl.float32), held(second_sin, EARLY).to(tl.float32)
                factor_M1 = norm_factor(held(squares_MP, EARLY), eps, D)
                if NORM:
                    first_weight = held(first_weight_E, EARLY).to(tl.float32)[None, :]
                    second_weight = held(second_weight_E, EARLY).to(tl.float32)[None, :]
                h_MR = h_MR * factor_M1
                if BIASED:
                    h_MR = with_ones(h_MR, ranks_ptr, here, part, R)
                h_MR = h_MR.to(first_b_ER.dtype)
            first, second = first * factor_M1, second * factor_M1
            if BIAS:
                bias_E_ptr = bias_ptr + head * H + at
                first += tl.load(bias_E_ptr, mask=real_E, other=0.0).to(tl.float32)[None, :]
                second += tl.load(bias_E_ptr + H // 2, mask=real_E, other=0.0).to(tl.float32)[None, :]
            first += tl.dot(h_MR, tl.trans(first_b_ER), input_precision="ieee") * scale
            second += tl.dot(h_MR, tl.trans(second_b_ER), input_precision="ieee") * scale
            first = first.to(dtype).to(tl.float32)
            second = second.to(dtype).to(tl.float32)
            written = real_ME & (pool_M1 >= 0)
            kv_ME_ptr = kv_ptr + pool_M1 * (2 * K * H) + (head - N) * H + at[None, :]
            if head >= N + K:
                tl.store(kv_ME_ptr, first.to(dtype), mask=written)
                tl.store(kv_ME_ptr + H // 2, second.to(dtype), mask=written)
            else:
                if NORM:
                    root_M1 = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] * (1.0 / H) + head_eps)
                    first = ((first * root_M1).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
                    second = ((second * root_M1).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
                turned = _rotated(first, second, cos, sin, dtype).to(dtype)
                turned_second = _rotated(second, first, other_cos, other_sin, dtype).to(dtype)
                if head < N:
                    tl.store(qkv_ME_ptr, turned, mask=written)
                    tl.store(qkv_ME_ptr + H // 2, turned_second, mask=written)
                else:
                    tl.store(kv_ME_ptr, turned, mask=written)
                    tl.store(kv_ME_ptr + H // 2, turned_second, mask=written)
            if step + 1 < STEPS:
                head += 1
                qkv_ME_ptr += H
                first_b_ER, second_b_ER = later_first_b, later_second_b
                first, second = later_first, later_second


def adapted_rope(
    step: KernelStep,
    adapted: Adapted,
    qkv_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    squares_TP: torch.Tensor,
    width: int,
    eps: float,
    shape: QKVShape,
    norm: QKNorm | None,
    rotation: Rotation,
    warps: int | None = None,
    steps: int | None = None,
) -> torch.Tensor:
    """Query heads [T, N, H], a view of `qkv_TE`: the product [T, (N + 2K) * H], with what stands behind it, without
    the factor of the norm over `width` values whose squares are given. Keys and values are in the pool afterwards."""
    pool, tiles, variant = step.pool, step.tiles, step.variant
    h_PGAR = adapted.h_PGAR
    total, size = shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
    assert qkv_TE.stride(1) == 1 and rotation.kv_S2KH.is_contiguous(), "rows must be contiguous"
    assert qkv_TE.dtype == rotation.kv_S2KH.dtype, f"projection {qkv_TE.dtype}, pool {rotation.kv_S2KH.dtype}"
    assert h_PGAR is None or h_PGAR.shape[1] == 3, "a first product of three parts"
    assert sum(pool.geometry.widths(adapted.site)) == total * size, f"site {adapted.site} is not {total * size} wide"
    best, early = choice(step), is_early(qkv_TE)
    steps = math.gcd(steps or best.rope_steps, shape.num_heads, shape.num_kv_heads)
    adapted_rope_kernel[(total // steps, tiles.num_tiles)](
        qkv_TE,
        qkv_TE if bias_E is None else bias_E,
        squares_TP,
        qkv_TE if h_PGAR is None else h_PGAR,
        rotation.kv_S2KH,
        qkv_TE if norm is None else norm.q_weight_H,
        qkv_TE if norm is None else norm.k_weight_H,
        rotation.cos_CH,
        rotation.sin_CH,
        rotation.positions_T,
        rotation.slots_T,
        *tables(step),
        adapted.site,
        len(pool.geometry.sites),
        len(qkv_TE),
        qkv_TE.stride(0),
        eps,
        0.0 if norm is None else norm.eps,
        N=shape.num_heads,
        K=shape.num_kv_heads,
        H=size,
        HALF=max(16, triton.next_power_of_2(size // 2)),
        D=width,
        PLANES=1 if h_PGAR is None else h_PGAR.shape[0],
        SQUARES=squares_TP.shape[1],
        WIDE=triton.next_power_of_2(squares_TP.shape[1]),
        R=variant.rank,
        BM=tiles.block,
        STEPS=steps,
        BIAS=bias_E is not None,
        NORM=norm is not None,
        MIXED=variant.mixed,
        BIASED=variant.biased,
        STACKED=h_PGAR is None,
        EARLY=early,
        num_warps=warps or best.rope_warps,
        enable_fp_fusion=False,
        **options(early),
    )
    return qkv_TE[:, : shape.num_heads * size].view(len(qkv_TE), shape.num_heads, size)
