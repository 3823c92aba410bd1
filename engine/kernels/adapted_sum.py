"""The residual stream between two products of which rows have adapters.

Owns, in one launch: the adapters' second product added to the projection before, their sum added to the
residual stream, its squares, the inputs of the next product, and the adapters' first product of those. A
program sees some rows and some columns, so sums over columns are left in planes for whoever comes next
(`adapted_tile`). Ignores everything else of both products.

Shapes: T tokens, D width, A sorted rows, P planes, G parts of the next site and their ranks, R ranks.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.adapted_tile import (
    behind_reference,
    choice,
    columns,
    factor_rows,
    first_product,
    stacked_place,
    tables,
    tile_rows,
    with_ones,
)
from engine.kernels.early import await_inputs, is_early, options, release_next
from lora.kernel_step import KernelStep
from lora.kernels.early import held
from lora.kernels.expand import lora_expand_reference
from lora.kernels.shrink import lora_shrink_reference


@dataclass(frozen=True, slots=True)
class Adapted:
    """A product whose adapters' first product is known: its site, and [P, G, A, R], None where that stands behind
    the model's product."""

    site: int
    h_PGAR: torch.Tensor | None = None

    def planes(self, step: KernelStep, y_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's product alone, and the adapters' first, as references take them."""
        return behind_reference(step, self.site, y_TE) if self.h_PGAR is None else (y_TE, self.h_PGAR)


@dataclass(frozen=True, slots=True)
class Stream:
    """What an adapted product takes: inputs [T, D] without the norm's factor, whose squares lie in [T, P], and its
    site's first product, None where nothing follows or that comes out of the model's product."""

    x_TD: torch.Tensor
    squares_TP: torch.Tensor
    adapted: Adapted | None


def adapted_sum_reference(
    step: KernelStep,
    y_TD: torch.Tensor | None,
    before: Adapted | None,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    next_site: int | None,
) -> Stream:
    if y_TD is not None and before is not None:
        y_TD, h_PGAR = before.planes(step, y_TD.clone())
        lora_expand_reference(step.pool, before.site, h_PGAR, step.tiles, y_TD)
        residual_TD += y_TD
    x_TD = residual_TD * weight_D
    squares_T1 = residual_TD.float().square().sum(1, keepdim=True)
    if next_site is None:
        return Stream(x_TD, squares_T1, None)
    h_1GAR = torch.zeros(1, len(step.pool.geometry.widths(next_site)), len(x_TD), step.variant.rank, device=x_TD.device)
    lora_shrink_reference(step.pool, next_site, x_TD, step.tiles, h_1GAR)
    return Stream(x_TD, squares_T1, Adapted(next_site, h_1GAR))


@triton.jit
def _factors(
    values_ptr, weight_ptr, offset, next_offset, n, active, rank, next_rank, D: tl.constexpr, R: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Of columns n: the norm's weights, the second factor, and the next product's first ones, all parts as one:
    several products that share their inputs would each be computed by every warp."""
    real_N = n < D
    weight_N = tl.load(weight_ptr + n, mask=real_N, other=0.0)
    b_NR = weight_N
    if ADD:
        b_NR = factor_rows(values_ptr, offset, 0, n, real_N & active, rank, R, MIXED)
    a_GN = weight_N
    if PARTS > 0:
        g = tl.arange(0, WIDE)
        part_G, r_G = g // R, g % R
        stride = next_rank if MIXED else R
        at_GN = (part_G * stride + r_G).to(tl.int64)[:, None] * D + n[None, :]
        real_G = (part_G < PARTS) & (r_G < next_rank)
        a_GN = tl.load(values_ptr + next_offset + at_GN, mask=real_G[:, None] & real_N[None, :], other=0.0)
    return weight_N, b_NR, a_GN


@triton.jit
def _terms(residual_ptr, y_ptr, row_M, real_M1, n, y_stride, D: tl.constexpr, ADD: tl.constexpr):
    real_MN = real_M1 & (n < D)[None, :]
    sum_MN = tl.load(residual_ptr + row_M[:, None] * D + n[None, :], mask=real_MN, other=0.0)
    y_MN = sum_MN
    if ADD:
        y_MN = tl.load(y_ptr + row_M[:, None] * y_stride + n[None, :], mask=real_MN, other=0.0)
    return sum_MN, y_MN


@triton.jit(do_not_specialize=["site", "next_site", "h_rows"])
def adapted_sum_kernel(
    y_ptr, residual_ptr, weight_ptr, out_ptr, squares_ptr, h_ptr, next_h_ptr,
    values_ptr, offsets_ptr, ranks_ptr, scales_ptr, places_ptr, rows_ptr, tiles_ptr, site, next_site, sites, h_rows,
    y_stride,
    D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, PLANES: tl.constexpr,
    PARTS: tl.constexpr, WIDE: tl.constexpr, NEXT_PLANES: tl.constexpr, ADD: tl.constexpr, MIXED: tl.constexpr,
    BIASED: tl.constexpr, STACKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    slot, count, entry_M, real_M1, row_M = tile_rows(rows_ptr, tiles_ptr, tl.program_id(1), BM)
    n = plane * (BN * STEPS) + tl.arange(0, BN)
    here = slot * sites + site
    there = slot * sites + next_site
    rank = tl.multiple_of(tl.load(ranks_ptr + here * 4), 8)
    scale = tl.load(scales_ptr + here * 3)
    active = (rank > 0) & (scale != 0.0)
    offset = tl.multiple_of(tl.load(offsets_ptr + here * 2 + 1), 64)
    place = stacked_place(places_ptr, slot, STACKED)
    next_rank = tl.multiple_of(tl.load(ranks_ptr + there * 4), 8)
    next_offset = tl.multiple_of(tl.load(offsets_ptr + there * 2), 64)
    # Under way before the wait: behind it, it would be a second trip to memory.
    weight_N, b_NR, a_GN = _factors(
        values_ptr, weight_ptr, offset, next_offset, n, active, rank, next_rank, D, R, PARTS, WIDE, ADD, MIXED
    )  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if count > 0:
        sum_MN, y_MN = _terms(residual_ptr, y_ptr, row_M, real_M1, n, y_stride, D, ADD)
        if ADD:
            h_MR = first_product(
                h_ptr, 0, entry_M, row_M, real_M1 & active, h_rows, place, y_stride, D, PLANES, 1, R, STACKED
            )
        squares_M1 = tl.zeros((BM, 1), tl.float32)
        next_h_MG = tl.zeros((BM, WIDE), tl.float32)
        for step in tl.static_range(STEPS):
            if step + 1 < STEPS:
                # What the next columns need is under way while these are computed.
                later_n = n + BN
                later_weight_N, later_b_NR, later_a_GN = _factors(
                    values_ptr, weight_ptr, offset, next_offset, later_n, active, rank, next_rank, D, R, PARTS, WIDE,
                    ADD, MIXED,
                )  # fmt: skip
                later_sum_MN, later_y_MN = _terms(residual_ptr, y_ptr, row_M, real_M1, later_n, y_stride, D, ADD)
            at_MN = row_M[:, None] * D + n[None, :]
            real_MN = real_M1 & (n < D)[None, :]
            if ADD:
                b_NR, y_MN = held(b_NR, EARLY), held(y_MN, EARLY)
                if step == 0:
                    h_MR = held(h_MR.to(tl.float32), EARLY)
            sum_MN = held(sum_MN, EARLY).to(tl.float32)
            wide_weight_N = held(weight_N, EARLY).to(tl.float32)
            if ADD:
                if step == 0:
                    if BIASED:
                        h_MR = with_ones(h_MR, ranks_ptr, here, 0, R)
                    h_MR = h_MR.to(b_NR.dtype)
                added_MN = y_MN.to(tl.float32) + tl.dot(h_MR, tl.trans(b_NR), input_precision="ieee") * scale
                rounded_MN = (sum_MN + added_MN.to(dtype).to(tl.float32)).to(residual_ptr.dtype.element_ty)
                tl.store(residual_ptr + at_MN, rounded_MN, mask=real_MN)
                sum_MN = rounded_MN.to(tl.float32)
            x_MN = (sum_MN * wide_weight_N[None, :]).to(dtype)
            tl.store(out_ptr + at_MN, x_MN, mask=real_MN)
            squares_M1 += tl.sum(sum_MN * sum_MN, 1)[:, None]
            if PARTS > 0:
                a_GN = held(a_GN, EARLY)
                if next_rank > 0:
                    next_h_MG = tl.dot(x_MN.to(a_GN.dtype), tl.trans(a_GN), next_h_MG, input_precision="ieee")
            if step + 1 < STEPS:
                n, weight_N, b_NR, a_GN = later_n, later_weight_N, later_b_NR, later_a_GN
                sum_MN, y_MN = later_sum_MN, later_y_MN
        tl.store(squares_ptr + row_M[:, None] * NEXT_PLANES + plane, squares_M1, mask=real_M1)
        if PARTS > 0:  # noqa: SIM102 (known when compiled; the next is not)
            if next_rank > 0:
                g = tl.arange(0, WIDE)
                at_MG = ((plane * PARTS + g // R) * h_rows)[None, :] + entry_M[:, None]
                real_MG = real_M1 & (g < PARTS * R)[None, :]
                tl.store(next_h_ptr + at_MG * R + (g % R)[None, :], next_h_MG, mask=real_MG)


def adapted_sum(
    step: KernelStep,
    y_TD: torch.Tensor | None,
    before: Adapted | None,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    next_site: int | None,
    block: int | None = None,
    warps: int | None = None,
    steps: int | None = None,
) -> Stream:
    """The stream after `y_TD`, the product at `before` with what stands behind it, has been added to `residual_TD`
    in place; with neither, as it is. `weight_D` is of the norm before the next product."""
    tokens, width = residual_TD.shape
    pool, tiles, variant = step.pool, step.tiles, step.variant
    assert residual_TD.is_contiguous() and (y_TD is None or y_TD.stride(1) == 1), "rows must be contiguous"
    assert (y_TD is None) == (before is None), "a product and its site come together"
    best, planes_PGAR = choice(step), None if before is None else before.h_PGAR
    stacked = before is not None and planes_PGAR is None
    steps = steps or best.sum_steps
    chosen, planes = columns(best.sum_block, variant.rank, tiles, width, steps, block)
    parts = 0 if next_site is None else len(pool.geometry.widths(next_site))
    x_TD = torch.empty_like(residual_TD)
    squares_TP = torch.empty(tokens, planes, dtype=torch.float32, device=x_TD.device)
    h_PGAR = squares_TP if next_site is None else step.work(next_site % 2, planes, parts)
    early = is_early(residual_TD)
    adapted_sum_kernel[(planes, tiles.num_tiles)](
        x_TD if y_TD is None else y_TD,
        residual_TD,
        weight_D,
        x_TD,
        squares_TP,
        y_TD if stacked else squares_TP if planes_PGAR is None else planes_PGAR,
        h_PGAR,
        *tables(step),
        0 if before is None else before.site,
        0 if next_site is None else next_site,
        len(pool.geometry.sites),
        tokens,
        width if y_TD is None else y_TD.stride(0),
        D=width,
        R=variant.rank,
        BM=tiles.block,
        BN=chosen,
        STEPS=steps,
        PLANES=1 if planes_PGAR is None else planes_PGAR.shape[0],
        PARTS=parts,
        WIDE=triton.next_power_of_2(max(1, parts) * variant.rank),
        NEXT_PLANES=planes,
        ADD=y_TD is not None,
        MIXED=variant.mixed,
        BIASED=variant.biased,
        STACKED=stacked,
        EARLY=early,
        num_warps=warps or best.sum_warps,
        **options(early),
    )
    return Stream(x_TD, squares_TP, None if next_site is None else Adapted(next_site, h_PGAR))
