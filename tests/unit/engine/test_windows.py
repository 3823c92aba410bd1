"""Windowed layers with pages of their own: hits, tombstones and memory, and the case book's A4."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from engine.errors import InvalidRequest
from engine.memory.allocator import PageState
from tests.support import TOLERANCE, ask, assert_sample_is_reference, make_engine, prompt, save_tiny
from tests.unit.dspark.served import Scripted, scripted_engine
from tests.unit.engine.test_updates import Sink

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = {
    "gemma3": ("gemma3_text", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 8, "num_local_experts": 6, "num_experts_per_tok": 2}),
}
LEAST = 24
"""The fewest window tokens with which a sequence can run: twice a window's pages and one, of four tokens."""


@pytest.fixture(scope="module", params=list(KINDS))
def folder(request, tmp_path_factory):
    kind, overrides = KINDS[request.param]
    return save_tiny(tmp_path_factory.mktemp(request.param), seed=4, kind=kind, **overrides)


@pytest.fixture(scope="module")
def masks(folder):
    """Windows as masks over all pages, nothing cached: what everything is compared with."""
    return make_engine(folder, window_tokens=0, prefix_cache=False, loop="serial")


def serve(engine, ids, new: int = 3):
    (group,) = engine.generate([ask("g", ids, max_new=new)])
    return group


def assert_same(group, masks, ids, new: int = 3) -> None:
    for a, b in zip(group.samples, serve(masks, ids, new).samples, strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE)


def held(engine, state: PageState) -> int:
    return engine._parts.pages.windows.allocator.count(state)


@pytest.mark.usefixtures("both_loops")
def test_cold_equals_warm_wherever_prompts_part(folder, masks):
    """Branches on both sides of pages and inside windows of one long prompt: each comes twice, and the second
    time all its whole pages are found. Then all windows go, which only costs the hit, and come back."""
    engine = make_engine(folder, prefill_tokens=9, window_tokens=160)
    base = prompt(29)
    serve(engine, base)
    for depth in (3, 4, 5, 8, 13, 24):
        ids = np.concatenate([base[:depth], prompt(7, start=100 + depth)])
        first, again = serve(engine, ids), serve(engine, ids)
        assert first.hit.structural == depth // 4 * 4 and again.hit.usable == (len(ids) - 1) // 4 * 4
        assert_same(first, masks, ids)
        assert_same(again, masks, ids)
    assert engine.counters.hit_tokens > 0
    assert engine._parts.cache.evict(1000, "swa") > 0 and held(engine, PageState.TREE) == 0
    for usable in (0, 28):
        group = serve(engine, base)
        assert (group.hit.structural, group.hit.usable) == (28, usable)
        assert group.hit.limited_by == ("" if usable else "swa")
        assert_same(group, masks, base)
    engine.check()


def test_a_long_sequence_holds_the_pages_of_windows(folder, masks):
    """In the smallest pool there may be, 96 tokens long: what the windowed layers keep does not grow."""
    engine = make_engine(folder, prefill_tokens=32, window_tokens=LEAST, lookahead=2, kv_tokens=512, loop="overlapped")
    sink, ids, most = Sink(), prompt(60), 0
    engine.add_group(ask("g", ids, max_new=36), sink)
    while sink.group is None:
        assert engine.step()
        most = max(most, held(engine, PageState.PRIVATE))
        assert held(engine, PageState.PRIVATE) + held(engine, PageState.TREE) <= LEAST // 4
    assert most <= 4, "the window's two pages, that which is written and one ahead"
    assert_same(sink.group, masks, ids, 36)
    engine.check()
    pool, plain = engine._parts.pages.pool, masks._parts.pages.pool
    layers = sum(pool.windowed(layer) for layer in range(pool.num_layers))
    assert pool.bytes == pool.token_bytes // pool.num_layers * (layers * (LEAST + 4) + (pool.num_layers - layers) * 516)
    assert plain.bytes == plain.num_pages * 4 * plain.token_bytes


