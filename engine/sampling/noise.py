"""Exponential noise in bulk, by key and token id.

Owns the words behind a whole row of noise on the host (NumPy's Philox) and on a device (integer
arithmetic in torch), and the mapping from a word to its noise. Ignores seeds' origin
(`engine.sampling.seeds`) and the choice of a token.

A 32-bit word x stands for u = (x + 1/2) / 2^32 and the exponential E = -log(1 - u); the Gumbel
value of its token is g = -log E. Small E decide a draw, and there x gives full relative precision:
E spans [2^-33, 22.9], so even a token of probability 1e-9 is drawn at its rate.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.sampling.seeds import KEY_STEPS, MULTIPLIERS, NOISE_DOMAIN, ROUNDS, WORDS_PER_BLOCK, NoiseKey

WORD_SCALE = 2.0**-32
_IDS_PER_SEEK = 2048
"""Drawing this many consecutive ids takes as long as re-seating the generator once."""


def exponentials(words: np.ndarray) -> np.ndarray:
    """float64 E of uint32 words, same shape."""
    return -np.log1p((words.astype(np.float64) + 0.5) * -WORD_SCALE)


def exponential(word: int) -> float:
    """E of one word."""
    return -math.log1p((word + 0.5) * -WORD_SCALE)


class HostNoise:
    """Words on the host. Not shared between threads: it re-seats one generator per key."""

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._state = self._philox.state
        self._state["buffer_pos"] = 4
        self._key_2 = self._state["state"]["key"]
        self._counter_4 = self._state["state"]["counter"]

    def _draw(self, key: NoiseKey, first_block: int, num_blocks: int) -> np.ndarray:
        self._key_2[:] = (key.seed, NOISE_DOMAIN)
        self._counter_4[:] = key.counter(first_block)
        self._counter_4[0] -= 1
        self._philox.state = self._state
        return self._philox.random_raw(num_blocks * 4).astype("<u8", copy=False).view("<u4")

    def words(self, key: NoiseKey, num_tokens: int) -> np.ndarray:
        """uint32 [num_tokens], the words of ids 0 .. num_tokens - 1."""
        return self._draw(key, 0, -(-num_tokens // WORDS_PER_BLOCK))[:num_tokens]

    def words_at(self, key: NoiseKey, ids: np.ndarray) -> np.ndarray:
        """uint32 words of the given ids, the same ones that `words` would hold there."""
        highest = int(ids.max())
        if len(ids) * _IDS_PER_SEEK >= highest:
            return self.words(key, highest + 1)[ids]
        pairs = (divmod(i, WORDS_PER_BLOCK) for i in ids.tolist())
        return np.array([self._draw(key, block, 1)[word] for block, word in pairs], dtype=np.uint32)


_LOW = 0xFFFFFFFF


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _multiply_high_low(x: torch.Tensor, constant: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The 128-bit product of unsigned x and a constant, as int64 bit patterns (high, low)."""
    x_low, x_high = x & _LOW, (x >> 32) & _LOW
    c_low, c_high = constant & _LOW, constant >> 32
    low = x_low * c_low
    middle = x_high * c_low + ((low >> 32) & _LOW)
    carry = x_low * c_high + (middle & _LOW)
    high = x_high * c_high + ((middle >> 32) & _LOW) + ((carry >> 32) & _LOW)
    return high, x * _signed(constant)


def device_words(
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    num_tokens: int,
    lanes_R: torch.Tensor | None = None,
    sample_ids_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [R, num_tokens] in [0, 2^32): words equal to `HostNoise.words`; plain sampling's by default.

    `seeds_R` and `sample_ids_R` hold uint64 values as int64 bit patterns; `lanes_R` is slot | use << 32.
    Runs on the device of its arguments.
    """
    num_blocks = -(-num_tokens // WORDS_PER_BLOCK)
    rows = seeds_R.shape[0]
    c0 = torch.arange(1, num_blocks + 1, device=seeds_R.device).expand(rows, num_blocks)
    c1 = positions_R[:, None].expand(rows, num_blocks)
    c2, c3 = (torch.zeros_like(c0) if part is None else part[:, None].expand_as(c0) for part in (lanes_R, sample_ids_R))
    k0 = seeds_R[:, None]
    k1 = 0
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply_high_low(c0, MULTIPLIERS[0])
        high_1, low_1 = _multiply_high_low(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ _signed(k1), low_0
        k0 = k0 + _signed(KEY_STEPS[0])
        k1 = (k1 + KEY_STEPS[1]) % 2**64
    words_RB4 = torch.stack((c0, c1, c2, c3), dim=-1)
    halves = torch.stack((words_RB4 & _LOW, (words_RB4 >> 32) & _LOW), dim=-1)
    return halves.reshape(rows, num_blocks * WORDS_PER_BLOCK)[:, :num_tokens]
