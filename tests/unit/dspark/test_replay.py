"""Speculation on models with recurrent states: what drafts do to a state, and what they must not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.layers.mixer import Mixer
from engine.layers.replay import ReplayStep, VerifyStep, replay, verify
from engine.memory.replay_ring import ReplayLayout, ReplayRings
from engine.memory.state_pool import StatePool
from engine.models import decoder
from engine.models.mamba2 import Mamba2Spec
from engine.models.mixers import GatedDeltaSpec, ShortConvSpec, StateLayout
from engine.parallel import TensorParallel
from engine.request import GroupSink
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.recurrent_models import KINDS, save_recurrent
from tests.unit.dspark.served import Scripted, scripted_engine

PAGE = 8


QUICK = ["lfm2", "nemotron_h", "qwen3_5_text"]


@pytest.fixture(scope="module", params=[k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def folder(request, tmp_path_factory):
    return save_recurrent(tmp_path_factory.mktemp(request.param), request.param)


class Quiet(GroupSink):
    wants_deltas = False

    def __init__(self):
        self.samples = []

    def on_sample(self, sample):
        self.samples.append(sample)

    def on_group(self, group):
        pass

    on_delta = on_error = on_group


def run(engine, requests) -> tuple[list, dict[str, dict[int, list[torch.Tensor]]]]:
    """The samples, and by group and length the tensors of its state, and of that kept for the cache, after every
    step that left it running."""
    sinks = [Quiet() for _ in requests]
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
    return [sink.samples[0] for sink in sinks], seen


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


MIXERS = {
    "conv": ShortConvSpec(3),
    "biased conv": ShortConvSpec(4, bias=True),
    "mamba2": Mamba2Spec(4, 6, 2, 8, 4, scales=(0.5, 2.0, 1.5, 0.7, 1.2)),
    "gated delta": GatedDeltaSpec(2, 4, 6, 5, 4),
    "gated delta by kind": GatedDeltaSpec(3, 3, 8, 7, 3, grouped=False),
}
HIDDEN = 32


def make_mixer(kind) -> tuple[Mixer, StatePool]:
    """A mixer of layer 0 with random parameters, and slots with rings for it."""
    torch.manual_seed(1)
    device, dtype = torch.device("cpu"), torch.float32
    mixer = decoder.MIXERS[type(kind)](kind, HIDDEN, 0, dtype, device, TensorParallel())
    for parameter in mixer.parameters():
        parameter.normal_(0, 0.3)
    pool = StatePool(StateLayout({0: kind.state(HIDDEN, dtype)}, kind.grid), 8, 4, device)
    pool.rings = ReplayRings(ReplayLayout({0: sum(kind.inputs(HIDDEN).values())}, dtype, 3, 5), device)
    return mixer, pool


def round_of(slots: list[int], lengths: list[int], counts: list[int]) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids_T=torch.zeros(sum(counts), dtype=torch.int64),
        positions_T=nothing,
        write_slots_T=nothing,
        query_lens=counts,
        seq_lens=[length + count for length, count in zip(lengths, counts, strict=True)],
        page_tables_BP=nothing,
        row_keys=slots,
        num_decode=0,
        logit_rows_R=nothing,
        state_slots=slots,
        provisional=len(slots),
    )


@pytest.mark.parametrize("kind", MIXERS.values(), ids=MIXERS)
def test_random_scripts_leave_outputs_and_states_of_plain_steps(kind):
    """Rows verify and keep whatever numbers of tokens; junk behind what is kept never existed."""
    mixer, pool = make_mixer(kind)
    rings, slots, script = pool.rings, [5, 2, 7], random.Random(3)
    true_BLI = torch.randn(3, 60, mixer.in_proj.weight.shape[0])
    expected = []
    with torch.inference_mode():
        for token in range(60):
            out_BO = mixer.decode(true_BLI[:, token], pool.layer(0), torch.tensor(slots))
            states = [tensor[slots].clone() for tensor in pool.layer(0)]
            expected.append((out_BO.clone(), states))
        for slot in slots:
            pool.clear(slot)
        lengths = [0, 0, 0]
        while max(lengths) < 55:
            before = [tensor.clone() for tensor in pool.layer(0)]
            counts, kept = [script.randint(1, 5) for _ in slots], []
            step = VerifyStep.of(round_of(slots, lengths, counts), rings)
            rows = []
            for row, count in enumerate(counts):
                kept.append(script.randint(0, count))
                start = lengths[row]
                junk = torch.randn(count - kept[row], true_BLI.shape[2]) * 9
                rows.append(torch.cat((true_BLI[row, start : start + kept[row]], junk)))
            outputs = verify(mixer, torch.cat(rows), pool.layer(0), step).split(counts)
            assert all(torch.equal(now, then) for now, then in zip(pool.layer(0), before, strict=True))
            for row in range(3):
                for place in range(kept[row]):
                    assert torch.equal(outputs[row][place], expected[lengths[row] + place][0][row])
            # Some states come forward in two pieces, as where one is kept on the way.
            halves = {slot: lengths[row] + kept[row] // 2 for row, slot in enumerate(slots)}
            wholes = {slot: lengths[row] + kept[row] for row, slot in enumerate(slots)}
            for targets in (halves, wholes):
                if runs := rings.advance(targets):
                    replay(mixer, pool.layer(0), ReplayStep.of(runs, rings, torch.device("cpu")))
            for row, slot in enumerate(slots):
                rings.close(slot)
                lengths[row] = wholes[slot]
                for index, tensor in enumerate(pool.layer(0)):
                    then = expected[lengths[row] - 1][1][index][row] if lengths[row] else torch.zeros_like(tensor[0])
                    assert torch.equal(tensor[slot], then), (kind, lengths)
            rings.check()


def test_rings_are_lent_and_come_back():
    layout = ReplayLayout({1: 6, 3: 10}, torch.bfloat16, rings=2, tokens=4)
    rings = ReplayRings(layout, "cpu")
    assert rings.num_bytes == layout.num_bytes == 3 * 4 * 16 * 2
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
