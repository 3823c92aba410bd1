"""Products whose rows keep their bits whatever stands beside them.

Owns x @ w.T for any number of rows, as the deterministic engine needs it: a library picks another
algorithm for another number of rows, and with it another order of sums. Here an output is one sum
over the inputs in order, in steps of one tensor-core instruction, with fp32 in between; tiles
differ by the number of rows, the order never does. Ignores speed beyond that.

Up to 64 rows are the columns of the product, more are its rows: Hopper's instruction takes at least
64 rows and sums either way in the same order (a test holds it to that).

Shapes: M rows, K input features, N output features.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.layers.matmul import linear

invariant_matmul_reference = linear


@dataclass(slots=True, frozen=True)
class InvariantTile:
    """Rows, outputs and inputs of a tile, warps, loads in flight, and whether outputs are its rows."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    swapped: bool


@triton.jit
def invariant_matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    SWAPPED: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    # Programs that run together share a band of rows, and so the weights they read.
    BAND: tl.constexpr = 8
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    band = program // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = program - band * BAND * tiles_n
    first_m = (band * BAND + within % height) * BM
    first_n = within // height * BN
    m = first_m + tl.arange(0, BM)
    n = first_n + tl.arange(0, BN)
    k = tl.arange(0, BK)
    # Places past the end read the last row again: what they give is not stored.
    x_ptr += tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptr += tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    sums = tl.zeros((BN, BM) if SWAPPED else (BM, BN), tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            x_MK = tl.load(x_ptr + at)
            weight_NK = tl.load(weight_ptr + at)
        else:
            x_MK = tl.load(x_ptr + at, mask=(at + k < K)[None, :], other=0.0)
            weight_NK = tl.load(weight_ptr + at, mask=(at + k < K)[None, :], other=0.0)
        if SWAPPED:
            sums = tl.dot(weight_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(weight_NK), sums, input_precision="ieee")
    y_MN = tl.trans(sums) if SWAPPED else sums
    if BIAS:
        y_MN += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at_MN = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at_MN, y_MN.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


def tile_for(rows: int, outputs: int, itemsize: int) -> InvariantTile:
    if itemsize > 2:
        # Without tensor cores operands live in registers, and there is one order of sums anyway.
        return InvariantTile(16, 32, 16, 4, 2, False)
    if rows <= 64:
        return InvariantTile(max(16, triton.next_power_of_2(rows)), 64, 128, 4, 4, True)
    if rows <= 128 or outputs < 8192:
        return InvariantTile(128, 64 if rows <= 512 else 128, 64, 4 if rows <= 512 else 8, 4, False)
    return InvariantTile(128, 128 if rows <= 512 else 256, 64, 8, 4 if rows <= 512 else 3, False)


def invariant_matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: InvariantTile | None = None,
) -> torch.Tensor:
    """[M, N] in the dtype of `x_MK`."""
    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    assert weight_NK.is_contiguous() and x_MK.stride(1) == 1, "rows must be contiguous"
    out = x_MK.new_empty(rows, outputs) if out is None else out
    tile = tile or tile_for(rows, outputs, x_MK.element_size())
    early = is_early(x_MK)
    if rows:
        invariant_matmul_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)](
            x_MK,
            weight_NK,
            x_MK if bias_N is None else bias_N,
            out,
            rows,
            x_MK.stride(0),
            N=outputs,
            K=inputs,
            BM=tile.rows,
            BN=tile.outputs,
            BK=tile.inputs,
            STAGES=tile.stages,
            SWAPPED=tile.swapped,
            BIAS=bias_N is not None,
            EARLY=early,
            num_warps=tile.warps,
            **options(early),
        )
    return out
