"""States that lie beside a drafter's context."""

import numpy as np
import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.drafter import Committed
from engine.dspark.states import StateStore, with_states
from engine.errors import Paused
from engine.memory.kv_pool import KVPool
from engine.memory.needs import token_bytes
from tests.unit.dspark import drafters
from tests.unit.memory.test_kv_pool import SPEC

HIDDEN, LAYERS, PAGE = 6, (1, 4, 7), 4


def pool_of(count=len(LAYERS)):
    return KVPool(with_states(SPEC, HIDDEN, count), 9, PAGE, torch.float32, "cpu")


def test_states_are_read_from_the_pages_they_were_written_to_and_go_with_them():
    pool = pool_of()
    store = StateStore(pool, LAYERS)
    generator = torch.Generator().manual_seed(0)
    features = {layer: torch.randn(10, HIDDEN, generator=generator) for layer in LAYERS}
    pages = np.array([7, 2, 5], dtype=np.int32)
    slots = [int(pages[token // PAGE]) * PAGE + token % PAGE for token in range(10)]
    # What has no slot goes to the scratch page, which nobody reads.
    store.write(torch.tensor([*slots[:9], 0]), features)
    expected = torch.stack([features[layer] for layer in LAYERS], dim=1)
    assert torch.equal(store.read(pages, 9), expected[:9])
    assert not pool.beside[slots[9]].any()
    pool.copy_pages([7, 2], [1, 8])
    pool.beside[slots[0]] = 0.0
    assert torch.equal(store.read(np.array([1, 8]), 8), expected[:8])
    assert torch.equal(pool.pages()[-1][8], expected[4:8].flatten(1))


def test_states_count_as_memory():
    bare, kept = pool_of(0), pool_of()
    assert len(bare.pages()) == SPEC.num_layers and len(kept.pages()) == len(bare.pages()) + 1
    for pool, count in ((bare, 0), (kept, len(LAYERS))):
        spec = with_states(SPEC, HIDDEN, count)
        assert pool.token_bytes == token_bytes(spec, torch.float32)
    assert kept.token_bytes - bare.token_bytes == 4 * HIDDEN * len(LAYERS)


def test_tokens_without_a_slot_leave_no_states_and_context_lies_where_it_did():
    """Two of six have slot -1. Beside keys and values nothing moves."""
    model, kept = drafters.random_drafter(), (0, 2, 3)
    shape = model.spec.backbone
    spec = with_states(shape, drafters.HIDDEN, len(kept))
    with_them, without = (KVPool(each, 9, PAGE, torch.float32, "cpu") for each in (spec, shape))
    store = StateStore(with_them, kept)
    generator = torch.Generator().manual_seed(1)
    features = {layer: torch.randn(6, drafters.HIDDEN, generator=generator) for layer in kept}
    positions = torch.arange(6)
    slots = torch.tensor([28, -1, 30, 31, 8, -1])
    committed = Committed([0], [6], positions, positions, slots, features)
    for pool, states in ((with_them, store), (without, None)):
        BlockDrafter(model, drafters.random_ends(), pool, TorchReference(shape), states).commit(committed)
    expected = torch.zeros(5, len(kept), drafters.HIDDEN)
    stacked = torch.stack([features[layer] for layer in kept], dim=1)
    expected[[0, 2, 3, 4]] = stacked[[0, 2, 3, 4]]
    assert torch.equal(store.read(np.array([7, 2], dtype=np.int32), 5), expected)
    written = with_them.beside.any(dim=1).nonzero().flatten().tolist()
    assert set(written) == {0, 28, 30, 31, 8}
    for layer in range(shape.num_layers):
        assert torch.equal(with_them.tokens(layer)[PAGE:], without.tokens(layer)[PAGE:])


def test_released_states_are_gone_and_their_place_comes_back():
    pool = pool_of()
    store, place = StateStore(pool, LAYERS), pool.beside.data_ptr()
    features = {layer: torch.ones(1, HIDDEN) for layer in LAYERS}
    store.write(torch.tensor([5]), features)
    pool.release()
    with pytest.raises(Paused):
        store.read(np.array([1]), 2)
    with pytest.raises(Paused):
        store.write(torch.tensor([5]), features)
    pool.restore()
    assert pool.beside.data_ptr() == place and not store.read(np.array([1]), 2).any()


@pytest.mark.parametrize("count", [0, len(LAYERS) - 1])
def test_a_pool_made_for_other_states_is_refused(count):
    with pytest.raises(AssertionError, match="made for these states"):
        StateStore(pool_of(count), (*LAYERS, 9, 10) if count else LAYERS)
