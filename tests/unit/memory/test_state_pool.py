"""States and rings: memory that goes and comes back where it was, empty."""

from __future__ import annotations

import pytest
import torch

from engine.cache import Namespace, PrefixCache
from engine.cache.full import FullAttention
from engine.cache.recurrent import RecurrentState, Snapshot
from engine.errors import Corrupt, Paused
from engine.memory.canary import WatchedAllocator, make_canary
from engine.memory.kv_pool import KVPool
from engine.memory.replay_ring import ReplayLayout, ReplayRings
from engine.memory.state_pool import StatePool
from engine.models.mixers import StateLayout, StateTensor
from tests.support import prompt
from tests.unit.memory.test_kv_pool import SPEC
from tests.unit.memory.test_slab import resident_bytes

PAGE = 8


def make_states(slots: int = 9, width: int = 4, rings: int = 2) -> StatePool:
    layer = StateTensor("inputs", (3, 5), torch.bfloat16), StateTensor("state", (2, width), torch.float32)
    pool = StatePool(StateLayout({0: layer, 2: layer}, PAGE), slots, PAGE, "cpu")
    pool.rings = ReplayRings(ReplayLayout({0: 6, 2: width}, torch.bfloat16, rings, 4), "cpu")
    return pool


def test_states_and_rings_go_together_and_come_back_empty() -> None:
    pool = make_states(slots=9, width=1 << 20)
    rings = pool.rings
    assert rings is not None
    expected = 9 * 2 * (3 * 5 * 2 + 2 * (1 << 20) * 4)
    assert rings.bytes == 3 * 4 * (6 + (1 << 20)) * 2 == rings.layout.num_bytes
    assert pool.bytes == expected + rings.bytes
    pool.fill(2.0)
    tensors = [*pool.tensors, rings.layer(0), rings.layer(2)]
    places, held, size = [tensor.data_ptr() for tensor in tensors], resident_bytes(), pool.bytes
    pool.release()
    pool.release()
    assert pool.released and pool.bytes == rings.bytes == 0 and resident_bytes() <= held - size * 9 // 10
    for use in (lambda: pool.layer(2), lambda: pool.copy(1, 2), lambda: pool.clear(1), lambda: pool.fill(0.0)):
        with pytest.raises(Paused, match="states"):
            use()
    pool.restore()
    pool.restore()
    assert [tensor.data_ptr() for tensor in tensors] == places and pool.bytes == size
    assert not any(tensor.any() for tensor in tensors)
    pool.layer(2)[1][3] = 1.0
    pool.copy(3, 4)
    assert bool((pool.tensors[3][4] == 1).all()) and not pool.tensors[3][5].any()


def test_what_is_in_use_is_not_released() -> None:
    pool = make_states()
    pool.pair(1, 2)
    with pytest.raises(AssertionError, match=r"slots \[1\] are in use"):
        pool.release()
    pool.unpair(1)
    assert pool.rings is not None
    pool.rings.open(1, 8, 2)
    with pytest.raises(AssertionError, match=r"slots \[1\] wait"):
        pool.release()
    assert not pool.released and not pool.rings.released


def test_a_canary_takes_memory_that_came_back_for_new() -> None:
    full, slots, states = WatchedAllocator(19), WatchedAllocator(8), make_states()
    pool = KVPool(SPEC, 20, PAGE, torch.float32, "cpu")
    cache = PrefixCache(full, PAGE, (FullAttention(full, PAGE), RecurrentState(slots)))
    canary = make_canary(cache, 1, pool, None, states)
    assert canary is not None
    receipt = cache.acquire(cache.match(Namespace(), b""))
    pages, taken = full.alloc(1), slots.alloc(1)
    assert pages is not None and taken is not None
    slot = int(taken[0])
    states.tensors[1][slot] = 3.0
    cache.extend(receipt, prompt(PAGE).astype("<i4").tobytes(), pages, {"recurrent": Snapshot(slot, PAGE)})
    canary.look()
    states.tensors[1][slot] = 4.0
    with pytest.raises(Corrupt, match=rf"recurrent {slot}, cached"):
        canary.look()
    cache.release(receipt)
    cache.reset()
    canary.look()
    states.release()
    canary.look()
    states.restore()
    canary.look()
    states.tensors[1][slot] = 5.0
    with pytest.raises(Corrupt, match=rf"recurrent {slot}, free"):
        canary.look()
