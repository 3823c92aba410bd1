"""The gate of a gated block whose gates and ups are adapted: the adapters' second product on the way.

Owns silu(gate + adapter's) * (up + adapter's) for rows sorted by slot, the base's among them. Rounds where
`lora.kernels.expand` and `engine.kernels.swiglu` one after the other do. Ignores the first product
(`lora.kernels.shrink`).

Shapes: T tokens, I intermediate, A sorted rows, P splits, R ranks read.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.swiglu import silu, silu_and_mul_reference
from lora.device_pool import DevicePool
from lora.kernels.expand import lora_expand_reference
from lora.segments import Tiles


def adapted_gate_reference(
    pool: DevicePool, site: int, h_PGAR: torch.Tensor, tiles: Tiles, gate_up_T2I: torch.Tensor
) -> torch.Tensor:
    adapted_T2I = gate_up_T2I.clone()
    lora_expand_reference(pool, site, h_PGAR, tiles, adapted_T2I)
    return silu_and_mul_reference(adapted_T2I)


@triton.jit
def _summed(h_ptr, part, start, h_rows, m, r, real_M1, SPLITS: tl.constexpr, R: tl.constexpr):
    """The first product of some rows, its parts added up in order."""
    h_MR_ptr = h_ptr + (part * h_rows + start + m)[:, None] * R + r[None, :]
    h_MR = tl.load(h_MR_ptr, mask=real_M1, other=0.0)
    for split in tl.static_range(1, SPLITS):
        h_MR += tl.load(h_MR_ptr + split * 2 * h_rows * R, mask=real_M1, other=0.0)
    return h_MR


@triton.jit
def adapted_gate_kernel(
    gate_up_ptr, h_ptr, values_ptr, offsets_ptr, ranks_ptr, scales_ptr, rows_ptr, tiles_ptr, out_ptr,
    site, sites, h_rows, WIDTH: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    start = tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2)
    entry = tl.load(tile_ptr) * sites + site
    rank = tl.multiple_of(tl.load(ranks_ptr + entry * 4), 8)
    m = tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = tl.arange(0, R)
    real_M1 = (m < count)[:, None]
    row_M = tl.load(rows_ptr + start + m, mask=m < count, other=0).to(tl.int64)
    b_ptr = values_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * 2 + 1), 64)
    real_NR = ((n < WIDTH) & (count > 0))[:, None] & (r < rank)[None, :]
    at_NR = n.to(tl.int64)[:, None] * rank + r[None, :]
    gate_b_NR = tl.load(b_ptr + at_NR, mask=real_NR, other=0.0)
    up_b_NR = tl.load(b_ptr + WIDTH * rank + at_NR, mask=real_NR, other=0.0)
    await_inputs(EARLY)
    release_next(EARLY)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    real_MN = real_M1 & (n < WIDTH)[None, :]
    gate_MN_ptr = gate_up_ptr + row_M[:, None] * (2 * WIDTH) + n[None, :]
    gate_MN = tl.load(gate_MN_ptr, mask=real_MN, other=0.0).to(tl.float32)
    up_MN = tl.load(gate_MN_ptr + WIDTH, mask=real_MN, other=0.0).to(tl.float32)
    if (count > 0) & (rank > 0):
        gate_h_MR = _summed(h_ptr, 0, start, h_rows, m, r, real_M1, SPLITS, R)
        up_h_MR = _summed(h_ptr, 1, start, h_rows, m, r, real_M1, SPLITS, R)
        if BIASED:
            gate_h_MR = tl.where((r == tl.load(ranks_ptr + entry * 4 + 1))[None, :], 1.0, gate_h_MR)
            up_h_MR = tl.where((r == tl.load(ranks_ptr + entry * 4 + 2))[None, :], 1.0, up_h_MR)
        gate_scale = tl.load(scales_ptr + entry * 3)
        up_scale = tl.load(scales_ptr + entry * 3 + 1)
        gate_MN += tl.dot(gate_h_MR.to(gate_b_NR.dtype), tl.trans(gate_b_NR), input_precision="ieee") * gate_scale
        up_MN += tl.dot(up_h_MR.to(up_b_NR.dtype), tl.trans(up_b_NR), input_precision="ieee") * up_scale
    product_MN = silu(gate_MN.to(dtype).to(tl.float32), dtype) * up_MN.to(dtype).to(tl.float32)
    tl.store(out_ptr + row_M[:, None] * WIDTH + n[None, :], product_MN.to(dtype), mask=real_MN)


def adapted_gate(
    pool: DevicePool,
    site: int,
    h_PGAR: torch.Tensor,
    tiles: Tiles,
    gate_up_T2I: torch.Tensor,
    out: torch.Tensor | None = None,
    biased: bool = True,
    block: int = 64,
    warps: int = 4,
) -> torch.Tensor:
    """[T, I] of contiguous [T, 2I]. `tiles` hold every row, `h_PGAR` what `lora_shrink` left of those with an
    adapter; without `biased`, no slot met has a bias."""
    tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    splits, parts, rows, rank = h_PGAR.shape
    assert gate_up_T2I.is_contiguous() and parts == 2, f"contiguous rows of two parts, got {parts}"
    assert pool.geometry.widths(site) == (width, width), f"site {site} is {pool.geometry.widths(site)} wide"
    out = gate_up_T2I.new_empty(tokens, width) if out is None else out
    early = is_early(out)
    columns = max(16, min(block, triton.next_power_of_2(width)))
    adapted_gate_kernel[(triton.cdiv(width, columns), tiles.num_tiles)](
        gate_up_T2I,
        h_PGAR,
        pool.values_U,
        pool.offsets_SX2,
        pool.ranks_SX4,
        pool.scales_SX3,
        tiles.rows_T,
        tiles.tiles_N3,
        out,
        site,
        len(pool.geometry.sites),
        rows,
        WIDTH=width,
        SPLITS=splits,
        R=rank,
        BM=tiles.block,
        BN=columns,
        BIASED=biased,
        EARLY=early,
        num_warps=warps,
        **options(early),
    )
    return out
