"""Latents and index keys under one page id."""

from __future__ import annotations

import torch

from engine.memory.latent_pool import LatentPool, make_pool
from engine.models.spec import spec_from_config
from tests.oracle.latent_models import shape

COMMON = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, max_position_embeddings=64)


def make() -> LatentPool:
    model_type, fields = shape("glm-16")
    spec = spec_from_config({"model_type": model_type, **COMMON, **fields})
    pool = make_pool(spec, 5, 4, torch.float32, "cpu")
    assert isinstance(pool, LatentPool)
    assert pool.token_bytes == 4 * spec.token_numbers == 4 * (3 * (16 + 8) + 2 * 16), "layer 1 has no index keys"
    return pool


def test_a_copied_page_takes_its_index_keys_along() -> None:
    pool = make()
    owners = (0, 2)
    for layer in range(3):
        pool.tokens(layer)[4:8] = torch.randn(4, 24)
    for layer in owners:
        pool.index_keys(layer)[4:8] = torch.randn(4, 16)
    pool.copy_pages([1], [3])
    for layer in range(3):
        assert torch.equal(pool.tokens(layer)[12:16], pool.tokens(layer)[4:8])
    for layer in owners:
        keys = pool.index_keys(layer)
        assert torch.equal(keys[12:16], keys[4:8]) and not torch.equal(keys[12:16], keys[8:12])


def test_index_keys_are_poisoned_released_and_restored_with_their_latents() -> None:
    pool = make()
    pool.fill(float("nan"))
    assert pool.index_keys(2).isnan().all() and pool.tokens(1).isnan().all()
    address = pool.index_keys(2).data_ptr()
    pool.release()
    assert pool.bytes == 0
    pool.restore()
    assert pool.index_keys(2).data_ptr() == address and not pool.index_keys(2).any()
