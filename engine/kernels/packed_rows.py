"""Rows of several tokens, back to back among those of a tier.

Owns where a row stands once each row's number of tokens is known, and how its tokens are laid out and what is left
over is padded. Ignores which tokens these are (`round_rows`, `block_rows`).

Shapes: B rows, W places of a row at most, P places padded at once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_of(counts_B, b_B, row):
    """Where a row begins that stands back to back with others, and how many places it has."""
    return tl.sum(tl.where(b_B < row, counts_B, 0), 0), tl.sum(tl.where(b_B == row, counts_B, 0), 0)


@triton.jit
def pad_tokens(ids_ptr, positions_ptr, writes_ptr, at_P, mask_P):
    """Tokens that are nobody's."""
    nothing_P = at_P.to(tl.int64) * 0
    tl.store(ids_ptr + at_P, nothing_P - 1, mask=mask_P)
    tl.store(positions_ptr + at_P, nothing_P, mask=mask_P)
    tl.store(writes_ptr + at_P, nothing_P - 1, mask=mask_P)


@triton.jit
def lay_tokens(
    ids_ptr, positions_ptr, writes_ptr, tables_ptr, table_stride, row, at_W, ids_W, positions_W, inside_W,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Tokens of a row at their places, with where its pages take them."""
    page_W = tl.load(tables_ptr + row.to(tl.int64) * table_stride + positions_W // PAGE, mask=inside_W, other=0)
    tl.store(ids_ptr + at_W, ids_W, mask=inside_W)
    tl.store(positions_ptr + at_W, positions_W, mask=inside_W)
    tl.store(writes_ptr + at_W, page_W.to(tl.int64) * PAGE + positions_W % PAGE, mask=inside_W)
