"""A round's budget spent on what the drafter is sure of now, in one launch.

Owns the rule of `engine.dspark.planner.spend`, its reference: the highest fresh survivals win, each row's
first drafts before all others, ties by position and then by row. Ignores where the budget comes from.

No sort: a draft is taken if fewer than the budget rank before it, and the rank of the last one taken is
found by halving among ordered keys, ties among equal keys by counting them in order.

Shapes: B rows, G drafts, N = B * G places.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two

FORCED = tl.constexpr(0x40000000)
"""Bits of 2.0: above every survival."""
BARRED = tl.constexpr(-1)


@triton.jit
def _spend_kernel(
    survival_ptr, window_ptr, least_ptr, budget_ptr, out_ptr, rows,
    G: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b_B = tl.arange(0, ROWS)
    inside_B = b_B < rows
    window_B = tl.load(window_ptr + b_B, mask=inside_B, other=0)
    least_B = tl.minimum(tl.load(least_ptr + b_B, mask=inside_B, other=0), window_B)
    budget = tl.load(budget_ptr)
    # A row's survivals never grow; what does not count as a number is none.
    lowest_B = tl.full((ROWS,), 1.0, tl.float32)
    k_W = tl.arange(0, WIDE)
    keys_BW = tl.full((ROWS, WIDE), -1, tl.int32)
    for k in tl.static_range(G):
        value_B = tl.load(survival_ptr + b_B * G + k, mask=inside_B & (k < window_B), other=0.0)
        value_B = tl.where(value_B == value_B, tl.minimum(tl.maximum(value_B, 0.0), 1.0), 0.0)
        lowest_B = tl.minimum(lowest_B, value_B)
        key_B = tl.where(k < least_B, FORCED, lowest_B.to(tl.int32, bitcast=True))
        key_B = tl.where(inside_B & (k < window_B), key_B, BARRED)
        keys_BW = tl.where(k_W[None, :] == k, key_B[:, None], keys_BW)
    # The greatest key that at least `budget` places reach, or 0: all above it are taken.
    low, high = budget * 0, budget * 0 + FORCED
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum(tl.sum((keys_BW >= middle).to(tl.int32), 1), 0) >= budget
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle - 1)
    above_BW = keys_BW > low
    left = budget - tl.sum(tl.sum(above_BW.to(tl.int32), 1), 0)
    # Equal ones in the order of their positions, then of their rows.
    taken_B = tl.sum(above_BW.to(tl.int32), 1)
    for k in tl.static_range(G):
        equal_B = (tl.sum(tl.where(k_W[None, :] == k, keys_BW, 0), 1) == low).to(tl.int32)
        order_B = tl.cumsum(equal_B, 0)
        granted_B = equal_B * (order_B <= left).to(tl.int32)
        taken_B += granted_B
        left -= tl.sum(granted_B, 0)
    tl.store(out_ptr + b_B, taken_B, mask=inside_B)


def spend_rows(
    survival_BG: torch.Tensor,
    window_B: torch.Tensor,
    least_B: torch.Tensor,
    budget_1: torch.Tensor,
    out_B: torch.Tensor,
) -> None:
    """Drafts to verify by row, int32 [B], at most `budget_1` in all and `window_B` each (negative: none). All
    int32 but the float32 survivals, which are contiguous."""
    rows, drafts = survival_BG.shape
    assert survival_BG.is_contiguous() and survival_BG.dtype == torch.float32, "survivals are contiguous float32"
    cells = power_of_two(rows) * power_of_two(drafts)
    _spend_kernel[(1,)](
        survival_BG, window_B, least_B, budget_1, out_B, rows,
        G=drafts, WIDE=power_of_two(drafts), ROWS=power_of_two(rows), num_warps=max(1, min(8, cells // 256)),
    )  # fmt: skip
