"""Engines of models with recurrent states that speculate: nobody can tell from what comes out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support import TOLERANCE, ask, assert_sample_is_reference, make_engine, prompt
from tests.unit.dspark.recurrent_models import KINDS, save_recurrent
from tests.unit.dspark.served import Oracle, Scripted, dspark, save_random, scripted_engine
from tests.unit.dspark.test_served import assert_alike, requests
from tests.unit.engine.lora_cases import ask_with, save_adapter
from tests.unit.engine.schedules import fuzz

PAGE = 4
SLOW = [kind for kind in KINDS if kind != "lfm2"]
DRAFTERS = {"block": dict(mode="compact", least=1), "ngram": dict()}


@pytest.fixture(scope="module", params=["lfm2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return save_recurrent(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("drafters") / "d0", num_target_layers=3)


def settings(drafter, name: str, **fields):
    return dspark("ngram" if name == "ngram" else drafter, **(DRAFTERS[name] | fields))


@pytest.mark.parametrize("name, loop", [("block", "serial"), ("ngram", "overlapped")])
def test_whatever_a_row_asks_for(folder, kind, drafter, name, loop):
    """Cold and from the cache, in one batch: groups, truncation, edits, stops, columns. Chunks of a gated delta net
    round more than others, and a low temperature shows it."""
    atol = 2e-3 if kind.startswith("qwen") else TOLERANCE
    engine = make_engine(folder, dspark=settings(drafter, name), loop=loop)
    plain = make_engine(folder)
    for _ in range(2):
        assert_alike(engine.generate(requests()), plain.generate(requests()), atol)
        engine.check()
    assert engine.counters.hit_tokens == plain.counters.hit_tokens
    assert engine.draft_counters()["draft_accepted"] > 0


def test_states_and_rings_are_given_back_with_the_keys(folder, drafter):
    """What the tree knew of them is gone, whatever lay there is nobody's, and tokens are as they were."""
    engine = make_engine(folder, dspark=settings(drafter, "block"), page_size=PAGE)
    memory, pages = engine._parts.memory, engine._parts.pages
    pool, held = pages.states.pool, memory.bytes()
    rings = pool.rings
    places = [tensor.data_ptr() for tensor in (*pool.tensors, *map(rings.layer, rings.layout.widths))]
    kv = sum(each.bytes for each in (pages.pool, pages.draft_pool))
    layout = pool.layout
    assert held["kv"] == kv + pool.num_slots * layout.slot_bytes + rings.layout.num_bytes
    beyond = prompt(pool.grid + 17)  # one that ends before the grid leaves no state to resume from
    requests = [ask("g", beyond, n=2, max_new=16, temperature=1.0, seed=3)]
    before = engine.generate(requests)
    for _ in range(2):
        assert engine.generate(requests)[0].hit.usable > 0
        _, after = engine.release_memory(["kv"])
        assert after["kv"] == pool.bytes == rings.bytes == 0
        assert pages.states.allocator.num_free == pages.states.allocator.num_pages
        assert engine.resume_memory(["kv"])[1] == held
        assert [tensor.data_ptr() for tensor in (*pool.tensors, *map(rings.layer, rings.layout.widths))] == places
        pool.fill(float("nan"))
        again = engine.generate(requests)
        assert again[0].hit.usable == 0
        assert_alike(again, before, TOLERANCE)
        engine.check()


def test_a_stop_inside_a_round_leaves_the_state_of_the_last_whole_page(folder):
    """Wherever it falls, also before a page's end that the round went past."""
    oracle = Oracle(folder)
    engine = scripted_engine(folder, Scripted(oracle, lambda slot, number: 4), page_size=PAGE)
    grid = engine._parts.pages.hit_grid
    for length in range(1, 9):
        ids = prompt(9, 30 * length)
        answer = oracle(ids.tolist(), length)
        if answer[-1] in answer[:-1]:
            continue
        (group,) = engine.generate([ask("g", ids, max_new=20, stop_ids=[answer[-1]])])
        assert group.samples[0].ids.tolist() == answer
        turn = np.concatenate([ids, answer, prompt(3, 400)]).astype(np.uint32)
        (following,) = engine.generate([ask("h", turn, max_new=2)])
        assert following.hit.usable == (9 + length - 1) // grid * grid
        assert_sample_is_reference(folder, turn, following.samples[0], 2)
        engine.check()


