"""Rows that edit logits, want further columns or have very many stops: the overlapped loop keeps them and
gives the serial loop's results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import Want
from engine.memory.device_columns import DeviceColumns
from engine.memory.device_edits import DeviceEdits
from engine.memory.lent_rows import FIRST_ROWS, LentRows
from engine.sampling.params import RowSampling
from engine.types import SampleResume, SamplingParams
from tests.support import VOCAB, ask, assert_whole, make_engine, prompt

MANY = list(range(0, VOCAB, 9))
EVERY = Want(logprobs="processed", extra_logprobs=["raw", "temperature"], top_logprobs=5, entropy=True)
FEW = Want(logprobs="temperature", top_logprobs=2)


def work():
    """A mixture whose members come and go at different times, plain rows among them."""
    yield ask("plain", prompt(7), n=3, max_new=17, temperature=1.0, seed=1)
    yield ask("repeat", prompt(9), n=4, max_new=20, temperature=0.8, repetition_penalty=1.4, seed=2, want=EVERY)
    yield ask("often", prompt(5), max_new=24, frequency_penalty=0.7, presence_penalty=0.3, want=FEW)
    bias = {5: 6.0, 17: -float("inf"), 400: 5.5}
    yield ask("bias", prompt(12, 40), n=2, max_new=9, temperature=1.2, top_p=0.7, logit_bias=bias, seed=3, want=EVERY)
    yield ask("many stops", prompt(6, 90), n=5, max_new=30, temperature=1.0, stop_ids=MANY, seed=4)
    yield ask("trimmed", prompt(6, 91), n=3, max_new=30, temperature=1.0, stop_ids=MANY, seed=5, keep_stop=False)
    yield ask("at least", prompt(4), n=4, max_new=14, min_new=6, temperature=1.0, stop_ids=MANY, seed=6)
    yield ask("columns", prompt(4, 77), n=2, max_new=11, temperature=0.6, top_k=9, min_p=0.01, seed=7, want=EVERY)
    yield ask("last", prompt(30), max_new=5, want=Want(logprobs="raw", top_logprobs=VOCAB, entropy=True))


def assert_equal(groups, others):
    for group, other in zip(groups, others, strict=True):
        for a, b in zip(group.samples, other.samples, strict=True):
            assert_whole(a)
            name = f"{group.group_id}/{a.index}"
            assert a.ids.tolist() == b.ids.tolist(), name
            assert (a.finish, a.matched, a.spans) == (b.finish, b.matched, b.spans), name
            assert a.extra_logprobs.keys() == b.extra_logprobs.keys()
            columns = [(a.logprobs, b.logprobs), (a.entropy, b.entropy), (a.top_logprobs, b.top_logprobs)]
            columns += [(a.extra_logprobs[key], b.extra_logprobs[key]) for key in a.extra_logprobs]
            for one, two in columns:
                assert (one is None) == (two is None)
                if one is not None:
                    np.testing.assert_allclose(one, two, atol=1e-4, err_msg=name)
            if a.top_ids is not None:
                # Alternatives that fp32 cannot tell apart may change places.
                ranked = np.sort(a.top_ids, -1) == np.sort(b.top_ids, -1)
                assert ranked.mean() > 0.99, name


@pytest.mark.parametrize("burst", [1, 5])
@pytest.mark.parametrize("kv_tokens", [4096, 160])
def test_overlapped_equals_serial(t_full, burst, kv_tokens):
    """With room for all, and with retractions."""
    fields = dict(kv_tokens=kv_tokens, max_running=12, lookahead=3, prefill_tokens=16)
    serial = make_engine(t_full, loop="serial", **fields)
    overlapped = make_engine(t_full, loop="overlapped", burst=burst, **fields)
    expected = serial.generate(list(work()))
    assert_equal(overlapped.generate(list(work())), expected)
    assert_equal(overlapped.generate(list(work())), expected)
    overlapped.check()
    if kv_tokens < 1000:
        assert overlapped.counters.retractions > 0
    stops = [sample for sample in expected[4].samples if sample.finish == "stop"]
    assert stops and all(sample.ids[-1] in MANY for sample in stops)
    assert all(not set(sample.ids[:6].tolist()) & set(MANY) for sample in expected[6].samples)


def test_aborted_and_resumed_rows_go_on_as_undisturbed(t_full):
    (whole,) = make_engine(t_full, loop="serial").generate([list(work())[1]])
    engine = make_engine(t_full, loop="overlapped", burst=2)
    half = [sample.ids[:8] for sample in whole.samples]
    resume = [SampleResume(index=index, ids=ids) for index, ids in enumerate(half)]
    request = ask(
        "repeat", prompt(9), n=4, max_new=20, temperature=0.8, repetition_penalty=1.4, seed=2, want=EVERY, resume=resume
    )
    (rest,) = engine.generate([request])
    for sample, other in zip(rest.samples, whole.samples, strict=True):
        assert sample.ids.tolist() == other.ids[8:].tolist()
        np.testing.assert_allclose(sample.entropy, other.entropy[8:], atol=1e-4)


def test_rows_are_lent_shared_and_come_back():
    rows = LentRows()
    taken = [rows.take(slot, slot)[0] for slot in range(FIRST_ROWS)]
    assert sorted(taken) == list(range(FIRST_ROWS)) and rows.capacity == FIRST_ROWS
    assert rows.take(20, "bias") == (FIRST_ROWS, True) and rows.capacity == 2 * FIRST_ROWS
    assert rows.take(21, "bias") == (FIRST_ROWS, False)
    rows.give_back(20)
    assert rows.take(22, "bias") == (FIRST_ROWS, False)
    for slot in (*range(FIRST_ROWS), 21, 22, 99):
        rows.give_back(slot)
    assert rows.num_lent == 0
    assert {rows.take(slot, slot)[0] for slot in range(2 * FIRST_ROWS)} == set(range(2 * FIRST_ROWS))


def row_of(**sampling) -> RowSampling:
    return RowSampling(SamplingParams(**sampling), Want(), 1, np.array([3, 4, 4], np.uint32), (9,), (7, 7))


def test_edits_survive_growth_and_leave_with_their_slot():
    edits = DeviceEdits(64, VOCAB, 100, torch.device("cpu"))
    edits.admit([0], [row_of()])
    assert edits.generation == 0 and edits.columns.counts_CV.numel() == edits.columns.bias_MV.numel() == 0
    slots = list(range(40))
    biased = dict(logit_bias={5: 1.5}, stop_ids=[8], min_new=4, repetition_penalty=1.5)
    edits.admit(slots, [row_of(**biased)] * 40)
    columns, moves = edits.columns, edits.generation
    assert len(columns.bias_MV) == FIRST_ROWS, "equal biases share a row"
    for slot in slots:
        counts_V = columns.counts_CV[columns.count_row_S[slot]]
        assert counts_V[[3, 4, 7, 9]].tolist() == [1, 1, 5, 0]
        assert columns.bias_MV[columns.bias_row_S[slot], 5] == 1.5
        assert torch.isneginf(columns.bias_MV[columns.mask_row_S[slot]]).nonzero()[:, 0].tolist() == [8, 9]
    assert columns.min_until_S[:40].tolist() == [7] * 40
    edits.admit([0], [row_of()])
    for column in (columns.count_row_S, columns.bias_row_S, columns.mask_row_S):
        assert column[0] == -1
    assert columns.repetition_S[:2].tolist() == [1.0, 1.5]
    edits.release(slots)
    edits.admit(slots, [row_of(presence_penalty=1.0)] * 40)
    assert edits.generation == moves, "rows given back are lent again"


def test_columns_widen_without_losing_results_in_flight():
    columns = DeviceColumns(16, 4, torch.device("cpu"))
    columns.admit([0, 1], [Want(), Want(top_logprobs=3)])
    assert columns.values_CSW.numel() == 0 and columns.top_count_S[:2].tolist() == [0, 3]
    columns.top_ids_RWK[columns.top_row(1), 2, :3] = torch.tensor([7, 8, 9], dtype=torch.int32)
    columns.admit([2], [Want(top_logprobs=20, entropy=True)])
    assert columns.top_ids_RWK[columns.top_row(1), 2, :3].tolist() == [7, 8, 9]
    assert columns.top_ids_RWK.shape[2] >= 20 and columns.values_CSW.shape[1] == 16
    columns.admit([1], [Want()])
    assert columns.top_count_S[:3].tolist() == [0, 0, 20]
