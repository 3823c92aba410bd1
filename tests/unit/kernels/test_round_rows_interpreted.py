"""Both ends of a round in Triton's interpreter against their references."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.dspark.planner import spend
from engine.kernels.round_commit import HEAD, Drafted, Judged, commit_rounds, commit_rounds_reference, record_width
from engine.kernels.round_rows import (
    BlockRows,
    RoundLimits,
    VerifyRows,
    open_rows,
    pack_rows,
    pack_rows_reference,
    windows_reference,
)
from engine.kernels.round_spend import spend_rows
from engine.kernels.sample_columns import SampleOut
from tests.unit.kernels.test_decode_step_interpreted import COLUMNS, FULL, PAGE, make_table

SLOTS = torch.tensor([4, -1, 0, 5, 2, 1, 3], dtype=torch.int32)
ROWS, DRAFTS, VERIFY = len(SLOTS), 4, 24
PAGES = torch.arange(1, 1 + ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)


def opened(block: int, draft_context: int = 99):
    limits = RoundLimits(14, draft_context, PAGE, block, 511 if block else 0)
    most = torch.tensor([4, 4, 2, 4, 4, 3, 4], dtype=torch.int32)
    room = torch.tensor([FULL, FULL, FULL, FULL, 8, FULL, FULL], dtype=torch.int32)
    table = make_table(torch.device("cpu"))
    window = torch.empty(ROWS, dtype=torch.int32)
    ids, anchors = torch.empty(ROWS, dtype=torch.int64), torch.empty(ROWS, dtype=torch.int64)
    rows = BlockRows.empty(ROWS, block, torch.device("cpu")) if block else None
    open_rows(table, SLOTS, most, room, PAGES, limits, window, ids, anchors, rows)
    assert window.tolist() == windows_reference(table, SLOTS, most, room, limits).tolist()
    return table, window, ids, anchors, rows


def test_rows_stand_where_the_table_says():
    _, window, ids, anchors, rows = opened(block=3, draft_context=11)
    # Padding and what has finished are idle; a window ends with the length, the pages and the contexts.
    assert window.tolist() == [4, -1, 2, -1, 4, 0, 2] and rows is not None
    assert ids.tolist() == [54, -1, 50, -1, 52, 51, 53] and anchors.tolist() == [7, 0, 0, 0, 3, 9, 4]
    drafting = (window > 0).tolist()
    for b, drafts in enumerate(drafting):
        part = slice(3 * b, 3 * b + 3)
        if not drafts:
            assert rows.write_slots_T[part].tolist() == [-1] * 3 and rows.seq_lens_B[b] == 0
            assert rows.slots_B[b] == -1
            continue
        positions = [int(anchors[b]) + k for k in range(3)]
        assert rows.slots_B[b] == SLOTS[b] and rows.drawn_KB[:, b].tolist() == [p + 1 for p in positions]
        assert rows.ids_T[part].tolist() == [int(ids[b]), 511, 511] and rows.positions_T[part].tolist() == positions
        assert rows.write_slots_T[part].tolist() == [int(PAGES[b, p // PAGE]) * PAGE + p % PAGE for p in positions]
        assert rows.seq_lens_B[b] == anchors[b] + 3
    assert opened(block=0)[1].tolist() == [4, -1, 2, -1, 4, 3, 2]


def packed():
    table, window, ids, anchors, _ = opened(block=0)
    lens = torch.minimum(window.clamp(min=0), torch.tensor([4, 4, 1, 4, 0, 3, 2], dtype=torch.int32))
    drafts = torch.randint(0, 500, (ROWS, DRAFTS), generator=torch.Generator().manual_seed(1))
    rows = VerifyRows.empty(VERIFY, ROWS, torch.device("cpu"))
    for field in dataclasses.fields(rows):
        getattr(rows, field.name).fill_(77)
    pack_rows(SLOTS, window, lens, ids, anchors, drafts, PAGES, PAGE, rows)
    expected = pack_rows_reference(SLOTS, window, lens, ids, anchors, drafts, PAGES, PAGE, VERIFY)
    return table, window, lens, drafts, rows, expected


def test_verify_rows_are_packed_in_front():
    *_, rows, expected = packed()
    for field in dataclasses.fields(rows):
        assert getattr(rows, field.name).tolist() == getattr(expected, field.name).tolist(), field.name
    assert 0 < int(rows.starts_B1[-1]) < VERIFY


def test_tokens_are_taken_up_to_what_ends_a_row():
    """Under both rules: acceptance, the bound on what is kept, a stop among accepted drafts, a length, bad
    logits; the table and the records equal the reference's."""
    for judging in (False, True):
        table, window, _lens, drafts, rows, _ = packed()
        other = packed()[0]
        drawn = SampleOut.empty(VERIFY, "cpu", entropy=True)
        noise = torch.Generator().manual_seed(2)
        for column in (drawn.raw_B, drawn.temperature_B, drawn.processed_B, drawn.entropy_B):
            column.copy_(torch.randn(VERIFY, generator=noise))
        drawn.ids_B.fill_(3)
        starts = rows.starts_B1.tolist()
        right = [4, 0, 1, 0, 0, 2, 2]  # drafts that the target agrees with
        for b, count in enumerate(right):
            if window[b] >= 0:
                drawn.ids_B[starts[b] : starts[b] + count] = drafts[b, :count]
        table.stop_ids_SK[4, 0] = other.stop_ids_SK[4, 0] = int(drafts[0, 2])  # slot 4 stops at its third draft
        drawn.bad_B[starts[5] + 1] = 1  # slot 1 has bad logits after one draft
        keep = torch.tensor([4, 4, 0, 4, 4, 4, 4], dtype=torch.int32)
        log_q = torch.randn(ROWS, DRAFTS, generator=noise)
        drafted = Drafted(drafts, window, keep, log_q, log_q.exp(), log_q)
        judged = Judged(torch.tensor(right, dtype=torch.int32), torch.rand(VERIFY)) if judging else None
        record = torch.empty(ROWS, record_width(DRAFTS), dtype=torch.int32)
        commit_rounds(table, rows, drafted, drawn, record, judged)
        expected = commit_rounds_reference(other, rows, drafted, drawn, judged)
        assert record[:, :HEAD].tolist() == expected.tolist()
        for name in ("last_token_S", "computed_S", "new_S", "finished_S", "ring_ids_SW", "ring_logprobs_SW"):
            assert torch.equal(getattr(table, name), getattr(other, name)), name
        assert torch.equal(table.columns.values_CSW, other.columns.values_CSW)
        assert record[0, 1:HEAD].tolist() == [4, 4, 4, 3] and table.finished_S[4] == 1
        assert record[5, 4] == 1 and table.finished_S[1] == 2 and record[2, 4] == 1
        parts = record[:, HEAD:].view(ROWS, -1, DRAFTS)
        assert torch.equal(parts[:, 0].long(), drafts) and torch.equal(parts[:, 4].view(torch.float32), log_q)
        chances = parts[:, 3].contiguous().view(torch.float32)
        assert chances.isnan().all() != judging


@pytest.mark.parametrize(
    ("rows", "drafts"), [(5, 3), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 1), (9, 7)))]
)
def test_the_budget_goes_where_the_reference_spends_it(rows, drafts):
    """Over budgets from none to all, with ties, rows that are idle, forced drafts and survivals that are no
    numbers."""
    noise = torch.Generator().manual_seed(rows)
    for number in range(4):
        survival = torch.rand(rows, drafts, generator=noise)
        if number % 2:
            survival = (survival * 3).round() / 3
            survival[0, 0] = float("nan")
        window = torch.randint(-1, drafts + 1, (rows,), generator=noise, dtype=torch.int32)
        least = torch.randint(0, 3, (rows,), generator=noise, dtype=torch.int32)
        for budget in (0, 1, rows, rows * drafts // 2, rows * drafts + 3):
            out = torch.empty(rows, dtype=torch.int32)
            spend_rows(survival, window, least, torch.tensor([budget], dtype=torch.int32), out)
            most = window.clamp(min=0)
            assert out.tolist() == spend(survival, torch.minimum(least, most), most, budget).tolist()
