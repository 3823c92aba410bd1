"""Rows of the embedding by token id, and normed for the first layer, in one launch.

Owns both together; each is as in `engine.kernels.embedding_gather` and `engine.kernels.rms_norm`.

Shapes: T tokens, V vocabulary, D width.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.embedding_gather import embedding_gather_reference
from engine.kernels.rms_norm import rms_norm_reference, warps_for


def embedding_norm_reference(
    ids_T: torch.Tensor, weight_VD: torch.Tensor, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_TD = embedding_gather_reference(ids_T, weight_VD)
    return rows_TD, rms_norm_reference(rows_TD, norm_D, eps)


@triton.jit
def embedding_norm_kernel(
    ids_ptr, weight_ptr, norm_ptr, rows_ptr, normed_ptr, eps, D: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    norm = tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(weight_ptr + row * D + at, mask=inside & (row >= 0), other=0.0)
    tl.store(rows_ptr + token * D + at, values, mask=inside)
    x = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) * (1.0 / D) + eps)
    dtype: tl.constexpr = normed_ptr.dtype.element_ty
    normed = (x * scale).to(dtype).to(tl.float32) * norm
    tl.store(normed_ptr + token * D + at, normed.to(dtype), mask=inside)


def embedding_norm(
    ids_T: torch.Tensor, weight_VD: torch.Tensor, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, normed rows), both [T, D]; ids of -1 give zeros."""
    tokens, width = ids_T.shape[0], weight_VD.shape[1]
    rows_TD = weight_VD.new_empty(tokens, width)
    normed_TD, early = torch.empty_like(rows_TD), is_early(rows_TD)
    if tokens:
        embedding_norm_kernel[(tokens,)](
            ids_T,
            weight_VD,
            norm_D,
            rows_TD,
            normed_TD,
            eps,
            D=width,
            BLOCK=triton.next_power_of_2(width),
            EARLY=early,
            num_warps=warps_for(width),
            **options(early),
        )
    return rows_TD, normed_TD