def test_turns_forks_and_retractions_in_a_small_pool(folder, masks):
    """Groups in a window pool for a third of them: somebody is retracted and resumes, answers become prompts."""
    engine = make_engine(folder, prefill_tokens=16, window_tokens=52, kv_tokens=256, max_running=8, loop="overlapped")
    prompts = [prompt(5 + 4 * i, start=10 + 30 * i) for i in range(4)]
    groups = engine.generate([ask(f"g{i}", ids, n=2, max_new=13) for i, ids in enumerate(prompts)])
    assert engine.counters.retractions > 0
    for ids, group in zip(prompts, groups, strict=True):
        expected = serve(masks, ids, 13).samples[0]
        for sample in group.samples:
            assert sample.ids.tolist() == expected.ids.tolist()
            np.testing.assert_allclose(sample.logprobs, expected.logprobs, atol=TOLERANCE)
    turn = np.concatenate([prompts[-1], groups[-1].samples[0].ids, prompt(5, start=400)])
    following = serve(engine, turn)
    assert following.hit.usable == (len(prompts[-1]) + 12) // 4 * 4
    assert_sample_is_reference(folder, turn, following.samples[0], 3)
    engine.check()
    engine.release_memory(["kv"])
    engine.resume_memory(["kv"])
    assert_same(serve(engine, turn), masks, turn)
    engine.flush()
    windows = engine._parts.pages.windows.allocator
    assert windows.num_free == windows.num_pages


class Script:
    """The texts of requests that are to come, by prompt: what a drafter says that is right as often as it is told."""

    def __init__(self, masks, requests: list[tuple[np.ndarray, int]]) -> None:
        asked = [ask(f"r{number}", ids, max_new=new) for number, (ids, new) in enumerate(requests)]
        answers = [group.samples[0].ids.tolist() for group in masks.generate(asked)]
        self.texts = [[*ids.tolist(), *answer] for (ids, _), answer in zip(requests, answers, strict=True)]

    def __call__(self, tokens: list[int], count: int) -> list[int]:
        said = next((text for text in self.texts if text[: len(tokens)] == tokens), [])[len(tokens) :]
        return (said + [0] * count)[:count]


@pytest.mark.parametrize("requests", [24, pytest.param(300, marks=pytest.mark.slow)])
def test_case_a4_no_page_is_lost_with_speculation(folder, masks, requests):
    """Half share a prefix, a tenth is aborted midway, drafts are kept and refused, and the pools are always full."""
    shuffle, asked = random.Random(1), []
    for number in range(requests):
        length, own = shuffle.randint(5, 40), prompt(40, start=shuffle.randrange(10, 400))
        ids = np.concatenate([prompt(12), own])[: max(13, length)] if number % 2 else own[:length]
        asked.append((ids, shuffle.randint(3, 20)))
    script = Script(masks, asked)
    drafter = Scripted(script, lambda slot, number: (number + slot) % 5)
    engine = scripted_engine(folder, drafter, kv_tokens=256, window_tokens=64, max_running=4, prefill_tokens=16)
    pages, sinks, aborted = engine._parts.pages, [], set()

    def step() -> None:
        assert engine.step()
        seen = dataclasses.asdict(engine.gauges())
        for kind in ("pages", "window_pages"):
            assert sum(seen[f"{kind}_{state}"] for state in ("free", "tree", "private")) == seen[f"{kind}_total"]

    for number, (ids, new) in enumerate(asked):
        sinks.append(Sink())
        engine.add_group(ask(f"r{number}", ids, max_new=new), sinks[-1])
        for _ in range(shuffle.randrange(5)):
            if engine.has_work:
                step()
        if number % 10 == 3:
            aborted.add(number)
            engine.abort([f"r{number}"])
        engine.check()
    while engine.has_work:
        step()
    engine.check()
    for number, (sink, text) in enumerate(zip(sinks, script.texts, strict=True)):
        answer, (sample,) = text[len(asked[number][0]) :], sink.group.samples
        assert sample.ids.tolist() == (answer[: len(sample.ids)] if number in aborted else answer)
    assert engine.counters.samples_failed == 0 and engine.draft_report().total("accepted") > 0
    engine.flush()
    for allocator in (pages.allocator, pages.windows.allocator):
        assert allocator.num_free == allocator.num_pages


def test_too_few_window_tokens_are_refused(folder):
    with pytest.raises(InvalidRequest, match=f"at least {LEAST}"):
        make_engine(folder, window_tokens=LEAST - 4)


def test_a_window_of_the_token_itself_needs_no_pages_of_its_own(tmp_path):
    shape = KINDS["gemma3"][1] | {"sliding_window": 1}
    folder = save_tiny(tmp_path, seed=4, kind="gemma3_text", **shape)
    engine = make_engine(folder, prefill_tokens=5)
    for _ in range(2):
        assert_sample_is_reference(folder, prompt(9), serve(engine, prompt(9)).samples[0], 3)
    assert engine._parts.pages.windows is None
