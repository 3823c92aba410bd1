"""Two siblings finish after their common part: the second inserts below an evictable leaf."""

import numpy as np

from engine.cache.key import Namespace
from engine.cache.prefix_cache import PrefixCache
from engine.memory.allocator import PageAllocator


def token_bytes(*pages):
    return np.array(pages, np.int32).tobytes()


def test_a_leaf_that_gets_a_child_is_no_longer_evictable():
    allocator = PageAllocator(8)
    cache = PrefixCache(allocator, 1)
    first = cache.acquire(cache.match(Namespace(), token_bytes(1)))
    cache.extend(first, token_bytes(1), allocator.alloc(1))
    second = cache.fork(first, 1)[0]
    cache.extend(first, token_bytes(2), allocator.alloc(1))
    cache.release(first)
    # 1 -> 2 is an unpinned leaf now; the sibling passes through it.
    cache.extend(second, token_bytes(2, 3), allocator.alloc(2))
    cache.check()
    cache.release(second)
    cache.check()
    assert cache.evict(8) == 3
    cache.check()
