"""What the prefix cache costs the scheduler's thread, in microseconds per operation.

    python -m benchmarks.radix_tree [--json FILE] [--quick]

Trees hold about a million tokens in ten thousand nodes. As in the engine, the tree's objects are
frozen out of the cyclic garbage collector and the collector is off while measuring: the cache
leaves no cycles behind, and a collection over its nodes would cost milliseconds at random moments.
A request here is match + acquire + extend by one page + release, 64 different ones back to back as
the scheduler admits them; allocation and eviction of that page are timed apart. Times are
wall-clock, so run it on an idle machine. What agents find in the cache (`benchmarks.agents`) follows.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from benchmarks.agents import agent_rows
from benchmarks.report import Row, at_most, report
from engine.cache import Namespace, PrefixCache
from engine.cache.full import FullAttention
from engine.cache.recurrent import RecurrentState, Snapshot
from engine.cache.swa import SlidingWindow
from engine.memory.allocator import PageAllocator, PageState

NAMESPACE = Namespace()
ARRIVALS = 64
WINDOW = 1024


class Forest:
    """A cache filled with `long` contexts of 32 edges, `short` ones of 4 edges, and single pages. A `hybrid`
    one keeps pages of a sliding window and a recurrent state at every node's end besides."""

    def __init__(self, page_size: int, hybrid: bool = False) -> None:
        self.page_size = page_size
        self.random = random.Random(7)
        self.allocator = PageAllocator(2_000_000 // page_size)
        self.window, self.slots = PageAllocator(2_000_000 // page_size), PageAllocator(30_000)
        window, states = SlidingWindow(self.window, page_size, WINDOW), RecurrentState(self.slots)
        more = (window, states) if hybrid else ()
        self.hybrid = hybrid
        self.cache = PrefixCache(self.allocator, page_size, (FullAttention(self.allocator, page_size), *more))
        self.long = [self._chain(32, 1024) for _ in range(10)]
        self.short = self._tree()
        while self.cache.stats().nodes < 10_000:
            self.insert(self.tokens(64))

    def tokens(self, count: int) -> bytes:
        return np.frombuffer(self.random.randbytes(4 * count), np.int32).tobytes()

    def insert(self, tokens: bytes) -> None:
        cache = self.cache
        receipt = cache.acquire(cache.match(NAMESPACE, tokens))
        rest = tokens[4 * receipt.length :]
        pages = self.allocator.alloc(len(rest) // (4 * self.page_size))
        assert pages is not None, "the pool is large enough"
        cache.extend(receipt, rest, pages, self.states(len(pages)))
        cache.release(receipt)

    def states(self, count: int) -> dict[str, Any] | None:
        """What a request hands over beside `count` pages of full attention."""
        if not self.hybrid or not count:
            return None
        window, slot = self.window.alloc(count), self.slots.alloc(1)
        assert window is not None and slot is not None, "the pools are large enough"
        return {"swa": window, "recurrent": Snapshot(int(slot[0]), count * self.page_size)}

    def _chain(self, edges: int, length: int) -> bytes:
        """A context whose every edge ends where another one branches off."""
        context = self.tokens(edges * length)
        self.insert(context)
        for i in range(1, edges):
            self.insert(context[: 4 * i * length] + self.tokens(self.page_size))
        return context

    def _tree(self) -> list[bytes]:
        """Contexts of 1,024 tokens over 4 edges of 256, branching 4 x 4 x 8 x 8."""
        level = [b""]
        for width in (4, 4, 8, 8):
            level = [path + self.tokens(256) for path in level for _ in range(width)]
        for context in level:
            self.insert(context)
        return level


def percentiles(samples_ns: list[int]) -> tuple[float, float]:
    values = np.array(samples_ns) / 1000
    return float(np.percentile(values, 50)), float(np.percentile(values, 99))


def measure(repeats: int, prepare: Callable[[], Callable[[], object]], undo: Callable[[], object]) -> list[int]:
    """Nanoseconds of what `prepare` returns, called once each; `undo` runs untimed after it."""
    samples = []
    for _ in range(repeats):
        operation = prepare()
        begin = perf_counter_ns()
        operation()
        samples.append(perf_counter_ns() - begin)
        undo()
    return samples


def requests(forest: Forest, contexts: list[bytes], repeats: int, diverge: bool) -> list[int]:
    """Whole requests: a known context plus one fresh page, or one leaving it inside its last edge."""
    cache, allocator, page = forest.cache, forest.allocator, forest.page_size

    def draw() -> tuple[bytes, bytes, np.ndarray, dict[str, Any] | None]:
        context = forest.random.choice(contexts)
        if diverge:
            context = context[: -4 * page * forest.random.randrange(1, 256 // page)]
        pages = allocator.alloc(1)
        assert pages is not None, "the pool is large enough"
        return context, context + forest.tokens(page), pages, forest.states(1)

    samples = []
    for _ in range(repeats // ARRIVALS):
        arrivals = [draw() for _ in range(ARRIVALS)]
        for _, tokens, pages, states in arrivals:
            begin = perf_counter_ns()
            receipt = cache.acquire(cache.match(NAMESPACE, tokens, limit=len(tokens) // 4 - 1))
            if states is not None:
                cache.copied(receipt)
            cache.extend(receipt, tokens[4 * receipt.length :], pages, states)
            cache.release(receipt)
            samples.append(perf_counter_ns() - begin)
        for context, tokens, *_ in arrivals:
            # Evict the fresh page as the only cold one, and warm up the leaf that had grown by it.
            cache.release(cache.acquire(cache.match(NAMESPACE, tokens)), cold=True)
            cache.evict(1)
            cache.release(cache.acquire(cache.match(NAMESPACE, context)))
    return samples


def forks(forest: Forest, repeats: int) -> list[int]:
    """64 receipts for what one of a long context covers."""
    cache, made = forest.cache, []
    receipt = cache.acquire(cache.match(NAMESPACE, forest.random.choice(forest.long)))
    cache.copied(receipt)

    def drop() -> None:
        for fork in made:
            cache.release(fork)
        made.clear()

    samples = measure(repeats, lambda: lambda: made.extend(cache.fork(receipt, 64)), drop)
    cache.release(receipt)
    return samples


def request_rows(page_size: int, repeats: int) -> list[Row]:
    forest = Forest(page_size)
    settle()
    cache, allocator = forest.cache, forest.allocator
    stats = cache.stats()
    rows = [
        Row(f"page {page_size}", "tokens cached", stats.tokens, "tokens"),
        Row(f"page {page_size}", "nodes", stats.nodes, "nodes"),
    ]

    def add(case: str, samples: list[int], target: float | None = None) -> None:
        middle, tail = percentiles(samples)
        case = f"page {page_size}: {case}"
        rows.append(Row(case, "p50", middle, "us") if target is None else at_most(case, "p50", middle, "us", target))
        rows.append(Row(case, "p99", tail, "us"))

    add("request, 1k over 4 edges", requests(forest, forest.short, repeats, False), 15)
    add("request, 32k over 32 edges", requests(forest, forest.long, repeats // 4, False), 50)
    add("fork n=64", forks(forest, repeats // 4), 100)
    long = forest.random.choice(forest.long)
    receipt = cache.acquire(cache.match(NAMESPACE, long))
    add("receipt.pages, 32k over 32 edges", measure(repeats // 4, lambda: receipt.pages, lambda: None))
    cache.release(receipt)
    taken: list[np.ndarray | None] = []
    add("alloc 1 page", measure(repeats, lambda: lambda: taken.append(allocator.alloc(1)), lambda: None))
    held = iter([pages for pages in taken if pages is not None])
    add("free 1 page", measure(repeats, lambda: lambda: allocator.free(next(held), PageState.PRIVATE), lambda: None))
    add("request splitting an edge, 1k", requests(forest, forest.short, repeats, True))
    add("epoch bump", measure(repeats // 4, lambda: cache.bump_epoch, lambda: None), 10)
    cache.check()
    return rows


def hybrid_rows(page_size: int, repeats: int) -> list[Row]:
    """Requests on a tree with windows and recurrent states, and what evicting those costs."""
    forest = Forest(page_size, hybrid=True)
    settle()
    cache, rows = forest.cache, []
    kinds = (("1k over 4 edges", forest.short, repeats, 15), ("32k over 32 edges", forest.long, repeats // 4, 50))
    for name, contexts, count, target in kinds:
        middle, tail = percentiles(requests(forest, contexts, count, False))
        case = f"page {page_size}, all components: request, {name}"
        rows += [at_most(case, "p50", middle, "us", target), Row(case, "p99", tail, "us")]
    more = [
        ("fork n=64", forks(forest, repeats // 4), 100),
        ("epoch bump", measure(repeats // 4, lambda: cache.bump_epoch, lambda: None), 10),
    ]
    for component in ("recurrent", "swa"):
        samples = measure(repeats, lambda name=component: lambda: cache.evict(1, name), lambda: None)
        more.append((f"evict 1 of {component}", samples, 12))
    for name, samples, target in more:
        (middle, tail), case = percentiles(samples), f"page {page_size}, all components: {name}"
        rows += [at_most(case, "p50", middle, "us", target), Row(case, "p99", tail, "us")]
    cache.check()
    return rows


def evict_rows(page_size: int, repeats: int, hybrid: bool = False) -> list[Row]:
    """Eviction among 50,000 leaves, half of which were used again after they were inserted."""
    rows, kind = [], ", all components" if hybrid else ""
    for victims, rounds in ((1, repeats), (16, repeats // 8), (64, repeats // 16)):
        allocator, window, slots = (PageAllocator(60_000) for _ in range(3))
        more = (SlidingWindow(window, page_size, WINDOW), RecurrentState(slots)) if hybrid else ()
        cache = PrefixCache(allocator, page_size, (FullAttention(allocator, page_size), *more))
        rng = random.Random(3)
        keys = [rng.randbytes(4 * page_size) for _ in range(50_000)]
        for again, wanted in ((False, keys), (True, rng.sample(keys, len(keys) // 2))):
            for tokens in wanted:
                receipt = cache.acquire(cache.match(NAMESPACE, tokens))
                if not again:
                    pages, windows, slot = allocator.alloc(1), window.alloc(1), slots.alloc(1)
                    assert pages is not None and windows is not None and slot is not None, "pools are large enough"
                    states = {"swa": windows, "recurrent": Snapshot(int(slot[0]), page_size)} if hybrid else None
                    cache.extend(receipt, tokens, pages, states)
                cache.release(receipt)
        settle()
        middle, tail = percentiles(measure(rounds, lambda n=victims, cache=cache: lambda: cache.evict(n), lambda: None))
        case = f"page {page_size}{kind}: evict {victims} of 50,000 leaves"
        rows += [at_most(case, "p50", middle, "us", 10 + 2 * victims), Row(case, "p99", tail, "us")]
        cache.check()
    return rows


def interpreter_row() -> Row:
    """A yardstick: machines that share their cores run everything here up to twice as slowly at times."""
    samples = []
    for _ in range(200):
        store: dict[int, int] = {}
        begin = perf_counter_ns()
        for i in range(100):
            store[i] = i
        samples.append(perf_counter_ns() - begin)
    return Row("interpreter", "100 dictionary stores", percentiles(samples)[0], "us")


def settle() -> None:
    """What the engine does once it has started: nothing built so far is garbage."""
    gc.collect()
    gc.freeze()
    gc.disable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the JSON line to this file too")
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    arguments = parser.parse_args()
    repeats = 640 if arguments.quick else 6400
    rows = [interpreter_row()]
    for page_size in (64, 16):
        rows += request_rows(page_size, repeats)
        rows += hybrid_rows(page_size, repeats)
    rows += [
        *evict_rows(64, repeats),
        *evict_rows(64, repeats, hybrid=True),
        interpreter_row(),
        *agent_rows(repeats * 5 // 8),
    ]
    report("radix_tree", rows, arguments.json)


if __name__ == "__main__":
    main()
