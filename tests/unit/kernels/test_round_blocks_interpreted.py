"""Blocks of different lengths, in Triton's interpreter: where they stand, what is made of them, and whole rounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine.dspark.drafter import DraftRows
from engine.kernels.block_rows import pack_blocks, pack_blocks_reference
from engine.kernels.draft_notes import ConfidenceWeights, DraftNotes, note_drafts
from engine.kernels.markov_bias import markov_bias, markov_bias_reference
from engine.kernels.round_commit import HEAD
from engine.kernels.round_rows import BlockRows, RoundLimits, open_rows, windows_reference
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import save_random, timeless
from tests.unit.kernels.test_decode_step_interpreted import PAGE, make_table
from tests.unit.kernels.test_fused_ops_interpreted import close, noise, poison
from tests.unit.kernels.test_round_rows_interpreted import PAGES, ROWS, SLOTS
from tests.unit.kernels.test_rounds_interpreted import assert_same, device_engine, work


@pytest.mark.parametrize("lead", [0, 1])
def test_blocks_are_packed_in_front(lead):
    """As long as what each row was asked for, within its length, its pages and the contexts."""
    most, room = torch.tensor([4, 4, 2, 4, 4, 3, 1]), torch.tensor([16, 16, 16, 16, 8, 16, 16])
    limits, table = RoundLimits(14, 10, PAGE, 5, 511, lead, by_request=True), make_table(torch.device("cpu"))
    window, most, room = torch.empty(ROWS, dtype=torch.int32), most.int(), room.int()
    ids, anchors = torch.empty(ROWS, dtype=torch.int64), torch.empty(ROWS, dtype=torch.int64)
    open_rows(table, SLOTS, most, room, PAGES, limits, window, ids, anchors, None)
    assert window.tolist() == windows_reference(table, SLOTS, most, room, limits).tolist()
    assert window.tolist() == [3 - lead, -1, 2, -1, 4, 1 - lead, 1]
    out = BlockRows.packed(ROWS, 16, 4, torch.device("cpu"))
    for field in dataclasses.fields(out):
        getattr(out, field.name).fill_(77)
    pack_blocks(SLOTS, window, ids, anchors, PAGES, limits, out)
    expected = pack_blocks_reference(SLOTS, window, ids, anchors, PAGES, limits, 16, 4)
    for field in dataclasses.fields(out):
        assert getattr(out, field.name).tolist() == getattr(expected, field.name).tolist(), field.name
    assert int(out.starts_B1[-1]) == sum(max(0, count) + lead * (count > 0) for count in window.tolist()) < 16


def test_heads_read_packed_rows():
    """Of rows whose block is long enough; others keep what they have, and are sure of nothing."""
    packed, vocab, at = noise(5, 70), 70, torch.tensor([4, 0, -1, 2, -1], dtype=torch.int32)
    w1, w2, previous = noise(vocab, 8, seed=1), noise(vocab, 8, seed=2), torch.tensor([3, 0, 9, -1, 5])
    out = torch.full((5, vocab), 7.0)
    markov_bias(packed, previous, w1, w2, at, out)
    rows = (at >= 0).nonzero()[:, 0]
    expected = markov_bias_reference(packed[at[rows].long()], previous[rows], w1, w2)
    torch.testing.assert_close(out[rows], expected, atol=2e-5, rtol=2e-5)
    assert (out[at < 0] == 7.0).all()
    hidden, ids = noise(4, 24, seed=3), torch.ones(2, 2, dtype=torch.int64)
    at_GB = torch.tensor([[1, 3], [2, -1]], dtype=torch.int32)
    head = ConfidenceWeights(noise(1, 32, seed=4), noise(1, seed=5), w1)
    whole, some = (DraftNotes(torch.empty(2, 2).long(), poison(2, 2), None) for _ in range(2))
    spread = hidden[torch.tensor([[1, 2], [3, 0]])]
    note_drafts(spread, previous[:2], ids, noise(2, 2), head, whole)
    note_drafts(hidden, previous[:2], ids, noise(2, 2), head, some, at_GB)
    assert some.confidence_BG is not None and whole.confidence_BG is not None and some.confidence_BG[1, 1] == 0
    close(some.confidence_BG.flatten()[:3], whole.confidence_BG.flatten()[:3])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rule", "shape"),
    [("coupled", {}), ("rejection", dict(sample_from_anchor=False, markov_head_type="rnn"))],
)
def test_rounds_of_uneven_blocks(t_full, tmp_path, monkeypatch, rule, shape):
    """Drafts are those that the drafter proposes for blocks of each row's length, and coupled tokens plain ones."""
    folder = save_random(tmp_path / "d0", **shape)
    engine = device_engine(t_full, folder, mode="compact", rule=rule, probe_every=1)
    speculation, rounds = timeless(engine), engine._loop._rounds
    drafter, stepper, table = speculation.drafter, rounds._stepper, engine._loop._table
    assert speculation.by_request and stepper.draft_tiers is not None
    turns, seen = iter(range(10_000)), []

    def uneven(outlook, slots):
        asked_B = np.array([3, 1, 2, 0, 2])[(np.arange(len(outlook.most_B)) + next(turns)) % 5]
        return np.minimum(outlook.most_B, np.maximum(asked_B, [1] + [0] * (len(asked_B) - 1)))

    def check(plan, samples):
        slots, tables = torch.tensor(plan.slots), torch.from_numpy(plan.page_tables_BP.copy())
        most, room = (torch.tensor(values, dtype=torch.int32) for values in (plan.most, plan.room))
        window = windows_reference(table, slots, most, room, stepper._parts.limits).tolist()
        expected = []
        for b, count in enumerate(window):
            if count <= 0:
                expected.append(None)
                continue
            anchor = table.computed_S[slots[b : b + 1]]
            width = -(-(int(anchor) + drafter.traits.lead + count) // 4)
            pick = speculation._pick([samples[b]], anchor.tolist())
            token = table.last_token_S[slots[b : b + 1]].long()
            rows = (plan.slots[b : b + 1], token, anchor, tables[b : b + 1, :width])
            spec = drafter.model.spec
            drafter.model.spec = dataclasses.replace(spec, block=drafter.traits.lead + count)
            expected.append(drafter.propose(DraftRows(*rows, pick)))
            drafter.model.spec = spec
        result = run(plan, samples)
        record_BF = result._records[0]
        assert record_BF[:, 0].tolist() == window
        for b, proposal in enumerate(expected):
            if proposal is None:
                continue
            parts = record_BF[b, HEAD:].view(-1, speculation.max_drafts)[:, : window[b]]
            assert parts[0].tolist() == proposal.ids_BG[0].tolist()
            close(parts[1].view(torch.float32), proposal.confidence_BG[0])
            seen.append(window[b])
        return result

    monkeypatch.setattr("engine.dspark.speculation.drafted", uneven)
    run = stepper.run
    monkeypatch.setattr(stepper, "run", check)
    requests = [*work(6), ask("lone", prompt(7), max_new=5, temperature=1.0, seed=9)]
    replies = engine.generate(requests)
    if rule == "coupled":
        assert_same(replies, make_engine(t_full, page_size=4).generate(requests))
    engine.check()
    assert set(seen) == {1, 2, 3} and len(stepper._captured) > 2
    assert engine.draft_counters()["draft_verified"] > 3 and engine.counters.serial_rounds == 0
