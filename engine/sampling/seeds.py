"""Seeds and the counter-based generator behind every random choice.

Owns Philox4x64-10 as a scalar function, the layout of its key and counter, and how a sample's
seed comes from its group's. Ignores bulk generation (`engine.sampling.noise`) and what the
numbers are used for.

The generator is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3" (2011). NumPy's `Philox` and Triton's `tl.philox` on uint64 counters compute the same words.

    key     = (seed, domain)                       domain 0: noise, 1: derivation of seeds
    counter = (1 + token_id // 8, position, slot | use << 32, sample_id)

Word `token_id % 8` of a block is the low (even) or high (odd) half of its 64-bit word
`token_id % 8 // 2`. The first block is number 1 because NumPy counts up before it draws. Two draws
are independent when any field of the key or counter differs, so nothing is ever drawn twice as
long as each purpose has its own `use`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

U64_MAX = 2**64 - 1
WORDS_PER_BLOCK = 8
"""32-bit words in one block of 256 bits."""

NOISE_DOMAIN = 0
DERIVE_DOMAIN = 1

USE_TOKEN = 0
"""Noise of plain sampling and of coupled verification; slot and sample id are 0."""
USE_DRAFT = 1
"""Rejection rounds: a draft's choice. `position` is the anchor's, `slot` the draft's number."""
USE_ACCEPT = 2
"""Rejection rounds: whether a draft is accepted; the word of token id 0."""
USE_EMIT = 3
"""Rejection rounds: the token after the accepted ones; `slot` is their number."""

MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
ROUNDS = 10


@dataclass(slots=True, frozen=True)
class NoiseKey:
    """Names one stream of noise, indexed by token id.

    Plain sampling sets only `seed` and `position`, the sequence position of the token being drawn.
    A rejection round sets all: `position` is then that of the anchor.
    """

    seed: int
    position: int
    slot: int = 0
    use: int = USE_TOKEN
    sample_id: int = 0

    def counter(self, block: int) -> tuple[int, int, int, int]:
        """The counter of the block holding token ids [8 * block, 8 * block + 8)."""
        return (block + 1, self.position, self.slot | self.use << 32, self.sample_id)


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """The four 64-bit words at one counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0 = MULTIPLIERS[0] * c0
        product_1 = MULTIPLIERS[1] * c2
        c0 = (product_1 >> 64) ^ c1 ^ k0
        c1 = product_1 & U64_MAX
        c2 = (product_0 >> 64) ^ c3 ^ k1
        c3 = product_0 & U64_MAX
        k0 = (k0 + KEY_STEPS[0]) & U64_MAX
        k1 = (k1 + KEY_STEPS[1]) & U64_MAX
    return c0, c1, c2, c3


def noise_word(key: NoiseKey, token_id: int) -> int:
    """The 32-bit word of one token id."""
    block, word = divmod(token_id, WORDS_PER_BLOCK)
    words = philox_block(key.counter(block), (key.seed, NOISE_DOMAIN))
    return words[word // 2] >> 32 * (word % 2) & 0xFFFFFFFF


def derive_seed(seed: int, index: int) -> int:
    """The uint64 seed of sample `index` in a group with `seed`."""
    return philox_block((index, 0, 0, 0), (seed, DERIVE_DOMAIN))[0]


def fresh_seed() -> int:
    """A uint64 seed that nobody has chosen."""
    return secrets.randbits(64)
