"""Segments and tiles of products whose rows keep their bits.

Owns the cut of a weight's inputs into segments, which decides the order of sums and so may follow from
the weight's shape only, and the choice of tiles, which may follow from anything. Ignores how they are
computed (`invariant_matmul`).
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SEGMENTS = 4
MIN_SEGMENT = 512
SEGMENT_MULTIPLE = 128
WANTED = 128
"""Programs of 128 outputs and one segment that a weight should have, for the rows of one tile."""

FEW_ROWS = 64
"""Rows up to which outputs are the rows of the instruction."""

LONG = 8192
"""Inputs from which on a few tiles are cut."""

SPLIT_ELEMENTS = 384 * 128 * 128
"""Sums that segments of a split product may leave in memory: three programs for each of 128 processors."""


@dataclass(slots=True, frozen=True)
class InvariantTile:
    """Rows, outputs and inputs of a tile, warps, loads in flight. `swapped` makes outputs the rows of the
    instruction, `split` gives each segment a program, `boxed` loads by tensor maps, and `stream` has a
    program compute tiles one after the other."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    swapped: bool = False
    split: bool = False
    boxed: bool = False
    stream: bool = False


def segments_of(outputs: int, inputs: int) -> int:
    """Narrow weights have too few outputs to occupy a GPU, so their inputs are cut."""
    wanted = -(-WANTED // -(-outputs // 128))
    segments = 1
    while segments < min(wanted, MAX_SEGMENTS):
        longer = 2 * segments
        if inputs % (longer * SEGMENT_MULTIPLE) or inputs // longer < MIN_SEGMENT:
            break
        segments = longer
    return segments


def tile_for(
    rows: int, outputs: int, inputs: int, segments: int, itemsize: int, boxed: bool, processors: int
) -> InvariantTile:
    """`boxed` says whether tensor maps may be used. Which tiles serve was measured on an H200, with the
    products of an 8B model."""
    if itemsize > 2:
        # Without tensor cores operands live in registers, and there is one order of sums anyway.
        return InvariantTile(16, 32, 16, 4, 2)
    if rows <= FEW_ROWS:
        # Two programs fit a multiprocessor: one waits for its inputs while the other ends.
        width = max(16, 1 << (rows - 1).bit_length())
        return InvariantTile(width, 64, 128, 4, {16: 5, 32: 4, 64: 3}[width], swapped=True, split=True, boxed=boxed)
    bands = -(-rows // 128)
    tiles = bands * -(-outputs // 128)
    if boxed and bands <= 2 and tiles < processors:
        # Narrow tiles and deep pipelines; only long inputs over few tiles pay for the sum of their segments.
        narrow = bands * -(-outputs // 64)
        if 2 * narrow <= processors and inputs > LONG:
            return InvariantTile(128, 64, 64, 4, 4, split=True, boxed=True)
        return InvariantTile(128, 64, 64, 4, 6 if narrow <= processors else 4, boxed=True)
    if boxed and bands == 1:
        return InvariantTile(128, 128, 64, 8, 3, boxed=True)
    if tiles < processors or not boxed:
        small = tiles * segments < processors
        return InvariantTile(128, 64 if small else 128, 64, 4 if small else 8, 4, split=tiles < processors, boxed=boxed)
    # Wide tiles load less for each product, unless they leave more processors idle at the end. The sums of
    # two segments at once fit their registers just so: a few addresses are spilled, no sums in the loop.
    narrow_rounds, wide_rounds = (-(-bands * -(-outputs // width) // processors) for width in (128, 256))
    return InvariantTile(128, 256 if 2 * wide_rounds <= narrow_rounds else 128, 64, 8, 4, boxed=True, stream=True)


def gated_tile(rows: int, itemsize: int, boxed: bool) -> InvariantTile:
    """For at most FEW_ROWS rows, and as many gates as ups."""
    if itemsize > 2:
        return InvariantTile(16, 32, 16, 4, 2)
    width = max(16, 1 << (rows - 1).bit_length())
    return InvariantTile(width, 64, 64, 4, {16: 5, 32: 4, 64: 4}[width], swapped=True, boxed=boxed)
