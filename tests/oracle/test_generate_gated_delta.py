"""Gated delta nets, served: states are kept every 64 tokens, and what the cache has of a prompt changes no bit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.test_generate_hybrid import GATED_DELTA
from tests.support import ask, make_engine, prompt, reference_greedy, save_tiny

GRID = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("qwen3-next"), seed=4, kind="qwen3_next", **GATED_DELTA)


def answers(groups) -> list[tuple[list[int], list[float]]]:
    return [(sample.ids.tolist(), sample.logprobs.tolist()) for group in groups for sample in group.samples]


@pytest.mark.usefixtures("both_loops")
def test_cold_is_warm_on_both_sides_of_the_grid(folder):
    """Asked one by one and then all at once, among them one that branches off and groups that fork, of an engine
    that has seen some of it: whoever finds a state finds the last on the grid."""
    branching = np.concatenate([prompt(GRID + 6), prompt(9, start=400)])
    asked = [prompt(n) for n in (GRID - 1, GRID, GRID + 1, 2 * GRID + 1)] + [branching]
    requests = [ask(f"g{i}", ids, n=1 + i % 2, max_new=3, temperature=1.0, seed=i) for i, ids in enumerate(asked)]
    cold = make_engine(folder, page_size=16, prefix_cache=False, deterministic=True)
    expected = answers([group for request in requests for group in cold.generate([request])])
    warm = make_engine(folder, page_size=16, prefill_tokens=100, deterministic=True)
    warm.generate([ask("first", prompt(GRID + 8), max_new=2)])
    groups = warm.generate(requests)
    assert answers(groups) == expected
    assert [group.hit.usable for group in groups] == [0, 0, GRID, GRID, GRID]
    assert [group.hit.usable for group in warm.generate(requests[2:4])] == [GRID, 2 * GRID]
    warm.check()


@pytest.mark.slow
@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_end_of_a_turn_is_resumed_by_the_next_one(folder, deterministic):
    """Answers are cached with their last state on the grid, whatever length they reach, forks' too."""
    engine = make_engine(folder, page_size=16, deterministic=deterministic)
    (group,) = engine.generate([ask("g", prompt(50), n=3, max_new=30, temperature=1.0)])
    for sample in group.samples:
        turn = np.concatenate([prompt(50), sample.ids, prompt(4, start=400)])
        (following,) = engine.generate([ask("next", turn, max_new=3)])
        assert following.hit.usable == GRID
        assert following.samples[0].ids.tolist() == reference_greedy(folder, turn, 3)
    engine.check()
