"""Philox4x64-10 inside Triton kernels.

Owns the words behind plain sampling's noise, equal bit for bit to `engine.sampling.noise`. Ignores
what a word stands for; `engine.sampling.seeds` has the layout of key and counter.

Two counter words and one key word are zero in plain sampling, so most of the first two rounds
depends on the row alone or is a product of small numbers.

Shapes: N blocks of 8 token ids.
"""

# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

from engine.sampling.seeds import KEY_STEPS, MULTIPLIERS, ROUNDS

_M0 = tl.constexpr(MULTIPLIERS[0])
_M1 = tl.constexpr(MULTIPLIERS[1])
_STEP_0 = tl.constexpr(KEY_STEPS[0])
_STEP_1 = tl.constexpr(KEY_STEPS[1])
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def philox_blocks(seed, position, blocks_N):
    """The four uint64 words of each block: `seed` uint64, `position` an integer, `blocks_N` counts from 0."""
    zero = blocks_N.to(tl.uint64) * 0
    return _rounds(seed, blocks_N.to(tl.uint64) + 1, position.to(tl.uint64), zero, zero)


@triton.jit
def round_word(seed, anchor, lanes_N, sample_id):
    """The first uint64 word of a rejection round's streams: `lanes_N` uint64 is slot | use << 32; `seed` and
    `sample_id` are uint64."""
    zero = lanes_N * 0
    return _rounds(seed, zero + 1, anchor.to(tl.uint64), lanes_N, zero + sample_id)[0]


@triton.jit
def _rounds(seed, c0, c1, c2, c3):
    zero = c0 * 0
    k0 = seed
    k1 = seed * 0
    for _ in tl.static_range(_ROUNDS):
        high_0, low_0 = tl.umulhi(c0, zero + _M0), c0 * _M0
        high_1, low_1 = tl.umulhi(c2, zero + _M1), c2 * _M1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = k0 + _STEP_0
        k1 = k1 + _STEP_1
    return c0, c1, c2, c3


@triton.jit
def _columns(a, b, c, d):
    """[N, 2, 2] of four [N], the last index counting fastest."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def noise_words(seed, position, blocks_N, N: tl.constexpr):
    """uint32 [N, 8]: the words of ids 8 * block .. 8 * block + 7."""
    w0, w1, w2, w3 = philox_blocks(seed, position, blocks_N)
    low = _columns(w0.to(tl.uint32), w1.to(tl.uint32), w2.to(tl.uint32), w3.to(tl.uint32))
    high = _columns(
        (w0 >> 32).to(tl.uint32), (w1 >> 32).to(tl.uint32), (w2 >> 32).to(tl.uint32), (w3 >> 32).to(tl.uint32)
    )
    return tl.reshape(tl.join(low, high), (N, 8))


@triton.jit
def noise_words_at(seed, position, ids_N):
    """uint32 [N]: the words of single ids, a block computed for each."""
    w0, w1, w2, w3 = philox_blocks(seed, position, ids_N // 8)
    place = ids_N % 8
    word = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    return tl.where(place % 2 == 0, word, word >> 32).to(tl.uint32)
