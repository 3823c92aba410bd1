"""The first product of adapters: rows of the input into ranks, each row with its own adapter's factor.

Owns h = x @ a.T of one site for rows sorted by slot, in partial sums over the inputs, and for an embedding
h = a[id]. Ignores scales and the second product (`lora.kernels.expand`), which sums the parts in their
order: nothing is atomic. How the inputs are cut depends on their number alone, so a row's bits depend
on neither its batch nor the ranks it meets there.

Shapes: T rows, A sorted rows with an adapter, K inputs, G parts, P splits of the inputs, R ranks read.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lora.device_pool import DevicePool
from lora.geometry import Kind
from lora.kernels.early import await_launch, held, is_early, options
from lora.segments import Tiles

SPAN = 1024
"""Inputs that one program sums."""
MIN_RANK = 16
"""Ranks a product of tensor cores takes at least."""


@dataclass(frozen=True, slots=True)
class ShrinkConfig:
    """Inputs read at a time, warps, loads in flight."""

    inputs: int = 256
    warps: int = 2
    stages: int = 3


def num_splits(inputs: int) -> int:
    return max(1, inputs // SPAN)


def workspace_shape(inputs: int, parts: int, rows: int, rank: int) -> tuple[int, int, int, int]:
    """[P, G, A, R], fp32."""
    return num_splits(inputs), parts, max(1, rows), max(MIN_RANK, rank)


def lora_shrink_reference(pool: DevicePool, site: int, x_TK: torch.Tensor, tiles: Tiles, h_PGAR: torch.Tensor) -> None:
    h_PGAR.zero_()
    for slot, start, count in tiles.tiles_N3.tolist():
        if not count or not pool.layout(slot, site).rank:
            continue
        x_SK = x_TK[tiles.rows_T[start : start + count].long()].float()
        for part, a_RK in enumerate(pool.factors(slot, site)[0]):
            pieces = zip(_cut(x_SK, len(h_PGAR)), _cut(a_RK.float(), len(h_PGAR)), strict=True)
            for split, (x_SC, a_RC) in enumerate(pieces):
                h_PGAR[split, part, start : start + count, : a_RK.shape[0]] = x_SC @ a_RC.T


def _cut(tensor: torch.Tensor, splits: int) -> list[torch.Tensor]:
    return list(tensor.split(_span(tensor.shape[1], splits), dim=1))


def _span(inputs: int, splits: int) -> int:
    return -(-inputs // splits)


@triton.jit(do_not_specialize=["site", "h_rows"])
def lora_shrink_kernel(
    x_ptr, values_ptr, offsets_ptr, ranks_ptr, rows_ptr, tiles_ptr, h_ptr, site, sites, x_stride, h_rows,
    K: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    MIXED: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    slot = tl.load(tile_ptr)
    start = tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2)
    entry = slot * sites + site
    rank = tl.multiple_of(tl.load(ranks_ptr + entry * 4), 8)
    part = plane % PARTS
    first = plane // PARTS * SPAN
    m = tl.arange(0, BM)
    r = tl.arange(0, R)
    k = tl.arange(0, BK)
    real_M1 = (m < count)[:, None]
    row_M = tl.load(rows_ptr + start + m, mask=m < count, other=0)
    a_ptr = values_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * 2), 64)
    active = (count > 0) & (rank > 0)
    stride = rank if MIXED else R
    real_R1 = (r < rank)[:, None]
    x_MK_ptr = x_ptr + row_M.to(tl.int64)[:, None] * x_stride + first + k[None, :]
    a_RK_ptr = a_ptr + (part * stride + r).to(tl.int64)[:, None] * K + first + k[None, :]
    at_MR = (plane * h_rows + start + m)[:, None] * R + r[None, :]
    if SPAN <= BK:
        # One piece: the factor is under way before the wait.
        real_1K = ((k < SPAN) & (first + k < K))[None, :]
        a_RK = tl.load(a_RK_ptr, mask=real_R1 & real_1K & active, other=0.0)
        await_launch(EARLY)
        if active:
            x_MK = tl.load(x_MK_ptr, mask=real_M1 & real_1K, other=0.0)
            x_MK, a_RK = held(x_MK, EARLY), held(a_RK, EARLY)
            tl.store(h_ptr + at_MR, tl.dot(x_MK, tl.trans(a_RK), input_precision="ieee"), mask=real_M1)
    else:
        await_launch(EARLY)
        if active:
            h_MR = tl.zeros((BM, R), tl.float32)
            for at in tl.range(0, SPAN, BK, num_stages=STAGES):
                if SPAN % BK == 0 and K % SPAN == 0:
                    x_MK = tl.load(x_MK_ptr + at, mask=real_M1, other=0.0)
                    if MIXED:
                        a_RK = tl.load(a_RK_ptr + at, mask=real_R1, other=0.0)
                    else:
                        a_RK = tl.load(a_RK_ptr + at)
                else:
                    real_1K = ((at + k < SPAN) & (first + at + k < K))[None, :]
                    x_MK = tl.load(x_MK_ptr + at, mask=real_M1 & real_1K, other=0.0)
                    a_RK = tl.load(a_RK_ptr + at, mask=real_R1 & real_1K, other=0.0)
                h_MR = tl.dot(x_MK, tl.trans(a_RK), h_MR, input_precision="ieee")
            tl.store(h_ptr + at_MR, h_MR, mask=real_M1)


@triton.jit(do_not_specialize=["site"])
def lora_gather_kernel(
    ids_ptr, values_ptr, offsets_ptr, ranks_ptr, rows_ptr, tiles_ptr, h_ptr, site, sites,
    R: tl.constexpr, BM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    start = tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2)
    entry = tl.load(tile_ptr) * sites + site
    rank = tl.multiple_of(tl.load(ranks_ptr + entry * 4), 8)
    m = tl.arange(0, BM)
    r = tl.arange(0, R)
    row_M = tl.load(rows_ptr + start + m, mask=m < count, other=0)
    a_ptr = values_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * 2), 64)
    await_launch(EARLY)
    id_M = tl.load(ids_ptr + row_M, mask=m < count, other=-1).to(tl.int64)
    real_MR = ((m < count) & (id_M >= 0))[:, None] & (r < rank)[None, :]
    h_MR = tl.load(a_ptr + id_M[:, None] * rank + r[None, :], mask=real_MR, other=0.0).to(tl.float32)
    tl.store(h_ptr + (start + m)[:, None] * R + r[None, :], h_MR, mask=(m < count)[:, None])


def lora_shrink(
    pool: DevicePool,
    site: int,
    x_TK: torch.Tensor,
    tiles: Tiles,
    h_PGAR: torch.Tensor,
    mixed: bool = True,
    config: ShrinkConfig = ShrinkConfig(),
) -> None:
    """Fill `h_PGAR` (see `workspace_shape`) for the rows of `tiles`; for an embedding `x_TK` are ids [T].

    The inputs are cut into as many spans as it has planes, by default as `num_splits` says. R is at least every
    padded rank met. Without `mixed`, every slot met that adapts the site does so at exactly R.
    """
    splits, parts, rows, rank = h_PGAR.shape
    assert h_PGAR.is_contiguous() and rows >= 1 and rank >= MIN_RANK, f"workspace {list(h_PGAR.shape)}"
    early = is_early(h_PGAR)
    tables = pool.values_U, pool.offsets_SX2, pool.ranks_SX4, tiles.rows_T, tiles.tiles_N3, h_PGAR
    sites = len(pool.geometry.sites)
    if pool.geometry.sites[site].kind is Kind.EMBEDDING:
        lora_gather_kernel[(tiles.num_tiles,)](
            x_TK, *tables, site, sites, R=rank, BM=tiles.block, EARLY=early, num_warps=2, **options(early)
        )
        return
    inputs = pool.geometry.inputs(site)
    assert x_TK.stride(1) == 1 and x_TK.shape[1] == inputs, f"inputs {list(x_TK.shape)}, expected {inputs} wide"
    lora_shrink_kernel[(splits * parts, tiles.num_tiles)](
        x_TK,
        *tables,
        site,
        sites,
        x_TK.stride(0),
        rows,
        K=inputs,
        SPAN=_span(inputs, splits),
        PARTS=parts,
        R=rank,
        BM=tiles.block,
        BK=max(16, min(config.inputs, triton.next_power_of_2(_span(inputs, splits)))),
        MIXED=mixed,
        STAGES=config.stages,
        EARLY=early,
        num_warps=config.warps,
        **options(early),
    )
