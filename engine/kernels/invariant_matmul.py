"""Products whose rows keep their bits whatever stands beside them.

Owns x @ w.T for any number of rows, alone or with the gate of a gated block, as the deterministic
engine needs it: a library picks another algorithm for another number of rows, and with it another
order of sums. Here the inputs are cut into segments that follow from the weight's shape alone. A
segment is summed in order, in steps of one tensor-core instruction, with fp32 in between; an output is
0 + segment 0 + segment 1 and so on. Tiles, and who computes which segment, differ by the number of
rows, the order never does. Ignores which tiles are fast (`invariant_tiles`).

Up to 64 rows are the columns of the product, more are its rows: Hopper's instruction takes at least
64 rows and sums either way in the same order (a test holds it to that).

Shapes: M rows, K input features, N output features.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.early import await_inputs, is_early, options, prefetch, release_next
from engine.kernels.invariant_tiles import FEW_ROWS, SPLIT_ELEMENTS, InvariantTile, gated_tile, segments_of, tile_for
from engine.kernels.swiglu import silu, silu_and_mul
from engine.layers.matmul import linear

invariant_matmul_reference = linear

PREFETCHED = 1024
"""Bytes of each weight row of a program that are asked for before its inputs are there."""


@dataclass(slots=True)
class Partials:
    """Room for the segments of a split product, and zeros that are zeros again afterwards. Products
    that may overlap must not share it; launches in order may."""

    sums: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def empty(cls, device: torch.device | str) -> Partials:
        sums = torch.empty(SPLIT_ELEMENTS, dtype=torch.float32, device=device)
        return cls(sums, torch.zeros(SPLIT_ELEMENTS // 256, dtype=torch.int32, device=device))


@triton.jit
def _origin(tile, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr):
    """First row and output of a tile. Tiles that are computed together share a band of rows, and so
    the weights they read."""
    BAND: tl.constexpr = 8
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tile - band * BAND * tiles_n
    return (band * BAND + within % height) * BM, within // height * BN


@triton.jit
def _store(out_ptr, bias_ptr, y_MN, first_m, first_n, rows, N: tl.constexpr, BIAS: tl.constexpr):
    m = first_m + tl.arange(0, y_MN.shape[0])
    n = first_n + tl.arange(0, y_MN.shape[1])
    if BIAS:
        y_MN += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at_MN = m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptr + at_MN, y_MN.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < N)[None, :])


@triton.jit
def invariant_tile_kernel(
    x_ptr, weight_ptr, x_box, weight_box, bias_ptr, out_ptr, parts_ptr, arrived_ptr, rows, x_stride,
    N: tl.constexpr, K: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, SWAPPED: tl.constexpr, SPLIT: tl.constexpr, BOXED: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile a program, or with SPLIT one segment of it, the last of which to arrive adds them up."""
    WIDTH: tl.constexpr = N // 2 if GATED else N
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(WIDTH, BN)
    SPAN: tl.constexpr = K // SEGMENTS if SPLIT else K
    tile, start = program, 0
    if SPLIT:
        tile, start = program // SEGMENTS, program % SEGMENTS * SPAN
    first_m, first_n = _origin(tile, tiles_m, tiles_n, BM, BN)
    n = first_n + tl.arange(0, BN)
    k = start + tl.arange(0, BK)
    if PREFETCH > 0:
        for row in range(first_n, tl.minimum(first_n + BN, WIDTH)):
            prefetch(weight_ptr + row.to(tl.int64) * K + start, PREFETCH, EARLY)
            if GATED:
                prefetch(weight_ptr + (WIDTH + row).to(tl.int64) * K + start, PREFETCH, EARLY)
    await_inputs(EARLY)
    release_next(EARLY)
    if not BOXED:
        # Places past the end read the last row again: what they give is not stored.
        m = tl.minimum(first_m + tl.arange(0, BM), rows - 1)
        x_ptr += m.to(tl.int64)[:, None] * x_stride + k[None, :]
        weight_ptr += tl.minimum(n, WIDTH - 1).to(tl.int64)[:, None] * K + k[None, :]
    # Sums of the segments before, and of the one at hand.
    total = tl.zeros((BN, BM) if SWAPPED else (BM, BN), tl.float32)
    sums = tl.zeros((BN, BM) if SWAPPED else (BM, BN), tl.float32)
    ups = tl.zeros((BN, BM) if SWAPPED else (BM, BN), tl.float32)
    for at in tl.range(0, SPAN, BK, num_stages=STAGES):
        if BOXED:
            x_MK = x_box.load([first_m, start + at])
            weight_NK = weight_box.load([first_n, start + at])
        elif K % BK == 0:
            x_MK = tl.load(x_ptr + at)
            weight_NK = tl.load(weight_ptr + at)
        else:
            x_MK = tl.load(x_ptr + at, mask=(at + k < K)[None, :], other=0.0)
            weight_NK = tl.load(weight_ptr + at, mask=(at + k < K)[None, :], other=0.0)
        if SWAPPED:
            sums = tl.dot(weight_NK, tl.trans(x_MK), sums, input_precision="ieee")
        else:
            sums = tl.dot(x_MK, tl.trans(weight_NK), sums, input_precision="ieee")
        if GATED:
            if BOXED:
                up_NK = weight_box.load([WIDTH + first_n, start + at])
            elif K % BK == 0:
                up_NK = tl.load(weight_ptr + WIDTH * K + at)
            else:
                up_NK = tl.load(weight_ptr + WIDTH * K + at, mask=(at + k < K)[None, :], other=0.0)
            if SWAPPED:
                ups = tl.dot(up_NK, tl.trans(x_MK), ups, input_precision="ieee")
            else:
                ups = tl.dot(x_MK, tl.trans(up_NK), ups, input_precision="ieee")
        if SEGMENTS > 1 and not SPLIT:  # noqa: SIM102 (known when compiled; the next is not)
            if (at + BK) % (K // SEGMENTS) == 0:
                total += sums
                sums = tl.zeros_like(sums)
    if SPLIT:
        SIZE: tl.constexpr = BM * BN
        inside = tl.arange(0, sums.shape[0])[:, None] * sums.shape[1] + tl.arange(0, sums.shape[1])[None, :]
        tl.store(parts_ptr + program * SIZE + inside, sums)
        tl.debug_barrier()  # every thread's sums are stored before the program counts as arrived
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") != SEGMENTS - 1:
            return
        tl.debug_barrier()
        tl.store(arrived_ptr + tile, 0)
        for segment in range(SEGMENTS):
            total += tl.load(parts_ptr + (tile * SEGMENTS + segment) * SIZE + inside, cache_modifier=".cg")
    elif SEGMENTS == 1:
        total += sums
    if GATED:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        up = (0.0 + ups).to(dtype).to(tl.float32)
        total = silu(total.to(dtype).to(tl.float32), dtype) * up
    y_MN = tl.trans(total) if SWAPPED else total
    _store(out_ptr, bias_ptr, y_MN, first_m, first_n, rows, WIDTH, BIAS)


@triton.jit
def invariant_stream_kernel(
    x_box, weight_box, bias_ptr, out_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Tiles one after the other in a program for each multiprocessor: one loop over all their inputs,
    so that loads for a tile begin while the one before is finished."""
    await_inputs(EARLY)
    release_next(EARLY)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    tiles_m, tiles_n = tl.cdiv(rows, BM), tl.cdiv(N, BN)
    programs = tl.num_programs(0)
    tile = tl.program_id(0) - programs
    count = tl.cdiv(tiles_m * tiles_n - tl.program_id(0), programs)
    first_m, first_n, step = 0, 0, STEPS - 1
    total = tl.zeros((BM, BN), tl.float32)
    sums = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, count * STEPS, num_stages=STAGES):
        step = tl.where(step == STEPS - 1, 0, step + 1)
        if step == 0:
            tile += programs
            first_m, first_n = _origin(tile, tiles_m, tiles_n, BM, BN)
        x_MK = x_box.load([first_m, step * BK])
        weight_NK = weight_box.load([first_n, step * BK])
        sums = tl.dot(x_MK, tl.trans(weight_NK), sums, input_precision="ieee")
        if SEGMENTS > 1:
            if (step + 1) % (STEPS // SEGMENTS) == 0:
                total += sums
                sums = tl.zeros((BM, BN), tl.float32)
                if step == STEPS - 1:
                    _store(out_ptr, bias_ptr, total, first_m, first_n, rows, N, BIAS)
                    total = tl.zeros((BM, BN), tl.float32)
        elif step == STEPS - 1:
            _store(out_ptr, bias_ptr, 0.0 + sums, first_m, first_n, rows, N, BIAS)
            sums = tl.zeros((BM, BN), tl.float32)


def invariant_gated_matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    partials: Partials | None = None,
    tile: InvariantTile | None = None,
) -> torch.Tensor:
    """silu(gates) * ups, [M, N / 2], of a weight with all gates before all ups. Few rows take one launch."""
    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    apart = rows > FEW_ROWS or bias_N is not None or segments_of(outputs, inputs) > 1
    if not rows or (apart and tile is None):
        return silu_and_mul(invariant_matmul(x_MK, weight_NK, bias_N, partials=partials))
    tile = tile or gated_tile(rows, x_MK.element_size(), _boxable(x_MK) and _boxable(weight_NK))
    out = x_MK.new_empty(rows, outputs // 2)
    _launch_tiles(x_MK, weight_NK, None, out, None, 1, tile, gated=True)
    return out


def invariant_matmul(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    partials: Partials | None = None,
    segments: int | None = None,
    tile: InvariantTile | None = None,
) -> torch.Tensor:
    """[M, N] in the dtype of `x_MK`. Without `partials` no tile is split, which is slower for few rows.

    `segments` are those of the whole weight where `weight_NK` is a part of it.
    """
    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    assert weight_NK.is_contiguous() and x_MK.stride(1) == 1, "rows must be contiguous"
    out = x_MK.new_empty(rows, outputs) if out is None else out
    if not rows:
        return out
    boxed = _boxable(x_MK) and _boxable(weight_NK)
    segments = segments or segments_of(outputs, inputs)
    tile = tile or tile_for(rows, outputs, inputs, segments, x_MK.element_size(), boxed, _processors(x_MK))
    assert not tile.boxed or boxed, "tensor maps need aligned rows on a device that has them"
    assert inputs % segments == 0 and (segments == 1 or inputs // segments % tile.inputs == 0), f"{segments} segments"
    if not tile.stream:
        _launch_tiles(x_MK, weight_NK, bias_N, out, partials, segments, tile)
        return out
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs)
    # Tiles of few warps are small enough for two programs on a multiprocessor.
    programs = _processors(x_MK) * max(1, 8 // tile.warps)
    invariant_stream_kernel[(min(tiles, programs),)](
        *_boxes(x_MK, weight_NK, tile),
        x_MK if bias_N is None else bias_N,
        out,
        rows,
        **_constants(x_MK, weight_NK, bias_N, segments, tile),
    )
    return out


def _launch_tiles(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    out: torch.Tensor,
    partials: Partials | None,
    segments: int,
    tile: InvariantTile,
    gated: bool = False,
) -> None:
    rows, inputs = x_MK.shape
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(out.shape[1], tile.outputs)
    split = None
    if tile.split and segments > 1 and partials is not None:
        fits = tiles * segments * tile.rows * tile.outputs <= partials.sums.shape[0]
        split = partials if fits and tiles <= partials.arrived.shape[0] else None
    early = is_early(x_MK)
    invariant_tile_kernel[(tiles * (1 if split is None else segments),)](
        x_MK,
        weight_NK,
        *(_boxes(x_MK, weight_NK, tile) if tile.boxed else (x_MK, weight_NK)),
        x_MK if bias_N is None else bias_N,
        out,
        out if split is None else split.sums,
        out if split is None else split.arrived,
        rows,
        x_MK.stride(0),
        SWAPPED=tile.swapped,
        SPLIT=split is not None,
        BOXED=tile.boxed,
        GATED=gated,
        # Rows that tensor maps can describe are aligned as a prefetch must be, too.
        PREFETCH=min(PREFETCHED, inputs * x_MK.element_size()) if early and tile.boxed and tile.swapped else 0,
        **_constants(x_MK, weight_NK, bias_N, segments, tile),
    )


def _boxes(x_MK: torch.Tensor, weight_NK: torch.Tensor, tile: InvariantTile) -> tuple[TensorDescriptor, ...]:
    return (
        TensorDescriptor(x_MK, list(x_MK.shape), [x_MK.stride(0), 1], [tile.rows, tile.inputs]),
        TensorDescriptor(weight_NK, list(weight_NK.shape), [x_MK.shape[1], 1], [tile.outputs, tile.inputs]),
    )


def _constants(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, segments: int, tile: InvariantTile
) -> dict:
    early = is_early(x_MK)
    return dict(
        N=weight_NK.shape[0], K=weight_NK.shape[1], SEGMENTS=segments, BM=tile.rows, BN=tile.outputs, BK=tile.inputs,
        STAGES=tile.stages, BIAS=bias_N is not None, EARLY=early, num_warps=tile.warps, **options(early),
    )  # fmt: skip


def _boxable(x_MK: torch.Tensor) -> bool:
    """Whether tensor maps can describe it. The interpreter has them on the CPU."""
    aligned = x_MK.stride(0) * x_MK.element_size() % 16 == 0 and x_MK.data_ptr() % 16 == 0
    return aligned and (is_early(x_MK) or not x_MK.is_cuda)


def _processors(x_MK: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(x_MK.device).multi_processor_count if x_MK.is_cuda else 2
