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


def decode_config(block_d: int, itemsize: int, shared: bool = False) -> TileConfig:
    """Five stages: page ids, keys and values that depend on them and are loaded two tiles ahead.
    Two warps leave room for more programs and read 3 to 10 % faster than four on an H200."""
    if itemsize > 2:
        return TileConfig(block_n=_tokens(block_d, itemsize), num_warps=4, num_stages=5)
    if shared:
        # What is left beside a shared prefix is short: a deep pipeline would not fill.
        return TileConfig(block_n=min(64, _tokens(block_d, itemsize)), num_warps=4, num_stages=3)
    return TileConfig(block_n=min(64, _tokens(block_d, itemsize)), num_warps=2, num_stages=5)


def prefix_config(block_d: int, itemsize: int, group: int) -> TileConfig:
    if itemsize > 2:
        return TileConfig(16, 4, 2, block_m=max(16, power_of_two(group)))
    return TileConfig(_tokens(block_d, itemsize), 4, 3, block_m=max(64, power_of_two(group)))


def prefill_config(block_d: int, itemsize: int, group: int, longest: int) -> TileConfig:
    """`longest` is the largest number of queries of a row."""
    least = max(16, power_of_two(group))
    rows = power_of_two(longest * group)
    if itemsize > 2:
        # Without tensor cores operands live in registers: larger tiles spill.
        return TileConfig(16, 4, 2, block_m=least)
    return TileConfig(_tokens(block_d, itemsize), 4, 3, block_m=max(least, min(rows, 64)))
