"""What confidences come to, and a round's budget spent on them, in one launch.

Owns survival (the running product of calibrated confidences, `engine.dspark.scaling` its reference) and the
rule of `engine.dspark.planner.spend`, its reference: the highest fresh survivals win, each row's
first drafts before all others, ties by position and then by row. Ignores where the budget comes from.

No sort: a draft is taken if fewer than the budget rank before it, and the rank of the last one taken is
found by halving among ordered keys, ties among equal keys by counting them in order.

Shapes: B rows, G drafts, N = B * G places.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next

FORCED = tl.constexpr(0x40000000)
"""Bits of 2.0: above every survival."""
BARRED = tl.constexpr(-1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What survivals are made from: logits of "accepted, given that those before were", float32 [B, G], and what
    those are divided by and what is added then, of at least G positions, float32."""

    confidence_BG: torch.Tensor
    scales_2G: torch.Tensor


@triton.jit
def _granted(keys_BW, k_W, budget, G: tl.constexpr):
    """How many of each row's places are among the `budget` highest keys."""
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
    return taken_B


@triton.jit(do_not_specialize=["rows"])
def _spend_kernel(
    survival_ptr, confidence_ptr, scales_ptr, shifts_ptr, window_ptr, least_ptr, budget_ptr, out_ptr, rows,
    G: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, CALIBRATE: tl.constexpr, SPEND: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    b_B = tl.arange(0, ROWS)
    inside_B = b_B < rows
    window_B = tl.load(window_ptr + b_B, mask=inside_B, other=0)
    least_B = tl.minimum(tl.load(least_ptr + b_B, mask=inside_B, other=0), window_B)
    # A row's survivals never grow; what does not count as a number is none.
    lowest_B, product_B = tl.full((ROWS,), 1.0, tl.float32), tl.full((ROWS,), 1.0, tl.float32)
    k_W = tl.arange(0, WIDE)
    keys_BW = tl.full((ROWS, WIDE), -1, tl.int32)
    for k in tl.static_range(G):
        if CALIBRATE:
            logit_B = tl.load(confidence_ptr + b_B * G + k, mask=inside_B, other=0.0)
            logit_B = logit_B / tl.load(scales_ptr + k) + tl.load(shifts_ptr + k)
            product_B *= 1.0 / (1.0 + tl.exp(-logit_B))
            tl.store(survival_ptr + b_B * G + k, product_B, mask=inside_B)
            value_B = tl.where(k < window_B, product_B, 0.0)
        else:
            value_B = tl.load(survival_ptr + b_B * G + k, mask=inside_B & (k < window_B), other=0.0)
        value_B = tl.where(value_B == value_B, tl.minimum(tl.maximum(value_B, 0.0), 1.0), 0.0)
        lowest_B = tl.minimum(lowest_B, value_B)
        key_B = tl.where(k < least_B, FORCED, lowest_B.to(tl.int32, bitcast=True))
        key_B = tl.where(inside_B & (k < window_B), key_B, BARRED)
        keys_BW = tl.where(k_W[None, :] == k, key_B[:, None], keys_BW)
    if SPEND:
        tl.store(out_ptr + b_B, _granted(keys_BW, k_W, tl.load(budget_ptr), G), mask=inside_B)


def spend_rows(
    survival_BG: torch.Tensor,
    window_B: torch.Tensor,
    least_B: torch.Tensor,
    budget_1: torch.Tensor,
    out_B: torch.Tensor | None,
    calibration: Calibration | None = None,
) -> None:
    """Drafts to verify by row, int32 [B], at most `budget_1` in all and `window_B` each (negative: none). All
    int32 but the float32 survivals, which are contiguous, and computed first where `calibration` is given.
    Without `out_B` nothing is spent."""
    rows, drafts = survival_BG.shape
    assert survival_BG.is_contiguous() and survival_BG.dtype == torch.float32, "survivals are contiguous float32"
    confidence_BG = survival_BG if calibration is None else calibration.confidence_BG
    assert confidence_BG.is_contiguous() and confidence_BG.dtype == torch.float32, "logits are contiguous float32"
    assert confidence_BG.shape == survival_BG.shape, "a survival a logit"
    scales_2G = survival_BG if calibration is None else calibration.scales_2G
    early = is_early(survival_BG)
    cells = power_of_two(rows) * power_of_two(drafts)
    _spend_kernel[(1,)](
        survival_BG, confidence_BG, scales_2G[0], scales_2G[-1], window_B, least_B,
        budget_1, window_B if out_B is None else out_B, rows,
        G=drafts, WIDE=power_of_two(drafts), ROWS=power_of_two(rows), CALIBRATE=calibration is not None,
        SPEND=out_B is not None, EARLY=early, num_warps=max(1, min(8, cells // 256)), **options(early),
    )  # fmt: skip
