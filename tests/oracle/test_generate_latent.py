"""Models that choose the tokens they attend to, served: whatever the cache and the schedule do, tokens are
transformers'. Ties at the cut are met with few index heads, and pages end before, at and behind it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.dspark.config import DSparkConfig
from engine.errors import Corrupt
from engine.memory.allocator import PageState
from tests.oracle.latent_models import correct_gates, index, shape
from tests.oracle.ties import stable_ties  # noqa: F401
from tests.support import (
    TOLERANCE,
    VOCAB,
    ask,
    assert_sample_is_reference,
    make_engine,
    prompt,
    reference_greedy,
    reference_logprobs,
    save_tiny,
    update,
)
from tests.unit.dspark.served import Oracle, Scripted, scripted_engine, timeless
from tests.unit.engine.lora_cases import ask_with, greedy_of, save_adapter
from tests.unit.engine.schedules import fuzz

pytestmark = pytest.mark.usefixtures("stable_ties")
KINDS = {"v32-4": {"num_hidden_layers": 2}, "glm-16": {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}}
TOP = 8


def save(folder, kind: str, seed: int, **overrides):
    model_type, fields = shape(kind)
    heads = fields.get("index_n_heads")
    fields = fields | (index(heads, TOP) if heads else {}) | KINDS.get(kind, {}) | overrides
    save_tiny(folder, seed=seed, kind=model_type, **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    correct_gates(model)
    model.save_pretrained(folder)
    return folder


def under(kind: str, loop: str, quick: bool):
    return pytest.param(kind, loop, marks=() if quick else pytest.mark.slow)


RUNS = [under("v32-4", "overlapped", True), under("glm-16", "serial", True)]
RUNS += [under("v32-4", "serial", False), under("glm-16", "overlapped", False)]
"""Each kind under one loop; the other two pairs in the slow run."""


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    return {kind: save(tmp_path_factory.mktemp(kind), kind, seed=4) for kind in KINDS}


@pytest.fixture(scope="session")
def t_dsa(tmp_path_factory):
    return save(tmp_path_factory.mktemp("t-dsa"), "v32-4", seed=3)


def test_case_a8_contexts_up_to_and_beyond_what_is_chosen(t_dsa, tmp_path):
    dense = make_engine(save(tmp_path, "v32-4", seed=3, index_topk=VOCAB))
    for n in (7, 8, 9, 40):
        for warm, chunk in ((False, 64), (True, 64), (False, 5)):
            engine = make_engine(t_dsa, prefill_tokens=chunk, page_size=2)
            if warm:
                engine.generate([ask("warm", prompt(6), max_new=1)])
            (group,) = engine.generate([ask("g", prompt(n), max_new=12)])
            assert_sample_is_reference(t_dsa, prompt(n), group.samples[0], 12)
            assert group.hit.usable == (6 if warm else 0)
            engine.check()
        (whole,) = dense.generate([ask("g", prompt(n), max_new=1)])
        same = abs(float(whole.samples[0].logprobs[0]) - float(group.samples[0].logprobs[0])) < TOLERANCE
        assert same == (n <= TOP), "what is not chosen matters"


@pytest.mark.parametrize(("kind", "loop"), RUNS)
def test_every_hit_depth(folders, kind, loop):
    """Depths on both sides of pages and of the choice's size, cold and warm."""
    folder, lengths = folders[kind], (8, 13, 21)
    reference = {n: reference_greedy(folder, prompt(n), 3) for n in lengths}
    logprobs = {n: reference_logprobs(folder, [*prompt(n), *reference[n]])[n:] for n in lengths}
    for depth in (3, 4, 8, 9, 17):
        engine = make_engine(folder, prefill_tokens=7, loop=loop)
        engine.generate([ask("warm", prompt(depth), max_new=1)])
        for n in lengths:
            (group,) = engine.generate([ask("g", prompt(n), max_new=3)])
            assert group.samples[0].ids.tolist() == reference[n]
            np.testing.assert_allclose(group.samples[0].logprobs, logprobs[n], atol=TOLERANCE)
            assert group.hit.usable >= min(depth, n - 1) // 4 * 4
        engine.check()


