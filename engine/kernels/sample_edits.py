"""Edits of logits inside the sampling kernels.

Owns bias, penalties and the mask of stop ids, in the order of `engine.sampling.params`, and the reading
of edited logits. They are computed anew wherever they are read: the same operations, unfused, give the
same bits, and no copy of the logits is kept.

`edits` is a tuple of what a row's edits need: whether there are any, three row numbers or -1, three
penalties, the two buffers over the vocabulary, and the tokens ahead of the row that are not in its counts.
"""

# pyright: reportGeneralTypeIssues=false
# Conditions known when compiling stay apart from those that are not.
# ruff: noqa: SIM102
from __future__ import annotations

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))


@triton.jit
def edits_of(
    slot, position, V, repetition_ptr, frequency_ptr, presence_ptr, count_row_ptr, counts_ptr, bias_row_ptr,
    mask_row_ptr, bias_ptr, min_until_ptr, ahead_ptr, ahead_width, EDITS: tl.constexpr,
):  # fmt: skip
    """The slot's `edits` at this position, and the offset of its counts, -1 without any."""
    if EDITS:
        counts = tl.load(count_row_ptr + slot).to(tl.int64)
        bias = tl.load(bias_row_ptr + slot).to(tl.int64)
        mask = tl.load(mask_row_ptr + slot).to(tl.int64)
        mask = tl.where(position < tl.load(min_until_ptr + slot), mask, -1)
        repetition = tl.load(repetition_ptr + slot)
        frequency = tl.load(frequency_ptr + slot)
        presence = tl.load(presence_ptr + slot)
        edited = (counts >= 0) | (bias >= 0) | (mask >= 0)
        width = tl.zeros_like(bias) + ahead_width
        return (
            edited, counts * V, bias * V, mask * V, repetition, frequency, presence, counts_ptr, bias_ptr,
            ahead_ptr + slot.to(tl.int64) * width, width,
        )  # fmt: skip
    else:
        none = slot.to(tl.int64) * 0 - 1
        nothing = none.to(tl.float32)
        return (slot < 0, none, none, none, nothing, nothing, nothing, counts_ptr, bias_ptr, ahead_ptr, none)


@triton.jit
def edit(values, ids, inside, edits):
    """fp32 logits after bias, repetition, frequency, presence and the mask of stop ids."""
    _, counts_at, bias_at, mask_at, repetition, frequency, presence, counts_ptr, bias_ptr, ahead_ptr, ahead = edits
    if bias_at >= 0:
        values = values + tl.load(bias_ptr + bias_at + ids, mask=inside, other=0.0)
    if counts_at >= 0:
        counts = tl.load(counts_ptr + counts_at + ids, mask=inside, other=0).to(tl.int32)
        for number in range(ahead):
            counts += 2 * (ids == tl.load(ahead_ptr + number)).to(tl.int32)
        divided = tl.div_rn(values, repetition)
        repeated = tl.where(values > 0, divided, values * repetition)
        values = tl.where(counts > 0, repeated, values)
        produced = (counts >> 1).to(tl.float32)
        values = tl.where(counts > 1, values - frequency * produced, values)
        values = tl.where(counts > 1, values - presence, values)
    if mask_at >= 0:
        values = values + tl.load(bias_ptr + mask_at + ids, mask=inside, other=0.0)
    return values


@triton.jit
def row_values(logits_ptr, at, V, ids, edits, EDITS: tl.constexpr):
    """fp32 logits after edits, of a row that begins at `at`; -inf beyond the vocabulary."""
    inside = ids < V
    values = tl.load(logits_ptr + at + ids, mask=inside, other=-INF).to(tl.float32)
    if EDITS:
        if edits[0]:
            values = edit(values, ids, inside, edits)
    return values
