"""The terms of a draft's row and their gradient, each in one launch.

Owns the two kernels, their launchers and what the second needs of the first. The reference, and what the terms
mean, are in `trainer_bridge.drafter.row_terms`. With s = sign(q - p), the gradient by logit v is

    (g_ce (q_v - [v = label]) + g_distance q_v (s_v - sum_u s_u q_u)) / temperature

where the first part is missing for a label whose logit is -inf. Neither q nor p is ever stored: a row is read
once for its sums and, from the cache, once more for the distance; the backward pass reads it a third time and
writes the gradient over it. A program owns a row, so that every sum has one order.

Shapes: R rows, V vocabulary.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer_bridge.drafter.row_terms import RowTerms

BLOCK = 2048
NOTES = 4
"""Values a row's backward pass needs: both log-sum-exps, sum_u s_u q_u, and 1 where the label has a chance."""


@triton.jit
def take_in(x, top, total):
    """The highest value and the sum of exp(value - highest) after some more values; -inf adds nothing."""
    new = tl.maximum(top, tl.max(x, 0))
    shift = tl.where(new == float("-inf"), 0.0, new)
    return new, total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)


@triton.jit
def fused_terms_kernel(
    q_ptr, p_ptr, labels_ptr, ce_ptr, distance_ptr, agreed_ptr, notes_ptr, V, q_stride, p_stride, scale,
    COMPARES: tl.constexpr, BLOCK: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    q_row, p_row = q_ptr + row * q_stride, p_ptr + row * p_stride
    q_top, q_total = float("-inf"), 0.0
    p_top, p_total = float("-inf"), 0.0
    for first in range(0, V, BLOCK):
        at = first + lanes
        x = tl.load(q_row + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
        q_top, q_total = take_in(x, q_top, q_total)
        if COMPARES:
            y = tl.load(p_row + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
            p_top, p_total = take_in(y, p_top, p_total)
    q_lse, p_lse = q_top + tl.log(q_total), 0.0
    signed = 0.0
    if COMPARES:
        p_lse = p_top + tl.log(p_total)
        apart_V, signed_V = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        q_first_V, p_first_V = tl.full((BLOCK,), V, tl.int32), tl.full((BLOCK,), V, tl.int32)
        for first in range(0, V, BLOCK):
            at = first + lanes
            x = tl.load(q_row + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
            y = tl.load(p_row + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
            q = tl.exp(x - q_lse)
            gap = q - tl.exp(y - p_lse)
            apart_V += tl.abs(gap)
            signed_V += tl.where(gap > 0, q, tl.where(gap < 0, -q, 0.0))
            q_first_V = tl.minimum(q_first_V, tl.where(x == q_top, at, V))
            p_first_V = tl.minimum(p_first_V, tl.where(y == p_top, at, V))
        signed = tl.sum(signed_V, 0)
        tl.store(distance_ptr + row, tl.sum(apart_V, 0))
        tl.store(agreed_ptr + row, (tl.min(q_first_V, 0) == tl.min(p_first_V, 0)).to(tl.uint8))
    own = tl.load(q_row + tl.load(labels_ptr + row)).to(tl.float32) * scale
    known = own != float("-inf")
    tl.store(ce_ptr + row, tl.where(known, q_lse - own, 0.0))
    tl.store(notes_ptr + row * NOTES, q_lse)
    tl.store(notes_ptr + row * NOTES + 1, p_lse)
    tl.store(notes_ptr + row * NOTES + 2, signed)
    tl.store(notes_ptr + row * NOTES + 3, known.to(tl.float32))


@triton.jit
def fused_gradient_kernel(
    q_ptr, p_ptr, labels_ptr, notes_ptr, ce_ptr, distance_ptr, out_ptr, V, q_stride, p_stride, out_stride, scale,
    COMPARES: tl.constexpr, BLOCK: tl.constexpr, NOTES: tl.constexpr,
):  # fmt: skip
    """`ce_ptr` and `distance_ptr` hold the gradients of those."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    note_ptr = notes_ptr + row * NOTES
    x = tl.load(q_ptr + row * q_stride + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
    q = tl.exp(x - tl.load(note_ptr))
    ce = tl.load(ce_ptr + row) * tl.load(note_ptr + 3)
    gradient = ce * (q - (at == tl.load(labels_ptr + row)).to(tl.float32))
    if COMPARES:
        y = tl.load(p_ptr + row * p_stride + at, mask=at < V, other=float("-inf")).to(tl.float32) * scale
        gap = q - tl.exp(y - tl.load(note_ptr + 1))
        sign = tl.where(gap > 0, 1.0, tl.where(gap < 0, -1.0, 0.0))
        gradient += tl.load(distance_ptr + row) * q * (sign - tl.load(note_ptr + 2))
    gradient = gradient * scale
    tl.store(out_ptr + row * out_stride + at, gradient.to(out_ptr.dtype.element_ty), mask=at < V)


def launch_terms(
    logits_RV: Tensor, target_RV: Tensor | None, labels_R: Tensor, temperature: float, block: int = BLOCK
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(ce, distance, agreed, notes [R, 4]); distance and agreed are zeros without a target."""
    target_RV = _checked(logits_RV, target_RV, labels_R)
    rows, vocab = logits_RV.shape
    compares = target_RV is not logits_RV
    make = torch.empty if compares else torch.zeros
    ce_R, notes_R4 = (torch.empty(rows, *wide, device=logits_RV.device) for wide in ((), (NOTES,)))
    distance_R = make(rows, device=logits_RV.device)
    agreed_R = make(rows, dtype=torch.uint8, device=logits_RV.device)
    if rows:
        fused_terms_kernel[(rows,)](
            logits_RV, target_RV, labels_R, ce_R, distance_R, agreed_R, notes_R4, vocab,
            logits_RV.stride(0), target_RV.stride(0), 1.0 / temperature,
            COMPARES=compares, BLOCK=block, NOTES=NOTES, num_warps=8,
        )  # fmt: skip
    return ce_R, distance_R, agreed_R.view(torch.bool), notes_R4


def launch_gradient(
    logits_RV: Tensor,
    target_RV: Tensor | None,
    labels_R: Tensor,
    temperature: float,
    notes_R4: Tensor,
    ce_R: Tensor,
    distance_R: Tensor,
    out_RV: Tensor,
    block: int = BLOCK,
) -> Tensor:
    """The logits' gradient in `out_RV`, which may be the logits, from the terms' own."""
    target_RV = _checked(logits_RV, target_RV, labels_R)
    rows, vocab = logits_RV.shape
    assert out_RV.stride(1) == 1 and out_RV.shape == logits_RV.shape, "a gradient is like its logits"
    if rows:
        fused_gradient_kernel[(rows, triton.cdiv(vocab, block))](
            logits_RV, target_RV, labels_R, notes_R4, ce_R.contiguous(), distance_R.contiguous(), out_RV, vocab,
            logits_RV.stride(0), target_RV.stride(0), out_RV.stride(0), 1.0 / temperature,
            COMPARES=target_RV is not logits_RV, BLOCK=block, NOTES=NOTES, num_warps=8,
        )  # fmt: skip
    return out_RV


def _checked(logits_RV: Tensor, target_RV: Tensor | None, labels_R: Tensor) -> Tensor:
    """The target, or in its place the logits, of which the kernels then read nothing twice."""
    target_RV = logits_RV if target_RV is None else target_RV
    assert logits_RV.stride(1) == 1 and target_RV.stride(1) == 1, "rows must be contiguous"
    assert target_RV.shape == logits_RV.shape, "target and drafter share a vocabulary"
    assert labels_R.dtype == torch.int64 and labels_R.is_contiguous(), "labels are contiguous int64"
    return target_RV


class _FusedTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, target_RV: Tensor | None, labels_R: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ce_R, distance_R, agreed_R, notes_R4 = launch_terms(logits_RV, target_RV, labels_R, temperature)
        ctx.save_for_backward(logits_RV, target_RV, labels_R, notes_R4)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(agreed_R)
        return ce_R, distance_R, agreed_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_RV, target_RV, labels_R, notes_R4 = ctx.saved_tensors
        ce_R, distance_R = gradients[:2]
        launch_gradient(logits_RV, target_RV, labels_R, ctx.temperature, notes_R4, ce_R, distance_R, logits_RV)
        return logits_RV.detach(), None, None, None


def fused_terms(logits_RV: Tensor, target_RV: Tensor | None, labels_R: Tensor, temperature: float) -> RowTerms:
    """As `trainer_bridge.drafter.row_terms.row_terms` says."""
    given = None if target_RV is None else target_RV.detach()
    ce_R, distance_R, agreed_R = _FusedTerms.apply(logits_RV, given, labels_R, temperature)
    return RowTerms(ce_R, None, None) if target_RV is None else RowTerms(ce_R, distance_R, agreed_R)
