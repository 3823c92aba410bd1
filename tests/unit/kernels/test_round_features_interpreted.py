"""What rows of device rounds may ask for, in Triton's interpreter: adapters, alternatives, penalties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import Want
from engine.kernels.round_adapters import tile_adapters, tile_adapters_reference
from engine.kernels.round_commit import Drafted, commit_rounds, record_width
from engine.kernels.round_places import Places, find_places, places_reference
from engine.kernels.row_columns import Prefixes, empty_columns, gather_columns
from engine.kernels.sample_columns import SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.sample_reference import sample_rows_reference
from engine.memory.device_edits import DeviceEdits
from engine.sampling.params import RowSampling
from engine.types import SamplingParams
from lora.segments import Segments, Tiles, most_tiles
from tests.support import VOCAB, ask, make_engine, prompt
from tests.unit.dspark.served import save_random, timeless
from tests.unit.engine.lora_cases import ask_with, save_adapter
from tests.unit.kernels.test_round_rows_interpreted import packed
from tests.unit.kernels.test_rounds_interpreted import REPEATED, assert_same, device_engine, rejecting, work

slow = pytest.mark.slow


def test_verify_rows_are_tiled_by_adapter():
    """Rows of one adapter apart from each other, an idle one, adapters without a row, padding behind and none."""
    for adapters, windows, lens, verify, block in (
        ([2, 0, 1, 2, 3, 0, 2], [4, 1, 0, 4, -1, 2, 3], [4, 1, 0, 4, 7, 0, 3], 24, 4),
        ([5, 5, 5], [4, 4, 4], [4, 4, 3], 14, 16),
        ([0, 1], [-1, -1], [0, 0], 130, 16),
    ):
        adapters_B, window_B, lens_B = np.array(adapters), torch.tensor(windows).int(), torch.tensor(lens).int()
        segments, slots_R = tile_adapters_reference(adapters_B, window_B, lens_B, verify)
        out, expected = (
            Tiles(verify, most_tiles(verify, len({0, *adapters}), block), block, torch.device("cpu")) for _ in range(2)
        )
        expected.fill(segments)
        out._table_U.fill_(77)
        order_B = np.argsort(adapters_B, kind="stable")
        sorted_B = (torch.from_numpy(part.astype(np.int32)) for part in (order_B, adapters_B[order_B]))
        tile_adapters(*sorted_B, window_B, lens_B, verify, out)
        assert out.rows_T.tolist() == expected.rows_T.tolist()
        assert out.tiles_N3.tolist() == expected.tiles_N3.tolist()
        assert Segments.of(slots_R, with_base=True).runs == segments.runs


def rounds_of(t_full, tmp_path, requests, prepare=lambda engine: None, **fields):
    """Replies of device rounds and of plain steps, and the engine of the former, which left none to the serial loop."""
    engine = device_engine(t_full, save_random(tmp_path / "d0"), probe_every=1, **fields)
    timeless(engine)
    prepare(engine)
    replies = engine.generate(requests)
    engine.check()
    assert engine.counters.device_rounds > 2 and engine.counters.serial_rounds == 0
    assert engine.draft_counters()["draft_verified"] > 3
    plain = make_engine(t_full, page_size=4)
    prepare(plain)
    return replies, plain.generate(requests), engine


def test_tokens_that_will_be_taken_know_their_places():
    """Behind drafts that are kept, under both rules; nobody's where a draft is not, or may not be, kept."""
    _, _window, lens, drafts, rows, _ = packed()
    starts, ids, accepted = rows.starts_B1.tolist(), torch.full((len(rows.ids_R),), 3), torch.zeros(len(lens)).int()
    for b, right in enumerate([4, 0, 1, 0, 0, 2, 1]):
        ids[starts[b] : starts[b] + right] = drafts[b, :right]
        accepted[b] = right
    keep = torch.tensor([3, 4, 0, 4, 4, 4, 4], dtype=torch.int32)
    for judged in (None, accepted):
        out, expected = Places.empty(len(ids), ids.device), places_reference(rows, drafts, ids, keep, judged)
        find_places(rows, drafts, ids, keep, out, judged)
        assert out.slots_R.tolist() == expected.slots_R.tolist() and out.before_R.tolist() == expected.before_R.tolist()
        assert out.slots_R[: starts[1]].tolist() == [4, 4, 4, 4, -1] and int((out.slots_R == 3).sum()) == 2