def test_forks_and_retraction(folder, drafter):
    """A pool too small for all: samples leave in the middle of drafting, and find their states again."""
    engine = make_engine(folder, kv_tokens=64, prefill_tokens=16, dspark=settings(drafter, "block"))
    prompts = [prompt(5 + 4 * i, start=10 + 30 * i) for i in range(4)]
    groups = engine.generate([ask(f"g{i}", ids, n=2, max_new=14) for i, ids in enumerate(prompts)])
    assert engine.counters.retractions > 0 < engine.draft_counters()["draft_verified"]
    for ids, group in zip(prompts, groups, strict=True):
        for sample in group.samples:
            assert_sample_is_reference(folder, ids, sample, 14)
    engine.check()


def test_step_times_are_measured_with_drafts(folder, drafter):
    engine = make_engine(folder, max_running=4, dspark=settings(drafter, "block", sweep_seconds=0.3))
    assert engine._parts.speculation.cost.observed > 0  # a busy machine measures few
    engine.check()


@pytest.mark.slow
def test_every_hit_depth(folder, kind, drafter):
    """Depths on both sides of pages, asked twice: cold and warm say what the model says."""
    oracle, atol = Oracle(folder), 2e-3 if kind.startswith("qwen") else TOLERANCE
    plain = make_engine(folder, prefix_cache=False)
    for name, depth in itertools.product(DRAFTERS, (3, 4, 5, 8, 12, 17)):
        engine = make_engine(folder, prefill_tokens=7, dspark=settings(drafter, name))
        engine.generate([ask("warm", prompt(depth), max_new=1)])
        for n in (9, 9, 16, 16, 21, 21):
            (group,), (other,) = (each.generate([ask("g", prompt(n), max_new=9)]) for each in (engine, plain))
            assert group.samples[0].ids.tolist() == oracle(prompt(n).tolist(), 9)
            np.testing.assert_allclose(group.samples[0].logprobs, other.samples[0].logprobs, atol=atol)
        assert engine.counters.hit_tokens > 0 or engine._parts.pages.hit_grid > 21
        engine.check()


def test_random_schedules(folder, kind, drafter, tmp_path):
    """Aborts, pauses, updates of three kinds and a pool too small, with every token computed again."""
    other = save_recurrent(tmp_path, kind, seed=5)
    tally = fuzz([folder, other], range(60, 61), "serial", dspark=settings(drafter, "block"))
    assert tally.samples > 10


@pytest.mark.slow
def test_rows_of_several_policies(folder, kind, drafter, tmp_path):
    """Rings hold what the adapted product put out, so that kept drafts are each policy's own."""
    targets = ["in_proj_qkv", "in_proj_b", "in_proj_qkvz", "in_proj"]
    adapters = {
        name: save_adapter(folder, tmp_path / name, seed, target_modules=targets) for seed, name in enumerate("ab")
    }
    engines = [make_engine(folder, dspark=dspark(each)) for each in ("none", drafter)]
    loop, outputs = [5, 6, 7, 8] * 4, []
    asked = [ask_with(name, str(i), loop[i:], n=2, max_new=24) for i, name in enumerate([None, "a", "b", "a"])]
    for engine in engines:
        for name, path in adapters.items():
            engine.adapters.register_folder(name, path)
        outputs.append(engine.generate(asked) + engine.generate(asked))
        engine.check()
    assert_alike(*outputs, 2e-3 if kind.startswith("qwen") else TOLERANCE)
    assert len({tuple(group.samples[0].ids[:4]) for group in outputs[0]}) > 2
    assert engines[1].draft_counters()["draft_verified"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", list(DRAFTERS))
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_many_random_schedules(folder, kind, drafter, tmp_path, name, loop):
    other = save_recurrent(tmp_path, kind, seed=5)
    count = 100 if kind == "lfm2" else 20
    atol = 2e-3 if kind.startswith("qwen") else TOLERANCE
    drafting = settings(drafter, name, probe_every=3)
    tally = fuzz([folder, other], range(7000, 7000 + count), loop, atol=atol, dspark=drafting)
    assert tally.schedules == count and tally.samples > 10 * count
