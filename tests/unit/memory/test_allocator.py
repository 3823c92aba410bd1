"""Page ids: one owner each, all-or-nothing changes, what was freed last goes out first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.memory.allocator import OwnershipError, PageAllocator, PageState

FREE, TREE, PRIVATE, IN_FLIGHT = PageState


def take(allocator: PageAllocator, n: int) -> np.ndarray:
    pages = allocator.alloc(n)
    assert pages is not None and len(pages) == n and pages.dtype == np.int32
    return pages


def test_page_zero_belongs_to_nobody() -> None:
    allocator = PageAllocator(5)
    assert sorted(take(allocator, 5).tolist()) == [1, 2, 3, 4, 5]
    with pytest.raises(OwnershipError):
        allocator.free(np.array([0], np.int32), PRIVATE)
    with pytest.raises(OwnershipError):
        allocator.transfer(np.array([0, 1], np.int32), PRIVATE, TREE)
    allocator.check()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_too_few_pages_change_nothing(size: int) -> None:
    allocator = PageAllocator(size)
    assert allocator.alloc(size + 1) is None
    assert allocator.num_free == size and allocator.count(PRIVATE) == 0
    assert len(take(allocator, 0)) == 0
    take(allocator, size)
    assert allocator.alloc(1) is None
    allocator.check()


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([3, 3], id="twice"),
        pytest.param([5, 2, 5], id="twice-unordered"),
        pytest.param([2, 90], id="one-free"),
        pytest.param([90], id="free"),
        pytest.param([1, 2, 3, 81, 82], id="run-and-tree-page"),
        pytest.param([*range(1, 71), 7], id="many-with-one-twice"),
        pytest.param([*range(70, 0, -1), 90], id="many-with-one-free"),
        pytest.param([200], id="beyond-the-end"),
        pytest.param([*range(1, 71), 200], id="many-beyond-the-end"),
        pytest.param([-1], id="negative"),
        pytest.param([1, 2, -99], id="negative-that-names-an-owned-page"),
        pytest.param([*range(1, 71), -99], id="many-with-a-negative"),
        pytest.param([*range(0, 71)], id="page-zero-among-many"),
    ],
)
@pytest.mark.parametrize("move", ["free", "transfer"])
def test_pages_of_others_are_refused_whole(ids: list[int], move: str) -> None:
    allocator = PageAllocator(100)
    take(allocator, 80)
    allocator.transfer(take(allocator, 5), PRIVATE, TREE)
    before = allocator.states.tobytes(), allocator.num_free
    pages = np.array(ids, np.int32)
    with pytest.raises(OwnershipError):
        if move == "free":
            allocator.free(pages, PRIVATE)
        else:
            allocator.transfer(pages, PRIVATE, TREE)
    assert before == (allocator.states.tobytes(), allocator.num_free)
    allocator.check()


def test_freeing_twice_raises() -> None:
    allocator = PageAllocator(100)
    for n in (1, 4, 70):
        pages = take(allocator, n)
        allocator.free(pages, PRIVATE)
        with pytest.raises(OwnershipError, match=r"expected PRIVATE, is FREE|page"):
            allocator.free(pages, PRIVATE)
    allocator.check()


def test_the_owner_must_be_named_rightly() -> None:
    allocator = PageAllocator(10)
    pages = take(allocator, 4)
    allocator.transfer(pages, PRIVATE, IN_FLIGHT)
    with pytest.raises(OwnershipError, match="expected TREE, is IN_FLIGHT"):
        allocator.free(pages, TREE)
    assert [allocator.count(state) for state in PageState] == [6, 0, 0, 4]
    allocator.free(pages, IN_FLIGHT)
    allocator.check()


def test_what_was_freed_last_goes_out_first_in_its_order() -> None:
    allocator = PageAllocator(64)
    first, second = take(allocator, 8), take(allocator, 8)
    assert first.tolist() == list(range(1, 9)) and second.tolist() == list(range(9, 17))
    mixed = np.array([12, 3, 9], np.int32)
    allocator.free(mixed, PRIVATE)
    allocator.free(np.array([5], np.int32), PRIVATE)
    assert take(allocator, 5).tolist() == [5, 12, 3, 9, 17]
    allocator.check()


@pytest.mark.parametrize("harm", ["free id lost", "free id twice", "owned id free", "counter off"])
def test_check_finds_ids_that_are_lost_or_there_twice(harm: str) -> None:
    allocator = PageAllocator(20)
    pages = take(allocator, 5)
    allocator.check()
    if harm == "free id lost":
        allocator._counts[0] -= 1
        allocator._counts[2] += 1
    elif harm == "free id twice":
        allocator._stack[0] = allocator._stack[1]
    elif harm == "owned id free":
        allocator._stack[0] = pages[0]
    else:
        allocator._counts[1] += 1
    with pytest.raises(AssertionError):
        allocator.check()


def test_handed_out_ids_cannot_corrupt_the_pool() -> None:
    allocator = PageAllocator(8)
    with pytest.raises(ValueError, match="read-only"):
        take(allocator, 1)[0] = 7
    take(allocator, 4)[:] = 7
    allocator.check()
    assert sorted(take(allocator, 3).tolist()) == [6, 7, 8]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 140), st.lists(st.tuples(st.sampled_from("afti"), st.integers(0, 1 << 16)), max_size=60))
def test_random_calls_keep_one_owner_per_page(size: int, calls: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(size)
    owner: dict[int, PageState] = {}
    for call, seed in calls:
        rng = np.random.default_rng(seed)
        if call == "a":
            n = int(rng.integers(0, size + 2))
            pages = allocator.alloc(n)
            assert (pages is None) == (n > size - len(owner))
            for page in [] if pages is None else pages.tolist():
                assert page not in owner and 1 <= page <= size
                owner[page] = PRIVATE
        elif owner:
            state = owner[int(rng.choice(list(owner)))]
            own = [page for page, held in owner.items() if held == state]
            ids = rng.permutation(own)[: int(rng.integers(0, len(own) + 1))].astype(np.int32)
            if call == "f":
                allocator.free(ids, state)
                for page in ids.tolist():
                    del owner[page]
            else:
                target = TREE if call == "t" else IN_FLIGHT
                allocator.transfer(ids, state, target)
                owner.update(dict.fromkeys(ids.tolist(), target))
        allocator.check()
        assert allocator.num_free == size - len(owner)
        assert {page: PageState(allocator.states[page]) for page in owner} == owner
