"""The key/value pool: copies, release and restore, poison."""

from __future__ import annotations

import pytest
import torch

from engine.errors import Paused
from engine.memory.kv_pool import KVPool, pack
from engine.models.spec import spec_from_config

SPEC = spec_from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 16,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
)


def make_pool() -> KVPool:
    return KVPool(SPEC, num_pages=5, page_size=4, dtype=torch.float32, device="cpu")


def test_written_tokens_are_where_their_slots_say() -> None:
    pool = make_pool()
    k, v = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    pool.write(1, torch.tensor([6, 17]), pack(k, v))
    assert torch.equal(pool.k(1)[1, 2], k[0]) and torch.equal(pool.v(1)[4, 1], v[1])
    assert pool.k(0).count_nonzero() == 0


def test_pack_is_a_view_of_a_fused_output_and_right_for_any_other() -> None:
    fused = torch.randn(3, 8, 4)
    k, v = fused[:, 4:6], fused[:, 6:]
    assert pack(k, v).data_ptr() == k.data_ptr()
    for keys, values in ((k, v), (v, k), (k.clone(), v.clone()), (fused[:, ::4], fused[:, 1::4])):
        assert torch.equal(pack(keys, values), torch.cat((keys, values), dim=1))


def test_copied_pages_are_equal_in_every_layer_and_others_untouched() -> None:
    pool = make_pool()
    for layer in range(2):
        pool.tokens(layer).copy_(torch.randn(20, 4, 4))
    before = [pool.k(layer).clone() for layer in range(2)]
    pool.copy_pages([1, 3], [4, 2])
    pool.copy_pages([], [])
    for layer in range(2):
        assert torch.equal(pool.k(layer), before[layer][[0, 1, 3, 3, 1]])


def test_release_drops_the_storage_and_restore_brings_it_back() -> None:
    pool = make_pool()
    held, generation = pool.bytes, pool.generation
    assert held == 5 * 4 * pool.token_bytes == 2 * 5 * 4 * 2 * 2 * 4 * 4
    pool.release()
    pool.release()
    assert pool.bytes == 0 and pool.released
    with pytest.raises(Paused):
        pool.k(0)
    with pytest.raises(Paused):
        pool.copy_pages([1], [2])
    pool.restore()
    pool.restore()
    assert pool.bytes == held and not pool.released and pool.generation > generation


def test_fill_reaches_every_element_and_is_noticed() -> None:
    pool = make_pool()
    generation = pool.generation
    pool.fill(float("nan"))
    assert all(bool(pool.tokens(layer).isnan().all()) for layer in range(2)) and pool.generation > generation
