"""Speculation on models with recurrent states: what drafts do to a state, and what they must not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.collector import Collector
from engine.memory.replay_ring import ReplayLayout, ReplayRings
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.recurrent_models import KINDS, save_recurrent
from tests.unit.dspark.replay_scripts import MIXERS, play
from tests.unit.dspark.served import Scripted, scripted_engine

PAGE = 8


QUICK = ["lfm2", "qwen3_5_text"]


@pytest.fixture(scope="module", params=[k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def folder(request, tmp_path_factory):
    return save_recurrent(tmp_path_factory.mktemp(request.param), request.param)


def run(engine, requests) -> tuple[list, dict[str, dict[int, list[torch.Tensor]]]]:
    """The samples, and by group and length the tensors of its state, and of that kept for the cache, after every
    step that left it running."""
    sinks = [Collector() for _ in requests]
    for request, sink in zip(requests, sinks, strict=True):
        engine.add_group(request, sink)
    pages = engine._parts.pages
    pool = pages.states.pool
    seen: dict[str, dict[int, list[torch.Tensor]]] = {request.group_id: {} for request in requests}
    while engine.step():
        engine.check()
        for sample in engine._scheduler.running:
            slot = int(pages.table.states_S[sample.sequence.slot])
            slots = [slot, pool.partner(slot)] if pool.tracked(slot) >= 0 else [slot]
            tensors = [tensor[slots].clone() for layer in pool.layout.layers for tensor in pool.layer(layer)]
            seen[sample.group.request.group_id][sample.sequence.computed] = tensors
    return [sink.result().samples[0] for sink in sinks], seen


def test_case_f9_states_after_every_step_are_those_of_plain_decoding(folder):
    """Bit for bit where an engine is deterministic, whether drafts are kept, rejected or not made."""
    accepted = [3, 0, None, 2, 0, None, 4, 1]
    requests = [ask(f"g{i}", prompt(9 + 5 * i, 20 * i + 5), max_new=40) for i in range(3)]
    plain = make_engine(folder, page_size=PAGE, deterministic=True)
    expected, seen_plain = run(plain, requests)
    pairs = zip(requests, expected, strict=True)
    texts = [[*request.prompt_ids.tolist(), *sample.ids.tolist()] for request, sample in pairs]

    def say(tokens: list[int], count: int) -> list[int]:
        text = next(text for text in texts if text[: len(tokens)] == tokens)
        return [*text[len(tokens) : len(tokens) + count], *[0] * count][:count]

    drafter = Scripted(say, lambda slot, number: accepted[(number + 3 * slot) % len(accepted)] or 0)
    samples, seen = run(scripted_engine(folder, drafter, page_size=PAGE, deterministic=True), requests)
    assert all(0 < sample.draft_use.accepted < sample.draft_use.verified for sample in samples)
    for sample, other in zip(samples, expected, strict=True):
        assert sample.ids.tolist() == other.ids.tolist()
        assert np.array_equal(sample.logprobs, other.logprobs)
    for group, by_length in seen.items():
        assert len(by_length) > 8
        for length, tensors in by_length.items():
            for mine, theirs in zip(tensors, seen_plain[group][length], strict=True):
                assert torch.equal(mine, theirs), (group, length)


@pytest.mark.parametrize("kind", MIXERS.values(), ids=MIXERS)
def test_random_scripts_leave_outputs_and_states_of_plain_steps(kind):
    play(kind, torch.device("cpu"))


def test_rings_are_lent_and_come_back():
    layout = ReplayLayout({1: 6, 3: 10}, torch.bfloat16, rings=2, tokens=4)
    rings = ReplayRings(layout, "cpu")
    assert rings.bytes == layout.num_bytes == 3 * 4 * 16 * 2
    assert {rings.open(9, 30, 4), rings.open(4, 7, 2)} == {1, 2} and rings.open(0, 5, 3) == 0
    with pytest.raises(AssertionError, match="waits"):
        rings.open(9, 31, 1)
    with pytest.raises(AssertionError, match="more than 2 rows"):
        rings.open(5, 1, 1)
    assert [(run.slot, run.first, run.last) for run in rings.advance({9: 32, 4: 7})] == [(9, 0, 2)]
    assert (rings.reached(9), rings.reached(4), rings.reached(5)) == (32, 7, None)
    assert [(run.slot, run.first, run.last) for run in rings.advance({9: 33})] == [(9, 2, 3)]
    for length in (32, 35):
        with pytest.raises(AssertionError, match="no token"):
            rings.advance({9: length})
    with pytest.raises(AssertionError, match="between steps"):
        rings.check()
    for slot in (9, 4, 4):
        rings.close(slot)
    rings.check()
    with pytest.raises(AssertionError, match="rings of 4"):
        rings.open(5, 1, 5)
