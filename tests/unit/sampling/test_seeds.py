"""Philox, derived seeds and the layout of noise."""

import numpy as np
import pytest
import torch

from engine.sampling.noise import HostNoise, device_words, exponentials
from engine.sampling.seeds import (
    DERIVE_DOMAIN,
    U64_MAX,
    NoiseKey,
    derive_seed,
    fresh_seed,
    noise_word,
    philox_block,
)

KEYS = [
    NoiseKey(0, 0),
    NoiseKey(5, 77),
    NoiseKey(U64_MAX, 2**31 - 1),
    NoiseKey(3, 9, slot=6, use=2, sample_id=U64_MAX),
]


def test_philox_gives_the_published_vectors():
    assert philox_block((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )
    ones = philox_block((U64_MAX,) * 4, (U64_MAX, U64_MAX))
    assert ones == (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0)


def test_philox_equals_numpy():
    generator = np.random.Philox(key=np.array([11, 22], dtype=np.uint64), counter=[1, 2, 3, 4])
    words = generator.random_raw(8).tolist()
    assert tuple(words[:4]) == philox_block((2, 2, 3, 4), (11, 22))
    assert tuple(words[4:]) == philox_block((3, 2, 3, 4), (11, 22))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("size", [1, 7, 8, 9, 100])
def test_rows_of_noise_equal_the_scalar_definition(key, size):
    assert HostNoise().words(key, size).tolist() == [noise_word(key, i) for i in range(size)]


@pytest.mark.parametrize("ids", [[0], [40_000], [3, 4, 39_999], list(range(0, 40_000, 700))])
def test_scattered_noise_equals_the_row(ids):
    key, noise = NoiseKey(5, 77), HostNoise()
    row = noise.words(key, 40_001)
    assert noise.words_at(key, np.array(ids)).tolist() == row[ids].tolist()


def test_device_noise_equals_host_noise():
    seeds = np.array([0, 2**63 + 5, U64_MAX, 1], dtype=np.uint64)
    positions = [0, 1, 4_095, 2**31 - 1]
    words = device_words(torch.from_numpy(seeds.view(np.int64)), torch.tensor(positions), 203)
    noise = HostNoise()
    for seed, position, row in zip(seeds.tolist(), positions, words, strict=True):
        assert row.tolist() == noise.words(NoiseKey(seed, position), 203).tolist()


def test_every_field_of_a_key_changes_the_noise():
    base = NoiseKey(5, 6, 1, 1, 1)
    others = [
        NoiseKey(4, 6, 1, 1, 1),
        NoiseKey(5, 7, 1, 1, 1),
        NoiseKey(5, 6, 2, 1, 1),
        NoiseKey(5, 6, 1, 2, 1),
        NoiseKey(5, 6, 1, 1, 2),
    ]
    words = {tuple(HostNoise().words(key, 8).tolist()) for key in [base, *others]}
    assert len(words) == 6


def test_exponentials_stay_finite_and_positive_at_both_ends():
    low, high = exponentials(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert low == pytest.approx(2.0**-33, rel=1e-9)
    assert high == pytest.approx(33 * np.log(2.0), rel=1e-9)


def test_derived_seeds_are_distinct_and_reproducible():
    seeds = [derive_seed(5, i) for i in range(1_000)] + [derive_seed(6, i) for i in range(1_000)]
    assert len(set(seeds)) == 2_000
    assert all(0 <= seed <= U64_MAX for seed in seeds)
    assert derive_seed(5, 3) == philox_block((3, 0, 0, 0), (5, DERIVE_DOMAIN))[0]


def test_derived_seeds_share_nothing_with_the_noise_of_their_parent():
    noise = {int(word) for word in HostNoise().words(NoiseKey(5, 0), 1_000).view(np.uint32)}
    assert not noise & {derive_seed(5, i) & 0xFFFFFFFF for i in range(100)}


def test_fresh_seeds_differ():
    assert len({fresh_seed() for _ in range(100)}) == 100
