"""Rows of the embedding by token id.

Owns the gather. An id of -1 (a padded row) gives zeros; ids are otherwise trusted.

Shapes: T tokens, V vocabulary, D width.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next

MAX_BLOCK = 1024


def embedding_gather_reference(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    rows_TD = weight_VD.index_select(0, ids_T.clamp(min=0).long())
    return rows_TD.masked_fill_((ids_T < 0)[:, None], 0.0)


@triton.jit
def embedding_gather_kernel(ids_ptr, weight_ptr, out_ptr, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    release_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token).to(tl.int64)
    inside = at < D
    values = tl.load(weight_ptr + row * D + at, mask=inside & (row >= 0), other=0.0)
    tl.store(out_ptr + token * D + at, values, mask=inside)


def embedding_gather(
    ids_T: torch.Tensor, weight_VD: torch.Tensor, out: torch.Tensor | None = None, max_block: int = MAX_BLOCK
) -> torch.Tensor:
    """[T, D] of the ids (any integer dtype)."""
    tokens, width = ids_T.shape[0], weight_VD.shape[1]
    out = weight_VD.new_empty(tokens, width) if out is None else out
    block = min(max_block, triton.next_power_of_2(width))
    early = is_early(out)
    if tokens:
        embedding_gather_kernel[(tokens, triton.cdiv(width, block))](
            ids_T,
            weight_VD,
            out,
            D=width,
            BLOCK=block,
            EARLY=early,
            num_warps=max(1, min(4, block // 256)),
            **options(early),
        )
    return out
