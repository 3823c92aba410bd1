"""States that lie beside a drafter's context."""

import numpy as np
import torch

from engine.dspark.states import StateStore, with_states
from engine.memory.kv_pool import KVPool
from engine.memory.needs import token_bytes
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
