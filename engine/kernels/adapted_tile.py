"""What kernels with adapters in them have in common.

Owns how such a kernel finds the adapter of its tile of rows, takes a first product, and the factor of a norm
whose squares lie in planes. Ignores what the kernels compute.

A first product is either left in planes of sums by the kernel before, or stands behind the model's own product
of the same inputs, in the same rows (`lora.stack`), with its adapter's place.

A norm before an adapted product is left out of the product's inputs: they are the residual stream times the
norm's weights alone. Whoever reads the product, or the adapters' first product of the same inputs,
multiplies by a row's factor. So the kernel that adds to the residual stream need not see whole rows.

Shapes: M rows of a tile, P planes, G parts, A sorted rows, R ranks, T tokens.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lora.kernel_step import KernelStep
from lora.segments import Tiles

MIN_BLOCK = 16
"""Columns that a program takes at least."""
TOGETHER = tl.constexpr(64)
"""Planes whose loads are under way at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Columns and warps of each launch's programs for factors of rank 16 (columns fall as ranks and a tile's
    rows rise, so that a program holds as much), into how many pieces the first product that is a launch of its
    own cuts its inputs, and whether that runs beside the model's product of the same inputs. A program takes so
    many times those columns, or heads, in `steps`: what it finds its factors by it looks up once, and a step's are
    under way while the one before is computed."""

    sum_block: int
    sum_warps: int
    gate_block: int
    gate_warps: int
    rope_warps: int
    splits: int
    shrink_warps: int
    beside: bool = False
    sum_steps: int = 1
    gate_steps: int = 1
    rope_steps: int = 1


CHOICES = (
    (1, Choice(256, 8, 128, 2, 2, 16, 1)),
    (16, Choice(256, 4, 256, 8, 4, 16, 2)),
    (1 << 30, Choice(256, 4, 128, 4, 4, 8, 2, beside=True, sum_steps=4, gate_steps=12, rope_steps=4)),
)
"""By the most tiles of a launch that a choice is for."""

STACKED = (
    (1, Choice(256, 8, 256, 8, 4, 1, 1)),
    (6, Choice(256, 8, 128, 4, 4, 1, 1)),
    (1 << 30, Choice(256, 4, 128, 4, 2, 1, 1)),
)
"""The same where first products stand behind the model's."""


def choice(step: KernelStep) -> Choice:
    choices = CHOICES if step.stack is None else STACKED
    return next(found for most, found in choices if step.tiles.num_tiles <= most)


