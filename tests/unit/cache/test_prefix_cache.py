"""The prefix cache's promises, one by one."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys

import numpy as np
import pytest

from engine.cache import Namespace, PrefixCache, Receipt, ReceiptError
from engine.memory.allocator import OwnershipError, PageAllocator, PageState

PAGE = 2
BASE = Namespace()


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def make(num_pages: int = 64) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages), PAGE)


def insert(cache: PrefixCache, tokens: bytes, namespace: Namespace = BASE) -> Receipt:
    receipt = cache.acquire(cache.match(namespace, tokens))
    rest = tokens[4 * receipt.length :]
    pages = cache.allocator.alloc(len(rest) // (4 * PAGE))
    assert pages is not None
    cache.extend(receipt, rest, pages)
    return receipt


def cached(cache: PrefixCache, tokens: bytes, namespace: Namespace = BASE) -> int:
    return cache.match(namespace, tokens).usable


def test_limit_leaves_a_token_to_compute() -> None:
    cache = make()
    tokens = ids(1, 2, 3, 4)
    insert(cache, tokens)
    assert cached(cache, tokens) == 4
    assert cache.match(BASE, tokens, limit=3).usable == 2
    assert cache.match(BASE, tokens, limit=0).usable == 0
    assert cache.match(BASE, tokens[:12]).usable == 2, "an incomplete page is no page"


def test_hits_are_counted_when_acquired() -> None:
    cache = make()
    insert(cache, ids(1, 2, 3, 4))
    found = cache.match(BASE, ids(1, 2, 9, 9))
    assert cache.stats().hit_tokens == 0
    cache.acquire(found)
    stats = cache.stats()
    assert (stats.hit_tokens, stats.lookup_tokens) == (2, 8)


def test_a_stale_match_is_walked_again() -> None:
    cache = make()
    early = cache.match(BASE, ids(1, 2, 3, 4))
    held = insert(cache, ids(1, 2, 3, 4))
    late = cache.match(BASE, ids(1, 2, 3, 4))
    receipt = cache.acquire(early)
    assert receipt.length == 4, "what arrived meanwhile is a hit"
    for each in (held, receipt):
        cache.release(each)
    cache.evict(1)
    assert cache.acquire(late).length == 2
    cache.check()


def test_a_chunked_insert_keeps_one_node() -> None:
    cache = make()
    receipt = insert(cache, ids(1, 2))
    for first in range(3, 11, 2):
        cache.extend(receipt, ids(first, first + 1), taken(cache, 1))
    assert cache.stats().nodes == 1 and receipt.length == 10
    fork = cache.fork(receipt, 1)[0]
    cache.extend(fork, ids(11, 12), taken(cache, 1))
    assert cache.stats().nodes == 2, "the sibling still ends at 10"
    assert (receipt.length, fork.length) == (10, 12)
    cache.check()


def taken(cache: PrefixCache, n: int) -> np.ndarray:
    pages = cache.allocator.alloc(n)
    assert pages is not None
    return pages


def test_duplicates_give_way_to_the_tree() -> None:
    cache = make()
    first = insert(cache, ids(1, 2, 3, 4, 5, 6))
    second = cache.acquire(cache.match(BASE, b""))
    free = cache.allocator.num_free
    own = taken(cache, 4)
    done = cache.extend(second, ids(1, 2, 3, 4, 7, 8, 9, 9), own)
    assert done.duplicates == 2
    assert done.pages.tolist() == [*first.pages()[:2].tolist(), *own[2:].tolist()]
    assert cache.allocator.num_free == free - 2
    cache.check()


def test_pages_that_are_not_the_requests_are_refused() -> None:
    cache = make()
    receipt = insert(cache, ids(1, 2))
    other = insert(cache, ids(5, 6))
    with pytest.raises(OwnershipError):
        cache.extend(receipt, ids(3, 4), other.pages())
    assert receipt.length == 2 and cached(cache, ids(1, 2, 3, 4)) == 2
    cache.check()


def test_inserting_keeps_no_hold_on_the_callers_array() -> None:
    cache = make()
    receipt = cache.acquire(cache.match(BASE, b""))
    pages = taken(cache, 2).copy()
    expected = pages.tolist()
    cache.extend(receipt, ids(1, 2, 3, 4), pages)
    pages[:] = 0
    assert receipt.pages().tolist() == expected


def test_a_receipt_is_released_once() -> None:
    cache = make()
    receipt = insert(cache, ids(1, 2))
    cache.release(receipt)
    for misuse in (
        lambda: cache.release(receipt),
        lambda: cache.fork(receipt, 1),
        lambda: cache.extend(receipt, ids(3, 4), taken(cache, 1)),
        receipt.pages,
    ):
        with pytest.raises(ReceiptError):
            misuse()
    assert not receipt.live


def test_each_fork_holds_on_its_own() -> None:
    cache = make()
    receipt = insert(cache, ids(1, 2, 3, 4))
    forks = cache.fork(receipt, 3)
    cache.release(receipt)
    for fork in forks:
        assert cache.evict(9) == 0 and fork.pages().tolist() == forks[-1].pages().tolist()
        if fork is not forks[-1]:
            cache.release(fork)
    cache.release(forks[-1])
    assert cache.evict(9) == 2
    assert cache.fork(insert(cache, ids(1, 2)), 0) == []
    cache.check()


def test_eviction_takes_only_the_shortfall() -> None:
    cache = make()
    tokens = ids(*range(20))
    cache.release(insert(cache, tokens))
    assert cache.evict(1) == 1 and cached(cache, tokens) == 18
    assert cache.evict(3) == 3 and cached(cache, tokens) == 12
    assert cache.evict(100) == 6 and cached(cache, tokens) == 0
    cache.check()


def test_eviction_order_is_least_recent_use_exactly() -> None:
    """Against a list of page prefixes with the time of the last receipt that covered them."""
    rng = random.Random(5)
    for _ in range(6):
        cache = make(200)
        used: dict[bytes, int] = {}
        for now in range(30):
            tokens = ids(*(rng.choice((0, 1)) for _ in range(2 * rng.randrange(1, 6))))
            cache.release(insert(cache, tokens))
            used.update({tokens[:end]: now for end in range(8, len(tokens) + 1, 8)})
        while used:
            assert cache.evict(1) == 1
            gone = [prefix for prefix in used if cached(cache, prefix) < len(prefix) // 4]
            assert len(gone) == 1
            leaves = [a for a in used if not any(b != a and b.startswith(a) for b in used)]
            assert used[gone[0]] == min(used[leaf] for leaf in leaves)
            del used[gone[0]]
            cache.check()


def test_finished_groups_go_first_and_a_hit_warms_them_up() -> None:
    cache = make()
    old, cold, warmed = (insert(cache, ids(n, n)) for n in (1, 2, 3))
    cache.release(old)
    cache.release(warmed, cold=True)
    cache.release(cold, cold=True)
    cache.release(cache.acquire(cache.match(BASE, ids(3, 3))))
    order = []
    while cache.evict(1):
        order += [n for n in (1, 2, 3) if not cached(cache, ids(n, n)) and n not in order]
    assert order == [2, 1, 3]


def test_case_a1_no_hit_crosses_a_weight_update() -> None:
    cache = make()
    prompt = ids(*range(16))
    cache.release(insert(cache, prompt))
    epoch = cache.bump_epoch()
    new = Namespace(epoch=epoch)
    assert cached(cache, prompt, new) == 0
    cache.release(insert(cache, prompt, new))
    assert cached(cache, prompt, new) == 16
    assert cache.evict(8) == 8
    assert cached(cache, prompt, new) == 16 and cached(cache, prompt) == 0, "the old epoch goes first"


def test_case_a2_what_an_old_request_adds_stays_in_its_epoch() -> None:
    cache = make()
    prompt, output = ids(*range(16)), ids(*range(50, 62))
    running = insert(cache, prompt)
    new = Namespace(epoch=cache.bump_epoch())
    assert cached(cache, prompt, new) == 0
    cache.extend(running, output, taken(cache, 6))
    fresh = insert(cache, prompt, new)
    cache.release(running)
    assert cached(cache, prompt + output, new) == 16
    cache.release(fresh)
    assert cache.evict(14) == 14 and cached(cache, prompt, new) == 16
    cache.check()


def test_an_idle_cache_is_not_needed_to_flush() -> None:
    cache = make()
    running = insert(cache, ids(1, 2, 3, 4))
    cache.release(insert(cache, ids(1, 2, 3, 4, 5, 6)))
    assert cache.flush("all") == 2
    assert cached(cache, ids(1, 2)) == 0, "what is pinned is no longer found"
    assert len(running.pages()) == 2
    cache.extend(running, ids(7, 8), taken(cache, 1))
    assert cached(cache, ids(1, 2)) == 0
    again = insert(cache, ids(1, 2))
    cache.release(running)
    assert cache.allocator.count(PageState.TREE) == 1
    assert cache.stats().flushed_tokens == 8
    cache.release(again)
    cache.check()


def test_flushing_stale_spares_the_current_epoch() -> None:
    cache = make()
    cache.release(insert(cache, ids(1, 2)))
    new = Namespace(epoch=cache.bump_epoch())
    cache.release(insert(cache, ids(1, 2, 3, 4), new))
    assert cache.flush("stale") == 2
    assert cached(cache, ids(1, 2, 3, 4), new) == 4
    adapter = Namespace(epoch=1, adapter="a", adapter_rev=1)
    cache.release(insert(cache, ids(1, 2), adapter))
    assert cache.retire(lambda namespace: namespace.adapter == "a") == 1
    assert cache.flush("stale") == 2 and cached(cache, ids(1, 2, 3, 4), new) == 4


def test_a_dropped_adapter_goes_before_older_entries() -> None:
    cache = make()
    cache.release(insert(cache, ids(1, 2)))
    adapter = Namespace(adapter="a", adapter_rev=1)
    cache.release(insert(cache, ids(1, 2), adapter))
    cache.retire(lambda namespace: namespace.adapter == "a")
    assert cache.evict(1) == 1
    assert cached(cache, ids(1, 2)) == 2 and cached(cache, ids(1, 2), adapter) == 0


def test_reset_needs_everything_released() -> None:
    cache = make()
    receipt = insert(cache, ids(1, 2))
    with pytest.raises(AssertionError, match="1 receipts alive"):
        cache.reset()
    cache.release(receipt)
    cache.reset()
    assert cache.allocator.num_free == 64 and cache.stats().roots == 0
    cache.check()


def test_case_a5_no_choice_of_names_shares_pages() -> None:
    """Every way of spreading the same strings over the fields is a namespace of its own."""
    cache = make(2000)
    words = ("", "a", "1", "a1", "a|1", "a\x001", "('a', 1)")
    spaces = [
        Namespace(adapter=adapter, adapter_rev=rev, salt=salt, layout=layout)
        for adapter, rev, salt, layout in itertools.product(words, (0, 1), words, ("", "a", "1"))
    ]
    prompt = ids(*range(4))
    seen: set[int] = set()
    for space in spaces:
        assert cached(cache, prompt, space) == 0
        receipt = insert(cache, prompt, space)
        pages = set(receipt.pages().tolist())
        assert len(pages) == 2 and not pages & seen
        seen |= pages
    cache.check()


_REPLICA = """
import random, hashlib, numpy as np
from engine.cache import Namespace, PrefixCache
from engine.memory.allocator import PageAllocator