MODES = [pytest.param(dict(mode="static"), id="static"), pytest.param(dict(mode="compact", least=1), id="compact")]


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fields", MODES)
def test_rounds_of_many_policies_equal_plain_steps(t_full, tmp_path, fields):
    """The base, an adapter of all ends and one of projections alone, the last as a group; each counted for itself."""
    options = {"ends": {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}, "linear": {"r": 9}}
    folders = {
        name: save_adapter(t_full, tmp_path / name, seed, **chosen)
        for seed, (name, chosen) in enumerate(options.items())
    }

    def register(engine):
        for name, folder in folders.items():
            engine.adapters.register_folder(name, folder)

    asked = [ask_with(None, "base", prompt(5), max_new=5), ask_with("ends", "ends", prompt(7), max_new=5)]
    asked.append(ask_with("linear", "group", prompt(9), n=2, max_new=4, temperature=1.0, seed=3))
    replies, plain, engine = rounds_of(t_full, tmp_path, asked, register, **fields)
    assert_same(replies, plain)
    for reply, rev in zip(replies, (0, 1, 1), strict=True):
        assert all({span.adapter_rev for span in sample.spans} == {rev} for sample in reply.samples)
    report = engine._parts.speculation.record.report()
    assert report.adapters == ["", "ends", "linear"]
    assert all(report.total("verified", adapter=name) > 0 for name in report.adapters)
    captured = engine._loop._rounds._stepper._captured
    assert all(launches.launches.adapters is not None for launches in captured.values())
    assert_same(engine.generate(work(3)), plain_of(t_full, work(3)))
    assert any(launches.launches.adapters is None for launches in captured.values())


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fields", MODES)
def test_alternatives_of_rounds_equal_those_of_plain_steps(t_full, tmp_path, fields):
    """Of every definition, of rows that are cut and edited, more than there are in a tile, beside rows without."""
    some, raw = Want(top_logprobs=5, entropy=True), Want(logprobs="raw", top_logprobs=VOCAB)
    asked = [
        ask("greedy", prompt(9), max_new=5, want=Want(logprobs="temperature", top_logprobs=2)),
        ask("cut", prompt(3, 40), n=2, max_new=5, temperature=0.7, top_k=4, seed=4, logit_bias={7: 3.0}, want=some),
        ask("raw", prompt(6), max_new=4, temperature=1.2, seed=2, want=raw),
        ask("plain", prompt(5), max_new=5),
    ]
    replies, plain, _ = rounds_of(t_full, tmp_path, asked, **fields)
    assert_same(replies, plain)
    assert (replies[1].samples[0].top_logprobs == -np.inf).any(), "fewer are left than were asked for"


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fields", MODES)
def test_penalties_of_rounds_equal_those_of_plain_steps(t_full, tmp_path, fields):
    """Alone and with everything else that edits, beside rows without; the second turn's rows begin with new counts."""
    again = dict(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4)
    asked = [
        ask("often", REPEATED, max_new=7, frequency_penalty=1.5, logit_bias={7: 40.0}),
        ask("cut", prompt(5), n=2, max_new=5, temperature=0.8, top_p=0.9, seed=4, **again),
        ask("edited", REPEATED, max_new=5, seed=5, logit_bias={7: 9.0}, min_new=3, stop_ids=[7], **again),
        ask("plain", prompt(6), max_new=5, temperature=1.0, seed=2),
    ]
    replies, plain, engine = rounds_of(t_full, tmp_path, asked, **fields)
    assert_same(replies, plain)
    assert_same(engine.generate(asked[:2]), plain[:2])


