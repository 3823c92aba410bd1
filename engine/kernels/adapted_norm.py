"""The norm after an adapted projection: the adapters' second product, the residual sum and the norm at once.

Owns x + adapter's added to the residual stream, and the norm of the sum. Rounds where
`lora.kernels.expand` and `engine.kernels.rms_norm` one after the other do. Every program owns a row and
reads its adapter's whole second factor, which pays while rows are few. Ignores the first product
(`lora.kernels.shrink`).

Shapes: T tokens, D width, A sorted rows, P splits, R ranks read.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.rms_norm import add_rms_norm_reference
from lora.device_pool import DevicePool
from lora.kernels.expand import lora_expand_reference
from lora.segments import Tiles

ELEMENTS = 16384
"""Of a factor, that a program holds at once."""


def adapted_norm_reference(
    pool: DevicePool,
    site: int,
    h_PGAR: torch.Tensor,
    tiles: Tiles,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    adapted_TD = x_TD.clone()
    lora_expand_reference(pool, site, h_PGAR, tiles, adapted_TD)
    return add_rms_norm_reference(adapted_TD, residual_TD, weight_D, eps)


@triton.jit
def adapted_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, h_ptr, values_ptr, offsets_ptr, ranks_ptr, scales_ptr, places_ptr,
    site, sites, h_rows, eps,
    D: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    row = token.to(tl.int64) * D
    entry = tl.load(places_ptr + token * 2) * sites + site
    place = tl.load(places_ptr + token * 2 + 1)
    rank = tl.multiple_of(tl.load(ranks_ptr + entry * 4), 8)
    scale = tl.load(scales_ptr + entry * 3)
    b_ptr = values_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * 2 + 1), 64)
    r = tl.arange(0, R)
    n = tl.arange(0, BLOCK)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    await_inputs(EARLY)
    release_next(EARLY)
    h_R = tl.zeros((R,), tl.float32)
    for split in tl.static_range(SPLITS):
        h_R += tl.load(h_ptr + (split * h_rows + place) * R + r, mask=r < rank, other=0.0)
    if BIASED:
        h_R = tl.where((r == tl.load(ranks_ptr + entry * 4 + 1)) & (r < rank), 1.0, h_R)
    h_R = h_R.to(values_ptr.dtype.element_ty).to(tl.float32)
    squares_N = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, D, BLOCK):
        at = first + n
        inside = at < D
        b_NR = tl.load(b_ptr + at[:, None] * rank + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
        x_N = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        x_N = (x_N + tl.sum(b_NR.to(tl.float32) * h_R[None, :], 1) * scale).to(dtype).to(tl.float32)
        x_N += tl.load(residual_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded_N = x_N.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + at, rounded_N, mask=inside)
        squares_N += rounded_N.to(tl.float32) * rounded_N.to(tl.float32)
    tl.debug_barrier()  # other threads may read a sum than those that stored it
    factor = tl.rsqrt(tl.sum(squares_N, 0) * (1.0 / D) + eps)
    for first in tl.range(0, D, BLOCK):
        at = first + n
        inside = at < D
        x_N = tl.load(residual_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        weight_N = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        normed_N = (x_N * factor).to(dtype).to(tl.float32) * weight_N
        tl.store(out_ptr + row + at, normed_N.to(dtype), mask=inside)


def adapted_norm(
    pool: DevicePool,
    site: int,
    h_PGAR: torch.Tensor,
    tiles: Tiles,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    biased: bool = True,
    warps: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed sum, sum). The sum replaces `residual_TD` in place; `out` may be `x_TD`. `tiles` know every row,
    `h_PGAR` is what `lora_shrink` left; without `biased`, no slot met has a bias."""
    tokens, width = x_TD.shape
    splits, parts, rows, rank = h_PGAR.shape
    assert x_TD.is_contiguous() and residual_TD.is_contiguous(), "rows must be contiguous"
    assert parts == 1 and pool.geometry.widths(site) == (width,), f"site {site} is {pool.geometry.widths(site)} wide"
    out = torch.empty_like(x_TD) if out is None else out
    early = is_early(x_TD)
    if tokens:
        adapted_norm_kernel[(tokens,)](
            x_TD,
            residual_TD,
            weight_D,
            out,
            h_PGAR,
            pool.values_U,
            pool.offsets_SX2,
            pool.ranks_SX4,
            pool.scales_SX3,
            tiles.places_T2,
            site,
            len(pool.geometry.sites),
            rows,
            eps,
            D=width,
            SPLITS=splits,
            R=rank,
            BLOCK=min(triton.next_power_of_2(width), max(16, ELEMENTS // rank)),
            BIASED=biased,
            EARLY=early,
            num_warps=warps,
            **options(early),
        )
    return out, residual_TD