@pytest.mark.parametrize(("kind", "loop"), [RUNS[0], under("glm-16", "serial", False)])
def test_forks_retraction_and_eviction(folders, kind, loop):
    """A pool too small for all: groups fork, some samples are retracted, prefixes leave, and everything is asked
    again over what pages of others left behind."""
    engine = make_engine(folders[kind], kv_tokens=64, prefill_tokens=16, loop=loop)
    prompts = [prompt(5 + 4 * i, start=10 + 30 * i) for i in range(4)]
    expected = [reference_greedy(folders[kind], ids, 14) for ids in prompts]
    for _ in range(2):
        groups = engine.generate([ask(f"g{i}", ids, n=2, max_new=14) for i, ids in enumerate(prompts)])
        assert [[sample.ids.tolist() for sample in group.samples] for group in groups] == [
            [ids] * 2 for ids in expected
        ]
        engine.check()
    assert engine.counters.retractions > 0


@pytest.mark.parametrize("kind", ["v32-4", pytest.param("glm-16", marks=pytest.mark.slow)])
def test_drafts_that_are_refused_leave_nothing(folders, kind):
    """Index keys of refused drafts lie in pages that go on and are published: the next turn hits them."""
    oracle = Oracle(folders[kind])
    drafter = Scripted(oracle, lambda slot, number: (4, 2, 0, 1)[number % 4])
    engine = scripted_engine(folders[kind], drafter, canary=1)
    timeless(engine)
    (first,) = engine.generate([ask("g", prompt(7), max_new=16)])
    assert_sample_is_reference(folders[kind], prompt(7), first.samples[0], 16)
    drafts = engine.draft_counters()
    assert drafts["draft_verified"] > drafts["draft_accepted"] > 4
    longer = np.concatenate([prompt(7), first.samples[0].ids, prompt(3, start=300)]).astype(np.uint32)
    (second,) = engine.generate([ask("g2", longer, max_new=4)])
    assert second.hit.usable == 20
    assert_sample_is_reference(folders[kind], longer, second.samples[0], 4)
    engine.check()


def test_a_stray_write_to_a_cached_index_key_is_found(folders):
    engine = make_engine(folders["glm-16"], canary=1)
    engine.generate([ask("g", prompt(13), max_new=4)])
    pages = engine._parts.pages
    held = int(np.flatnonzero(pages.allocator.states == int(PageState.TREE))[0])
    pages.pool.index_keys(0)[held * 4 + 3, 5] += 0.5
    assert engine._parts.canary is not None
    with pytest.raises(Corrupt, match=f"full {held}"):
        engine._parts.canary.look()


@pytest.mark.parametrize(("kind", "loop"), [under("v32-4", "serial", False), RUNS[1]])
def test_updates(folders, tmp_path, kind, loop):
    """New weights make old keys stale: no hit crosses versions."""
    other = save(tmp_path, kind, seed=5)
    engine = make_engine(folders[kind], loop=loop)
    for version, folder in enumerate((folders[kind], other)):
        if version:
            update(engine, folder, version)
        (group,) = engine.generate([ask("g", prompt(13), max_new=4)])
        assert group.hit.usable == 0
        assert_sample_is_reference(folder, prompt(13), group.samples[0], 4)
    engine.check()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_with_forks_drafts_and_updates(folders, tmp_path, kind, loop):
    """Two policies and the base side by side, drafted by n-grams: each is what peft makes of it, before an
    update of the base and after."""
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj"]
    adapters = [save_adapter(folders[kind], tmp_path / f"a{i}", i, target_modules=targets) for i in range(2)]
    other = save(tmp_path / "other", kind, seed=5)
    engine = make_engine(folders[kind], loop=loop, dspark=DSparkConfig(drafter="ngram", mode="static", sweep_seconds=0))
    timeless(engine)
    for name, adapter in zip("ab", adapters, strict=True):
        engine.adapters.register_folder(name, adapter)
    ids = np.tile(prompt(6), 3)
    for version, folder in enumerate((folders[kind], other)):
        if version:
            update(engine, folder, version)
        for _ in range(2):
            groups = engine.generate([ask_with(name, f"g{name}", ids, n=2, max_new=8) for name in ("a", None, "b")])
            expected = [greedy_of(folder, adapter, ids, 8) for adapter in adapters]
            expected.insert(1, reference_greedy(folder, ids, 8))
            assert [[s.ids.tolist() for s in group.samples] for group in groups] == [[each] * 2 for each in expected]
    engine.check()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_random_schedules(folders, tmp_path, kind, loop):
    """Aborts, pauses, updates of three kinds and a pool too small, with every token computed again."""
    tally = fuzz([folders[kind], save(tmp_path, kind, seed=5)], range(60), loop)
    assert tally.schedules == 60 and tally.samples > 500
