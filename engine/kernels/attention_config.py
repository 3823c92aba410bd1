"""Tile sizes of the attention kernels.

Owns the choice from a layer's shape and element size; figures come from `benchmarks.gpu_attention`.
Ignores batches, except that prefill tiles follow the longest row.
"""

from __future__ import annotations

from engine.kernels.attention_tile import power_of_two
from engine.kernels.decode_attention import TileConfig


def _tokens(block_d: int, itemsize: int) -> int:
    """Tokens whose keys take 16 KiB: two stages of keys and values leave room for three programs."""
    return min(128, max(16, 16384 // (block_d * itemsize)))


def decode_config(block_d: int, itemsize: int, shared: bool = False, rows: int = 1 << 20) -> TileConfig:
    """`rows` is how many there are at most. Deep pipelines, since keys and values depend on page ids
    that are loaded ahead of them.

    Measured on an H200, in whole steps: programs of one warp, of which many fit a multiprocessor, read
    32 rows of 128 wide heads faster than two warps do (8B and 0.6B steps 1 and 7 %), but made steps of 128 and
    256 rows 3 to 14 % slower. A few rows are bound by the wait for each load, where larger tiles win; so
    are narrow heads, whose tiles are small anyway.
    """
    tokens = _tokens(block_d, itemsize)
    if itemsize > 2:
        return TileConfig(block_n=tokens, num_warps=4, num_stages=5)
    if shared:
        # What is left beside a shared prefix is short: a deep pipeline would not fill.
        return TileConfig(block_n=min(64, tokens), num_warps=4, num_stages=3)
    if block_d < 128 or rows > 64:
        return TileConfig(block_n=min(64, tokens), num_warps=2, num_stages=5)
    if rows < 8:
        return TileConfig(block_n=min(64, tokens), num_warps=2, num_stages=3)
    return TileConfig(block_n=min(32, tokens), num_warps=1, num_stages=7)


def prefix_config(block_d: int, itemsize: int, group: int) -> TileConfig:
    if itemsize > 2:
        return TileConfig(16, 4, 2, block_m=max(16, power_of_two(group)))
    return TileConfig(_tokens(block_d, itemsize), 4, 3, block_m=max(64, power_of_two(group)))


def verify_prefix_config(block_d: int, itemsize: int, group: int) -> TileConfig:
    """For prefixes of rows with several queries each, whose tiles are full: twice the tokens in two stages took 4 to
    12 % less than a decode row's tiles (heads of 8B, 2 to 8 queries, H200)."""
    if itemsize > 2:
        return prefix_config(block_d, itemsize, group)
    return TileConfig(min(128, 2 * _tokens(block_d, itemsize)), 4, 2, block_m=max(64, power_of_two(group)))


def prefill_config(block_d: int, itemsize: int, group: int, longest: int) -> TileConfig:
    """`longest` is the largest number of queries of a row."""
    least = max(16, power_of_two(group))
    rows = power_of_two(longest * group)
    if itemsize > 2:
        # Without tensor cores operands live in registers: larger tiles spill.
        return TileConfig(16, 4, 2, block_m=least)
    return TileConfig(_tokens(block_d, itemsize), 4, 3, block_m=max(least, min(rows, 64)))