def columns(
    block: int, rank: int, tiles: Tiles, width: int, steps: int = 1, exact: int | None = None
) -> tuple[int, int]:
    """Columns of a program's step, `block` for few ranks and rows and `exact` if given, and how many programs."""
    found = exact or max(MIN_BLOCK, min(block * 16 // max(16, rank, tiles.block), triton.next_power_of_2(width)))
    return found, triton.cdiv(width, found * steps)


def tables(step: KernelStep) -> tuple[torch.Tensor, ...]:
    """What every such kernel is given to find factors, places and rows by."""
    pool, tiles = step.pool, step.tiles
    places_S = tiles.rows_T if step.stack is None else step.stack.places_S
    return pool.values_U, pool.offsets_SX2, pool.ranks_SX4, pool.scales_SX3, places_S, tiles.rows_T, tiles.tiles_N3


def behind_reference(step: KernelStep, site: int, y_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's product without what stands behind it, and that as [1, G, A, R]."""
    assert step.stack is not None, "nothing stands behind the products"
    widths, rank, rows_A = step.pool.geometry.widths(site), step.variant.rank, step.tiles.rows_T.long()
    own, behind = y_TE.split([sum(widths), y_TE.shape[1] - sum(widths)], dim=1)
    h_1GAR = torch.zeros(1, len(widths), len(rows_A), rank, device=y_TE.device)
    for slot, start, count in step.tiles.tiles_N3.tolist():
        place = int(step.stack.places_S[slot])
        if count and place >= 0:
            first, rows = place * len(widths) * rank, rows_A[start : start + count]
            part = behind[rows, first : first + len(widths) * rank].view(count, len(widths), rank)
            h_1GAR[0, :, start : start + count] = part.transpose(0, 1).float()
    return own, h_1GAR


@triton.jit
def tile_rows(rows_ptr, tiles_ptr, tile, BM: tl.constexpr):
    """Slot, number of rows, entries of the order by slot, which of them are the tile's [M, 1], and the rows."""
    slot = tl.load(tiles_ptr + tile * 3)
    start = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    m = tl.arange(0, BM)
    row_M = tl.load(rows_ptr + start + m, mask=m < count, other=0).to(tl.int64)
    return slot, count, start + m, (m < count)[:, None], row_M


@triton.jit
def factor_rows(values_ptr, offset, first, n, real_N, rank, R: tl.constexpr, MIXED: tl.constexpr):
    """Rows `first` + n of a second factor, [N, R], zeros beyond a smaller rank."""
    r = tl.arange(0, R)
    stride = rank if MIXED else R
    at_NR = (first + n).to(tl.int64)[:, None] * stride + r[None, :]
    real_NR = real_N[:, None] & (r < rank)[None, :] if MIXED else real_N[:, None]
    return tl.load(values_ptr + offset + at_NR, mask=real_NR, other=0.0)


@triton.jit
def factor_columns(
    values_ptr, offset, part, n, real_N, rank, K: tl.constexpr, R: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Columns n of a part's first factor, [R, N], zeros beyond a smaller rank."""
    r = tl.arange(0, R)
    stride = rank if MIXED else R
    at_RN = (part * stride + r).to(tl.int64)[:, None] * K + n[None, :]
    real_RN = (r < rank)[:, None] & real_N[None, :] if MIXED else real_N[None, :]
    return tl.load(values_ptr + offset + at_RN, mask=real_RN, other=0.0)


@triton.jit
def summed(
    h_ptr, part, entry_M, real_M1, h_rows, PLANES: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A first product [M, R], its planes added up in order."""
    r = tl.arange(0, R)
    h_MR_ptr = h_ptr + (part * h_rows + entry_M)[:, None] * R + r[None, :]
    if PLANES <= TOGETHER:
        h_MR = tl.load(h_MR_ptr, mask=real_M1, other=0.0)
        for plane in tl.static_range(1, PLANES):
            h_MR += tl.load(h_MR_ptr + plane * PARTS * h_rows * R, mask=real_M1, other=0.0)
    else:
        h_MR = tl.zeros(h_MR_ptr.shape, tl.float32)
        for first in range(0, PLANES, TOGETHER):
            for plane in tl.static_range(TOGETHER):
                at_MR_ptr = h_MR_ptr + (first + plane) * PARTS * h_rows * R
                h_MR += tl.load(at_MR_ptr, mask=real_M1 & (first + plane < PLANES), other=0.0)
    return h_MR


@triton.jit
def stacked_place(places_ptr, slot, STACKED: tl.constexpr):
    place = 0
    if STACKED:
        place = tl.load(places_ptr + slot)
    return place


@triton.jit
def first_product(
    h_ptr, part, entry_M, row_M, real_M1, h_rows, place, stride, OUTPUTS: tl.constexpr, PLANES: tl.constexpr,
    PARTS: tl.constexpr, R: tl.constexpr, STACKED: tl.constexpr,
):  # fmt: skip
    """[M, R], of rows that have any: from planes, or with STACKED from behind the OUTPUTS of rows `stride` apart."""
    if STACKED:
        first = OUTPUTS + (place * PARTS + part) * R
        h_MR = tl.load(h_ptr + row_M[:, None] * stride + first + tl.arange(0, R)[None, :], mask=real_M1, other=0.0)
    else:
        h_MR = summed(h_ptr, part, entry_M, real_M1, h_rows, PLANES, PARTS, R)
    return h_MR


@triton.jit
def plane_squares(squares_ptr, row_M, real_M1, PLANES: tl.constexpr, WIDE: tl.constexpr):
    """Sums of squares [M, P] of the rows, from [T, P]."""
    plane = tl.arange(0, WIDE)
    real_MP = real_M1 & (plane < PLANES)[None, :]
    return tl.load(squares_ptr + row_M[:, None] * PLANES + plane[None, :], mask=real_MP, other=0.0)


@triton.jit
def norm_factor(squares_MP, eps, D: tl.constexpr):
    """The factor [M, 1] of a norm over D values."""
    return tl.rsqrt(tl.sum(squares_MP, 1) * (1.0 / D) + eps)[:, None]


@triton.jit
def with_ones(h_MR, ranks_ptr, entry, part, R: tl.constexpr):
    """A bias is a column of the second factor whose input is always one."""
    one = tl.load(ranks_ptr + entry * 4 + 1 + part)
    return tl.where((tl.arange(0, R) == one)[None, :], 1.0, h_MR)