rng = random.Random(11)
cache = PrefixCache(PageAllocator(90), 2)
digest, receipts = hashlib.sha256(), []
for step in range(1500):
    namespace = Namespace(epoch=cache.current_epoch, salt=rng.choice(("", "a", "b")))
    tokens = np.array([rng.randrange(3) for _ in range(2 * rng.randrange(1, 7))], np.int32).tobytes()
    receipt = cache.acquire(cache.match(namespace, tokens))
    rest = tokens[4 * receipt.length :]
    need = len(rest) // 8
    if need > cache.allocator.num_free:
        cache.evict(need - cache.allocator.num_free)
    pages = cache.allocator.alloc(need)
    if pages is not None:
        digest.update(cache.extend(receipt, rest, pages).pages.tobytes())
    receipts += [receipt, *cache.fork(receipt, rng.randrange(2))]
    rng.shuffle(receipts)
    while len(receipts) > 8:
        cache.release(receipts.pop(), cold=rng.random() < 0.3)
    if rng.random() < 0.01:
        cache.bump_epoch()
    if rng.random() < 0.01:
        cache.flush("stale")
    digest.update(cache.allocator.states.tobytes())
cache.check()
assert cache.stats().evicted_tokens > 500
print(digest.hexdigest())
"""


def test_replicas_given_one_stream_hold_identical_pages() -> None:
    """In processes whose hashes are salted differently."""
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", _REPLICA], env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        digests.add(done.stdout)
    assert len(digests) == 1
