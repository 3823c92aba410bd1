"""The gate of a gated block whose rows have adapters.

Owns, in one launch: the adapters' second product added to gates and ups, silu(gate) * up, and, if wanted, their
first product of that for the projection behind it, in planes (`adapted_tile`). Gates and ups may lack the
factor of the norm before them. Rounds where `lora.kernels.expand` and `engine.kernels.swiglu` one after the
other do. Ignores the products themselves.

Shapes: T tokens, I intermediate, A sorted rows, P planes, R ranks.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.adapted_sum import Adapted
from engine.kernels.adapted_tile import (
    choice,
    columns,
    factor_columns,
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
from engine.kernels.swiglu import silu, silu_and_mul_reference
from lora.kernel_step import KernelStep
from lora.kernels.early import held
from lora.kernels.expand import lora_expand_reference
from lora.kernels.shrink import lora_shrink_reference


def adapted_gate_reference(
    step: KernelStep,
    adapted: Adapted,
    gate_up_T2I: torch.Tensor,
    squares_TP: torch.Tensor | None = None,
    width: int = 0,
    eps: float = 0.0,
    next_site: int | None = None,
) -> tuple[torch.Tensor, Adapted | None]:
    gate_up_T2I, h_PGAR = adapted.planes(step, gate_up_T2I.clone())
    if squares_TP is not None:
        factor_T = torch.rsqrt(squares_TP.sum(1) / width + eps)
        gate_up_T2I *= factor_T[:, None].to(gate_up_T2I.dtype)
        h_PGAR = h_PGAR * factor_T[step.tiles.rows_T.long()][:, None]
    lora_expand_reference(step.pool, adapted.site, h_PGAR, step.tiles, gate_up_T2I)
    inner_TI = silu_and_mul_reference(gate_up_T2I)
    if next_site is None:
        return inner_TI, None
    h_11AR = torch.zeros(1, 1, len(inner_TI), step.variant.rank, device=inner_TI.device)
    lora_shrink_reference(step.pool, next_site, inner_TI, step.tiles, h_11AR)
    return inner_TI, Adapted(next_site, h_11AR)


@triton.jit
def _factors(
    values_ptr, offset, next_offset, n, active, rank, next_rank, WIDTH: tl.constexpr, R: tl.constexpr,
    SHRINK: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Of columns n: gates' and ups' second factors, and the next product's first one."""
    real_N = n < WIDTH
    gate_b_NR = factor_rows(values_ptr, offset, 0, n, real_N & active, rank, R, MIXED)
    up_b_NR = factor_rows(values_ptr, offset, WIDTH, n, real_N & active, rank, R, MIXED)
    a_RN = gate_b_NR
    if SHRINK:
        a_RN = factor_columns(values_ptr, next_offset, 0, n, real_N & (next_rank > 0), next_rank, WIDTH, R, MIXED)
    return gate_b_NR, up_b_NR, a_RN


@triton.jit
def _gates(gate_up_ptr, row_M, real_M1, n, stride, WIDTH: tl.constexpr):
    real_MN = real_M1 & (n < WIDTH)[None, :]
    gate_MN_ptr = gate_up_ptr + row_M[:, None] * stride + n[None, :]
    gate_MN = tl.load(gate_MN_ptr, mask=real_MN, other=0.0)
    return gate_MN, tl.load(gate_MN_ptr + WIDTH, mask=real_MN, other=0.0)


