"""The second product of adapters: from ranks to outputs, scaled and added to what the model computed.

Owns y += scale * (h @ b.T) of one site for rows sorted by slot. Sums of `lora.kernels.shrink` are added up
here, in order; the scale of each part is applied in fp32, last. Ignores how y came about.

Shapes: T rows, A sorted rows with an adapter, G parts, P splits, R ranks read, N outputs of all parts.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from lora.device_pool import DevicePool
from lora.kernels.early import await_launch, is_early, options
from lora.segments import Tiles


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """Outputs a program computes, and warps."""

    outputs: int = 128
    warps: int = 4


def lora_expand_reference(pool: DevicePool, site: int, h_PGAR: torch.Tensor, tiles: Tiles, y_TN: torch.Tensor) -> None:
    for slot, start, count in tiles.tiles_N3.tolist():
        layout = pool.layout(slot, site) if count else None
        if layout is None or not layout.rank:
            continue
        rows, first = tiles.rows_T[start : start + count].long(), 0
        for part, b_NR in enumerate(pool.factors(slot, site)[1]):
            h_SR = h_PGAR[:, part, start : start + count, : layout.rank].sum(0)
            if layout.ones[part] >= 0:
                h_SR[:, layout.ones[part]] = 1.0
            columns = slice(first, first + b_NR.shape[0])
            delta_SN = (h_SR.to(b_NR.dtype).float() @ b_NR.float().T) * layout.scales[part]
            y_TN[rows, columns] = (y_TN[rows, columns].float() + delta_SN).to(y_TN.dtype)
            first += b_NR.shape[0]


@triton.jit(do_not_specialize=["site", "h_rows"])
def lora_expand_kernel(
    h_ptr, values_ptr, offsets_ptr, ranks_ptr, scales_ptr, rows_ptr, tiles_ptr, y_ptr,
    site, sites, y_stride, h_rows, skipped,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MIXED: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 3
    slot = tl.load(tile_ptr)
    start = tl.load(tile_ptr + 1)
    count = tl.load(tile_ptr + 2)
    entry = slot * sites + site
    rank = tl.multiple_of(tl.load(ranks_ptr + entry * 4), 8)
    T0: tl.constexpr = (W0 + BN - 1) // BN
    T1: tl.constexpr = (W1 + BN - 1) // BN
    part = (column >= T0).to(tl.int32) + (column >= T0 + T1).to(tl.int32)
    width = tl.where(part == 0, W0, tl.where(part == 1, W1, W2))
    base = tl.where(part == 0, 0, tl.where(part == 1, W0, W0 + W1))
    local = (column - tl.where(part == 0, 0, tl.where(part == 1, T0, T0 + T1))) * BN
    scale = tl.load(scales_ptr + entry * 3 + part)
    m = tl.arange(0, BM)
    n = local + tl.arange(0, BN)
    r = tl.arange(0, R)
    real_N = n < width
    row_M = tl.load(rows_ptr + start + m, mask=m < count, other=0).to(tl.int64)
    b_ptr = values_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * 2 + 1), 64)
    active = (count > 0) & (rank > 0) & (scale != 0.0)
    b_ptr += tl.cast(skipped, tl.int64) * rank
    if MIXED:
        b_ptr += (base + n).to(tl.int64)[:, None] * rank + r[None, :]
        real_NR = real_N[:, None] & (r < rank)[None, :] & active
    else:
        b_ptr += (base + n).to(tl.int64)[:, None] * R + r[None, :]
        real_NR = real_N[:, None] & active
    b_NR = tl.load(b_ptr, mask=real_NR, other=0.0)
    await_launch(EARLY)
    if active:
        h_MR_ptr = h_ptr + (part * h_rows + start + m)[:, None] * R + r[None, :]
        real_M1 = (m < count)[:, None]
        h_MR = tl.load(h_MR_ptr, mask=real_M1, other=0.0)
        for split in tl.static_range(1, SPLITS):
            h_MR += tl.load(h_MR_ptr + split * PARTS * h_rows * R, mask=real_M1, other=0.0)
        if BIASED:
            one = tl.load(ranks_ptr + entry * 4 + 1 + part)
            h_MR = tl.where((r == one)[None, :], 1.0, h_MR)
        delta_MN = tl.dot(h_MR.to(b_NR.dtype), tl.trans(b_NR), input_precision="ieee") * scale
        y_MN_ptr = y_ptr + row_M[:, None] * y_stride + (base + n)[None, :]
        real_MN = real_M1 & real_N[None, :]
        y_MN = tl.load(y_MN_ptr, mask=real_MN, other=0.0).to(tl.float32) + delta_MN
        tl.store(y_MN_ptr, y_MN.to(y_ptr.dtype.element_ty), mask=real_MN)


def lora_expand(
    pool: DevicePool,
    site: int,
    h_PGAR: torch.Tensor,
    tiles: Tiles,
    y_TN: torch.Tensor,
    mixed: bool = True,
    biased: bool = True,
    config: ExpandConfig = ExpandConfig(),
    outputs: slice = slice(None),
) -> None:
    """Add to `y_TN` in place, for the rows of `tiles`, what `lora_shrink` left in `h_PGAR`.

    `mixed` as there; without `biased`, no slot met has a bias. `outputs` are those of a single part that y has.
    """
    splits, parts, rows, rank = h_PGAR.shape
    widths = pool.geometry.widths(site)
    start, end, _ = outputs.indices(sum(widths))
    assert len(widths) == 1 or end - start == sum(widths), f"outputs {outputs} of {len(widths)} parts"
    widths = (end - start,) if len(widths) == 1 else widths
    assert y_TN.stride(1) == 1 and y_TN.shape[1] == sum(widths), f"{list(y_TN.shape)}, expected {sum(widths)} outputs"
    assert parts == len(widths), f"a workspace of {parts} parts for {len(widths)}"
    padded = (*widths, 0, 0)
    block = max(16, min(config.outputs, triton.next_power_of_2(max(widths))))
    early = is_early(y_TN)
    lora_expand_kernel[(sum(triton.cdiv(width, block) for width in widths), tiles.num_tiles)](
        h_PGAR,
        pool.values_U,
        pool.offsets_SX2,
        pool.ranks_SX4,
        pool.scales_SX3,
        tiles.rows_T,
        tiles.tiles_N3,
        y_TN,
        site,
        len(pool.geometry.sites),
        y_TN.stride(0),
        rows,
        start,
        W0=padded[0],
        W1=padded[1],
        W2=padded[2],
        PARTS=parts,
        SPLITS=splits,
        R=rank,
        BM=tiles.block,
        BN=block,
        MIXED=mixed,
        BIASED=biased,
        EARLY=early,
        num_warps=config.warps,
        **options(early),
    )