@slow
@pytest.mark.timeout(600)
def test_rejection_under_penalties_is_that_of_the_serial_loop(t_full, tmp_path):
    """Drafts are drawn, judged and replaced under penalties that go along the drafts."""

    def requests():
        again = dict(repetition_penalty=1.7, frequency_penalty=0.9, presence_penalty=0.4)
        return [
            ask("again", REPEATED, max_new=6, temperature=0.6, top_k=40, seed=8, want=Want(top_logprobs=3), **again),
            ask("plain", prompt(6), max_new=5, temperature=1.0, seed=3),
        ]

    assert rejecting(t_full, save_random(tmp_path / "d0"), requests, but=1)["draft_accepted"] > 0


@slow
def test_penalties_of_foreseen_drafts(t_full):
    """Drafts that repeat the prompt are right until a penalty says otherwise."""
    engine = device_engine(t_full, "ngram", probe_every=1)
    again = dict(max_new=9, logit_bias={7: 30.0}, frequency_penalty=0.5)
    asked = [ask("greedy", REPEATED, **again), ask("drawn", REPEATED, temperature=0.9, seed=1, **again)]
    assert_same(engine.generate(asked), plain_of(t_full, asked))
    assert engine.counters.device_rounds > 0 and engine.counters.serial_rounds == 0
    assert engine.draft_counters()["draft_accepted"] > 0
    engine.check()


def test_counts_go_along_the_drafts():
    """A verify row is drawn as if the drafts before it had been counted, and what is taken is counted, also twice."""
    table, _window, _lens, drafts, rows, _ = packed()
    vocab, verify = 600, len(rows.ids_R)
    drafts[0, 1], drafts[0, 2] = drafts[0, 0], drafts[0, 0]
    table.edits = DeviceEdits(len(table.new_S), vocab, 100, torch.device("cpu"))
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2)
    penalised, plain = (
        RowSampling(p, Want(), 1, np.array([1, 2]), (), [int(drafts[0, 0])]) for p in (params, SamplingParams())
    )
    table.edits.admit([4, 0], [penalised, plain])
    columns = empty_columns(verify, torch.device("cpu"), table.edits.columns, drafts.shape[1])
    gather_columns(table, rows.slots_R, rows.ends_R, columns, Prefixes(rows.owner_R, rows.starts_B1, drafts))
    columns.temperature_S.fill_(0.0)
    logits = torch.randn(verify, vocab, generator=torch.Generator().manual_seed(3))
    start, end = (int(rows.starts_B1[b]) for b in (0, 1))
    assert end - start == 5
    for k, row in enumerate(range(start, end)):
        expected = logits[row].clone()
        penalised.ahead(drafts[0, :k].tolist()).edit(expected, int(rows.ends_R[row]))
        best = int(expected.argmax())
        logits[row, int(drafts[0, 0])] += float(expected[best] - expected[int(drafts[0, 0])]) * 0.99
    drawn, workspace = SampleOut.empty(verify, "cpu"), SampleWorkspace.empty(end, vocab, "cpu")
    sample_rows(logits[:end], columns, drawn, workspace, truncated=False)
    reference = sample_rows_reference(logits[:end], columns, SampleOut.empty(end, "cpu"))
    assert drawn.ids_B[:end].tolist() == reference.ids_B.tolist()
    for k, row in enumerate(range(start, end)):
        expected = logits[row].clone()
        penalised.ahead(drafts[0, :k].tolist()).edit(expected, int(rows.ends_R[row]))
        assert int(drawn.ids_B[row]) == int(expected.argmax())
    keep = torch.full((len(drafts),), 4, dtype=torch.int32)
    drawn.ids_B[start : end - 1] = drafts[0]
    counts = table.edits.columns.counts_CV.clone()
    record = torch.empty(len(drafts), record_width(drafts.shape[1]), dtype=torch.int32)
    commit_rounds(table, rows, Drafted(drafts, keep, keep), drawn, record, edits=table.edits.columns)
    added = table.edits.columns.counts_CV[0] - counts[0]
    wanted = torch.bincount(drawn.ids_B[start:end][: int(record[0, 4])], minlength=vocab) * 2
    assert record[0, 4] > 3 and added.tolist() == wanted.tolist()


def plain_of(t_full, requests):
    return make_engine(t_full, page_size=4).generate(requests)