@triton.jit(do_not_specialize=["site", "next_site", "h_rows"])
def adapted_gate_kernel(
    gate_up_ptr, squares_ptr, h_ptr, out_ptr, next_h_ptr,
    values_ptr, offsets_ptr, ranks_ptr, scales_ptr, places_ptr, rows_ptr, tiles_ptr, site, next_site, sites, h_rows,
    stride, eps, WIDTH: tl.constexpr, PLANES: tl.constexpr, D: tl.constexpr, SQUARES: tl.constexpr,
    WIDE: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, SHRINK: tl.constexpr,
    MIXED: tl.constexpr, BIASED: tl.constexpr, STACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    slot, count, entry_M, real_M1, row_M = tile_rows(rows_ptr, tiles_ptr, tl.program_id(1), BM)
    here = slot * sites + site
    there = slot * sites + next_site
    rank = tl.multiple_of(tl.load(ranks_ptr + here * 4), 8)
    next_rank = tl.multiple_of(tl.load(ranks_ptr + there * 4), 8)
    offset = tl.multiple_of(tl.load(offsets_ptr + here * 2 + 1), 64)
    next_offset = tl.multiple_of(tl.load(offsets_ptr + there * 2), 64)
    gate_scale = tl.load(scales_ptr + here * 3)
    up_scale = tl.load(scales_ptr + here * 3 + 1)
    n = plane * (BN * STEPS) + tl.arange(0, BN)
    active = rank > 0
    place = stacked_place(places_ptr, slot, STACKED)
    # Factors are under way before the wait: behind it they would be a second trip to memory.
    gate_b_NR, up_b_NR, a_RN = _factors(
        values_ptr, offset, next_offset, n, active, rank, next_rank, WIDTH, R, SHRINK, MIXED
    )  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if count > 0:
        gate_MN, up_MN = _gates(gate_up_ptr, row_M, real_M1, n, stride, WIDTH)
        gate_h_MR = first_product(
            h_ptr, 0, entry_M, row_M, real_M1 & active, h_rows, place, stride, 2 * WIDTH, PLANES, 2, R, STACKED
        )
        up_h_MR = first_product(
            h_ptr, 1, entry_M, row_M, real_M1 & active, h_rows, place, stride, 2 * WIDTH, PLANES, 2, R, STACKED
        )
        if SQUARES > 0:
            squares_MP = plane_squares(squares_ptr, row_M, real_M1, SQUARES, WIDE)
        next_h_MR = tl.zeros((BM, R), tl.float32)
        for step in tl.static_range(STEPS):
            if step + 1 < STEPS:
                # What the next columns need is under way while these are computed.
                later_n = n + BN
                later_gate_b_NR, later_up_b_NR, later_a_RN = _factors(
                    values_ptr, offset, next_offset, later_n, active, rank, next_rank, WIDTH, R, SHRINK, MIXED
                )  # fmt: skip
                later_gate_MN, later_up_MN = _gates(gate_up_ptr, row_M, real_M1, later_n, stride, WIDTH)
            gate_b_NR, up_b_NR = held(gate_b_NR, EARLY), held(up_b_NR, EARLY)
            gate_MN, up_MN = held(gate_MN, EARLY).to(tl.float32), held(up_MN, EARLY).to(tl.float32)
            if step == 0:
                gate_h_MR, up_h_MR = held(gate_h_MR.to(tl.float32), EARLY), held(up_h_MR.to(tl.float32), EARLY)
                if SQUARES > 0:
                    factor_M1 = norm_factor(held(squares_MP, EARLY), eps, D)
                    gate_h_MR, up_h_MR = gate_h_MR * factor_M1, up_h_MR * factor_M1
                if BIASED:
                    gate_h_MR = with_ones(gate_h_MR, ranks_ptr, here, 0, R)
                    up_h_MR = with_ones(up_h_MR, ranks_ptr, here, 1, R)
                gate_h_MR, up_h_MR = gate_h_MR.to(gate_b_NR.dtype), up_h_MR.to(up_b_NR.dtype)
            if SQUARES > 0:
                gate_MN, up_MN = gate_MN * factor_M1, up_MN * factor_M1
            gate_MN += tl.dot(gate_h_MR, tl.trans(gate_b_NR), input_precision="ieee") * gate_scale
            up_MN += tl.dot(up_h_MR, tl.trans(up_b_NR), input_precision="ieee") * up_scale
            inner_MN = (silu(gate_MN.to(dtype).to(tl.float32), dtype) * up_MN.to(dtype).to(tl.float32)).to(dtype)
            real_MN = real_M1 & (n < WIDTH)[None, :]
            tl.store(out_ptr + row_M[:, None] * WIDTH + n[None, :], inner_MN, mask=real_MN)
            if SHRINK:
                a_RN = held(a_RN, EARLY)
                # In a block of its own: chained to the products above, every warp would compute all of those.
                if next_rank > 0:
                    next_h_MR = tl.dot(inner_MN.to(a_RN.dtype), tl.trans(a_RN), next_h_MR, input_precision="ieee")
            if step + 1 < STEPS:
                n, gate_b_NR, up_b_NR, a_RN = later_n, later_gate_b_NR, later_up_b_NR, later_a_RN
                gate_MN, up_MN = later_gate_MN, later_up_MN
        if SHRINK:  # noqa: SIM102 (known when compiled; the next is not)
            if next_rank > 0:
                at_MR = (plane * h_rows + entry_M)[:, None] * R + tl.arange(0, R)[None, :]
                tl.store(next_h_ptr + at_MR, next_h_MR, mask=real_M1)


def adapted_gate(
    step: KernelStep,
    adapted: Adapted,
    gate_up_T2I: torch.Tensor,
    squares_TP: torch.Tensor | None = None,
    width: int = 0,
    eps: float = 0.0,
    next_site: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    steps: int | None = None,
) -> tuple[torch.Tensor, Adapted | None]:
    """[T, I] of [T, 2I] with what stands behind it, and the first product at `next_site` where there is one. With
    `squares_TP` of a norm over `width` values, gates, ups and the adapters' first product lack its factor."""
    tokens, (inner, _) = gate_up_T2I.shape[0], step.pool.geometry.widths(adapted.site)
    pool, tiles, variant = step.pool, step.tiles, step.variant
    h_PGAR, rank = adapted.h_PGAR, variant.rank
    assert gate_up_T2I.stride(1) == 1, "rows must be contiguous"
    assert h_PGAR is None or h_PGAR.shape[1] == 2, "a first product of two parts"
    best = choice(step)
    steps = steps or best.gate_steps
    chosen, next_planes = columns(best.gate_block, rank, tiles, inner, steps, block)
    out_TI = gate_up_T2I.new_empty(tokens, inner)
    next_h_PGAR = out_TI if next_site is None else step.work(next_site % 2, next_planes, 1)
    squares = 0 if squares_TP is None else squares_TP.shape[1]
    early = is_early(out_TI)
    adapted_gate_kernel[(next_planes, tiles.num_tiles)](
        gate_up_T2I,
        gate_up_T2I if squares_TP is None else squares_TP,
        gate_up_T2I if h_PGAR is None else h_PGAR,
        out_TI,
        next_h_PGAR,
        *tables(step),
        adapted.site,
        0 if next_site is None else next_site,
        len(pool.geometry.sites),
        tokens,
        gate_up_T2I.stride(0),
        eps,
        WIDTH=inner,
        PLANES=1 if h_PGAR is None else h_PGAR.shape[0],
        D=max(1, width),
        SQUARES=squares,
        WIDE=triton.next_power_of_2(max(1, squares)),
        R=rank,
        BM=tiles.block,
        BN=chosen,
        STEPS=steps,
        SHRINK=next_site is not None,
        MIXED=variant.mixed,
        BIASED=variant.biased,
        STACKED=h_PGAR is None,
        EARLY=early,
        num_warps=warps or best.gate_warps,
        **options(early),
    )
    return out_TI, None if next_site is None else Adapted(next_site, next_h_PGAR)
