"""Writes that go astray are found and named: deliberately wrong ones, in every component."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.cache import Namespace, PrefixCache
from engine.cache.full import FullAttention
from engine.cache.swa import SlidingWindow
from engine.errors import Corrupt
from engine.memory.canary import WatchedAllocator, make_canary, unit_sums
from engine.memory.kv_pool import KVPool
from engine.models.spec import LayerSpec
from tests.support import prompt
from tests.unit.memory.test_kv_pool import SPEC

PAGE = 8


def test_pages_of_windows_are_looked_at_under_their_own_ids() -> None:
    spec = replace(SPEC, layers=(LayerSpec(), LayerSpec(window=9)))
    pool = KVPool(spec, 20, PAGE, torch.float32, "cpu", window_pages=10)
    full, window = WatchedAllocator(19), WatchedAllocator(9)
    cache = PrefixCache(full, PAGE, (FullAttention(full, PAGE), SlidingWindow(window, PAGE, 9)))
    canary = make_canary(cache, 2, pool, None, None)
    assert canary is not None and make_canary(cache, 0, pool, None, None) is None
    receipt = cache.acquire(cache.match(Namespace(), b""))
    pages, windows = full.alloc(3), window.alloc(3)
    assert pages is not None and windows is not None
    canary.look()
    pool.tokens(1)[int(windows[1]) * PAGE] = 3.0  # private: its owner may
    cache.extend(receipt, prompt(3 * PAGE).astype(np.int32).tobytes(), pages, {"swa": windows})
    canary.look()
    pool.tokens(0)[int(windows[1]) * PAGE] = 3.0  # the same number, but of a layer that looks at everything
    with pytest.raises(Corrupt, match=rf"full {windows[1]}"):
        canary.look()
    pool.tokens(1)[int(windows[1]) * PAGE] = 4.0
    canary.step()  # every second
    with pytest.raises(Corrupt, match=rf"swa {windows[1]}, cached for tokens 0 to 24 of .*, 1 pins"):
        canary.step()
    pool.release()
    canary.look()
    pool.restore()
    canary.look()
    pool.fill(1.0)
    canary.look()


def test_a_single_word_always_shows() -> None:
    storage = [torch.zeros(6, 3, 5, dtype=torch.bfloat16), torch.zeros(6, 4, dtype=torch.float32)]
    before = unit_sums(storage, np.arange(6))
    assert before.tolist() == [0] * 6
    for tensor in storage:
        for place in range(tensor[0].numel()):
            tensor[2].view(-1)[place] = -1.5
            after = unit_sums(storage, np.arange(6))
            assert np.flatnonzero(after != before).tolist() == [2]
            tensor[2].view(-1)[place] = 0.0
    storage[0][1].view(-1)[:2] = torch.tensor([1.0, 2.0])
    one = unit_sums(storage, np.array([1]))
    storage[0][1].view(-1)[:2] = torch.tensor([2.0, 1.0])
    assert unit_sums(storage, np.array([1])) != one, "places count"
