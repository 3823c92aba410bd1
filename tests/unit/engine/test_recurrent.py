"""Models with recurrent states: the case book's cases with snapshots at pages of eight tokens."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import Corrupt
from engine.memory.allocator import PageState
from engine.request import GroupSink
from tests.support import TOLERANCE, ask, assert_sample_is_reference, make_engine, prompt, save_tiny

pytestmark = pytest.mark.usefixtures("both_loops")
PAGE = 8


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    shape = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "block_multiple_of": 32}
    return save_tiny(tmp_path_factory.mktemp("lfm2"), seed=4, kind="lfm2", **shape)


def serve(engine, ids, new: int):
    (group,) = engine.generate([ask("g", ids, max_new=new)])
    return group


def test_case_a3_states_of_a_batch_of_prompts(folder):
    prompts = [prompt(13), prompt(21, start=100), prompt(17, start=200)]
    for order in ((0, 1, 2), (2, 0, 1)):
        engine = make_engine(folder, page_size=PAGE, prefill_tokens=64)
        engine.generate([ask(f"g{i}", prompts[i], max_new=4) for i in order])
        for ids in prompts:
            longer = np.concatenate([ids, prompt(3, start=300)])
            group = serve(engine, longer, 4)
            assert group.hit.usable == (len(ids) - 1) // PAGE * PAGE
            assert_sample_is_reference(folder, longer, group.samples[0], 4)
        engine.check()


def test_case_a6_every_tail_of_a_hit(folder):
    engine = make_engine(folder, page_size=PAGE, prefill_tokens=64)
    for n in (1, 2, 7, 8, 9, 15, 16, 17, 18, 24, 25, 31, 32, 33, 34):
        ids = prompt(n, start=5 * n)
        cold, warm = serve(engine, ids, 2), serve(engine, ids, 2)
        assert (cold.hit.usable, warm.hit.usable) == (0, (n - 1) // PAGE * PAGE)
        assert cold.samples[0].ids.tolist() == warm.samples[0].ids.tolist()
        np.testing.assert_allclose(cold.samples[0].logprobs, warm.samples[0].logprobs, atol=TOLERANCE)
    engine.check()


class Quiet(GroupSink):
    wants_deltas = False

    def on_sample(self, sample):
        pass

    on_group = on_delta = on_error = on_sample


def test_case_a7_prompts_shorter_than_a_page(folder):
    engine = make_engine(folder, page_size=PAGE)
    for n in (3, 7, 1):
        serve(engine, prompt(n), 1)
    engine.add_group(ask("gone", prompt(5), max_new=4), Quiet())
    engine.abort(["gone"])
    engine.check()
    slots = engine._parts.pages.states.allocator
    assert engine.gauges().pages_tree == 0 and slots.count(PageState.TREE) == 0
    engine.flush()
    assert slots.num_free == slots.num_pages
    longer = np.concatenate([prompt(7), prompt(9, start=300)])
    assert_sample_is_reference(folder, longer, serve(engine, longer, 8).samples[0], 8)


def test_case_a9_a_prompt_beside_decoding_rows(folder):
    engine = make_engine(folder, page_size=PAGE, prefill_tokens=16)
    engine.add_group(ask("long", prompt(8), max_new=40), Quiet())
    for _ in range(3):
        engine.step()
    second = prompt(24, start=100)
    serve(engine, second, 2)
    follow = np.concatenate([second, prompt(3, start=7)])
    group = serve(engine, follow, 6)
    assert group.hit.usable == 24
    assert_sample_is_reference(folder, follow, group.samples[0], 6)
    while engine.has_work:
        engine.step()
    engine.check()


def test_the_end_of_a_turn_is_resumed_by_the_next_one(folder):
    """Answers are cached with the state at their last whole page, forks' too."""
    engine = make_engine(folder, page_size=PAGE)
    (group,) = engine.generate([ask("g", prompt(13), n=3, max_new=15, temperature=1.0)])
    for sample in group.samples:
        turn = np.concatenate([prompt(13), sample.ids, prompt(4, start=400)])
        following = serve(engine, turn, 3)
        assert following.hit.usable == 24, "28 tokens and one that was never fed"
        assert_sample_is_reference(folder, turn, following.samples[0], 3)
    engine.check()


def test_a_prompt_under_way_stops_where_another_will_branch_off(folder):
    engine = make_engine(folder, page_size=PAGE, prefill_tokens=32)
    shared = prompt(24)
    tails = [prompt(12, start=100), prompt(12, start=200), prompt(12, start=300)]
    asked = [ask(f"g{i}", np.concatenate([shared, tail]), max_new=3) for i, tail in enumerate(tails)]
    groups = engine.generate(asked)
    assert [group.hit.usable for group in groups] == [0, 24, 24]
    for request, group in zip(asked, groups, strict=True):
        assert_sample_is_reference(folder, request.prompt_ids, group.samples[0], 3)


def test_few_slots_evict_snapshots_and_change_no_token(folder):
    engine = make_engine(folder, page_size=PAGE, max_running=2, kv_tokens=512, state_slots=16)
    states = engine._parts.pages.states
    prompts = [prompt(17, start=20 * i) for i in range(12)]
    for ids in prompts * 2:
        assert_sample_is_reference(folder, ids, serve(engine, ids, 2).samples[0], 2)
        engine.check()
    assert states.allocator.num_pages == 16 and states.allocator.num_free < 5


def units(allocator, state: PageState) -> list[int]:
    return np.flatnonzero(allocator.states == state).tolist()


def test_an_engine_finds_writes_to_pages_and_states_it_never_gave_away(folder):
    engine = make_engine(folder, page_size=PAGE, kv_tokens=256, max_running=2, state_slots=12, canary=1)
    parts = engine._parts
    assert parts.canary is not None and parts.pages.states is not None

    for first in range(0, 160, 20):  # more than fits: everything is evicted and used again
        engine.generate([ask("g", prompt(20, start=first), n=2, max_new=5)])
    assert parts.canary.looks > 15
    pool, states = parts.pages.pool, parts.pages.states.pool
    cached, free = units(parts.pages.allocator, PageState.TREE)[0], units(parts.pages.allocator, PageState.FREE)[0]
    snapshot = units(parts.pages.states.allocator, PageState.TREE)[0]
    strays = (
        (pool.tokens(0)[cached * PAGE], rf"cache.canary.*\b1 changed by step .*full {cached}, cached for tokens"),
        (pool.tokens(0)[free * PAGE + PAGE - 1], rf"full {free}, free"),
        (states.tensors[0][snapshot], rf"recurrent {snapshot}, cached for tokens .* to .* of Namespace"),
    )
    for memory, named in strays:
        memory.view(-1)[-1] += 1
        with pytest.raises(Corrupt, match=named):
            parts.canary.look()
        parts.canary.look()  # told once
    pool.tokens(0)[cached * PAGE] += 1
    with pytest.raises(Corrupt, match=rf"full {cached}, cached"):
        serve(engine, prompt(9), 2)
