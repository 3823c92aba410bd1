"""The sampling kernels in Triton's interpreter against the host's sampler, in fp32 on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from engine.kernels.philox import noise_words
from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows, sample_rows_reference
from engine.kernels.sample_level import DRAWN, HIGH, KNOWN, STATE
from engine.kernels.sample_top import sample_top
from engine.memory.device_edits import DeviceEdits
from engine.memory.device_table import DEFINITIONS, DeviceTable
from engine.sampling.draw_device import draw_on_device
from engine.sampling.noise import HostNoise
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import NoiseKey
from engine.types import SamplingParams, Want

VOCAB, TILE = 200, 128
PROMPT = np.arange(10, 20, dtype=np.uint32)
PARAMS = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_k": 7},
    {"top_k": 100, "top_p": 0.5},
    {"top_p": 0.9, "temperature": 1.3},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.99, "min_p": 0.02, "temperature": 0.5},
    {"repetition_penalty": 1.5, "temperature": 0.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.6, "top_p": 0.8},
    {"logit_bias": {5: 4.0, 190: -float("inf")}, "temperature": 0.0},
    {"min_new": 9, "stop_ids": [1, 2], "top_k": 3},
]
OUTPUT = (3, 3, 4)


def host_rows(count: int, want: Want) -> list[RowSampling]:
    params = [SamplingParams(**PARAMS[i % len(PARAMS)]) for i in range(count)]
    return [RowSampling(p, want, 2**63 + 99 * i, PROMPT, (0,), OUTPUT) for i, p in enumerate(params)]


def columns_of(rows: list[RowSampling], positions: list[int], vocab: int = VOCAB) -> SampleColumns:
    def column(values, dtype=torch.float64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype)

    params = [row.params for row in rows]
    edits = DeviceEdits(len(rows), vocab, 100, torch.device("cpu"))
    edits.admit(list(range(len(rows))), rows)
    return SampleColumns(
        temperature_S=column(p.temperature for p in params),
        top_k_S=column((p.top_k for p in params), torch.int32),
        top_p_S=column(p.top_p for p in params),
        min_p_S=column(p.min_p for p in params),
        seed_S=torch.from_numpy(np.array([row.seed for row in rows], dtype=np.uint64).view(np.int64)),
        position_S=column(positions, torch.int64),
        active_S=torch.ones(len(rows), dtype=torch.uint8),
        edits=edits.columns,
    )


def assert_equal_columns(out: SampleOut, expected: SampleOut, rows=slice(None)) -> None:
    assert out.bad_B[rows].tolist() == expected.bad_B[rows].tolist()
    assert out.ids_B[rows].tolist() == expected.ids_B[rows].tolist()
    for name in ("raw_B", "temperature_B", "processed_B", "lse_B", "score_B", "entropy_B"):
        actual, wanted = getattr(out, name)[rows], getattr(expected, name)[rows]
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-5, equal_nan=True)


@triton.jit
def words_kernel(seed_ptr, position_ptr, out_ptr, N: tl.constexpr):
    seed = tl.load(seed_ptr).to(tl.uint64, bitcast=True)
    words = noise_words(seed, tl.load(position_ptr), tl.arange(0, N), N)
    at = tl.arange(0, N)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + at, words.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 12_345, 2**64 - 1])
def test_words_equal_the_hosts(seed):
    out = torch.zeros(32 * 8, dtype=torch.int32)
    signed = int(np.array(seed, dtype=np.uint64).view(np.int64))
    words_kernel[(1,)](torch.tensor([signed]), torch.tensor([77]), out, N=32)
    assert out.numpy().view(np.uint32).tolist() == HostNoise().words(NoiseKey(seed, 77), 256).tolist()


def test_rows_of_all_kinds_equal_the_hosts_sampler():
    count = len(PARAMS)
    logits_BV = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    logits_BV[1::2] = (logits_BV[1::2] * 2).round() / 2  # many ties
    rows = host_rows(count, Want(extra_logprobs=["raw", "temperature"], entropy=True))
    positions = [13 + i % 3 for i in range(count)]
    host = Sampler(VOCAB, "cpu").sample(logits_BV, rows, positions)
    columns = columns_of(rows, positions)
    out = SampleOut.empty(count, "cpu", entropy=True)
    sample_rows(logits_BV, columns, out, SampleWorkspace.empty(count, VOCAB, "cpu", tile=TILE))
    assert out.ids_B.tolist() == host.ids.tolist()
    greedy = np.array([row.greedy for row in rows])
    for actual, wanted in (
        (out.raw_B, host.extra_logprobs["raw"]),
        (out.temperature_B, host.extra_logprobs["temperature"]),
        (out.processed_B, host.logprobs),
        (out.entropy_B, host.entropy),
    ):
        torch.testing.assert_close(actual, wanted, atol=2e-5, rtol=1e-5)
    assert torch.equal(out.raw_B[greedy], out.processed_B[greedy])
    expected = sample_rows_reference(logits_BV, columns, SampleOut.empty(count, "cpu", entropy=True))
    assert_equal_columns(out, expected)


def test_every_way_to_a_cut_equals_the_reference():
    """Drawn from a short list; cut in a long one; in one with much above it; ties that no list holds."""
    vocab, params = (
        520,
        [{"top_k": 5, "top_p": 0.9, "min_p": 0.3}, {"top_k": 90, "top_p": 0.9999}, {"top_p": 0.9}, {"top_p": 0.6}],
    )
    rows = [RowSampling(SamplingParams(**p), Want(), 5 + i, PROMPT, ()) for i, p in enumerate(params)]
    logits_BV = torch.randn(4, vocab, generator=torch.Generator().manual_seed(9)) * 2
    logits_BV[2] /= 4
    logits_BV[3] = 1.5
    columns = columns_of(rows, [20] * 4, vocab)
    columns.edits = None
    workspace = SampleWorkspace.empty(4, vocab, "cpu", tile=TILE)
    # Shorter than this vocabulary's, so that few ids show every way.
    workspace.list_ids_BL, workspace.list_values_BL = (
        whole[:, :256].contiguous() for whole in (workspace.list_ids_BL, workspace.list_values_BL)
    )
    out, expected = (SampleOut.empty(4, "cpu", entropy=True) for _ in range(2))
    sample_rows(logits_BV, columns, out, workspace)
    assert_equal_columns(out, sample_rows_reference(logits_BV, columns, expected))
    assert workspace.record_BR[:, STATE.value].tolist() == [DRAWN.value] + [KNOWN.value] * 3
    found, high = workspace.found_B.tolist(), workspace.record_BR[:, HIGH.value].tolist()
    assert found[0] <= workspace.short < found[1] <= 256 < found[3] == vocab
    assert high[:2] == [float("inf")] * 2 and high[2] < float(logits_BV[2].max())


def test_slots_padding_and_inactive_rows():
    rows = host_rows(6, Want())
    columns = columns_of(rows, [13] * 6)
    columns.slots_B = torch.tensor([4, -1, 2, 0, 5])
    columns.active_S[2] = 0
    logits_BV = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(2))
    out, expected = SampleOut.empty(5, "cpu", entropy=True), SampleOut.empty(5, "cpu", entropy=True)
    for result in (out, expected):
        result.ids_B.fill_(-7)
    sample_rows(logits_BV, columns, out, SampleWorkspace.empty(5, VOCAB, "cpu", tile=TILE))
    sample_rows_reference(logits_BV, columns, expected)
    assert out.ids_B[[1, 2]].tolist() == [-7, -7] and (out.ids_B[[0, 3, 4]] >= 0).all()
    assert_equal_columns(out, expected)


@pytest.mark.parametrize("kind", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 11])
def test_unusable_logits_stay_in_their_row(kind):
    logits_BV = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    logits_BV[1, 150] = float("nan")
    logits_BV[2, 3] = float("inf")
    logits_BV[3] = -float("inf")
    logits_BV[4, 10:] = -float("inf")
    rows = host_rows(len(PARAMS), Want())[kind : kind + 1] * 5
    columns = columns_of(rows, [13] * 5)
    out = SampleOut.empty(5, "cpu", entropy=True)
    sample_rows(logits_BV, columns, out, SampleWorkspace.empty(5, VOCAB, "cpu", tile=TILE))
    assert out.bad_B.tolist() == [0, 1, 1, 1, 0]
    assert_equal_columns(out, sample_rows_reference(logits_BV, columns, SampleOut.empty(5, "cpu", entropy=True)))


def test_two_vocabulary_shards_agree_with_the_whole():
    logits_BV = torch.randn(4, 128, generator=torch.Generator().manual_seed(4))
    rows = [RowSampling(SamplingParams(temperature=0.8), Want(), 50 + i, PROMPT, ()) for i in range(4)]
    whole = columns_of(rows, [20] * 4, 128)
    whole.edits = None
    parts = []
    for first, part in ((0, logits_BV[:, :64]), (64, logits_BV[:, 64:])):
        whole.first_id = first
        out = SampleOut.empty(4, "cpu")
        parts.append(sample_rows(part, whole, out, SampleWorkspace.empty(4, 64, "cpu", tile=64), truncated=False))
    left, right = parts
    ids = torch.where(left.score_B >= right.score_B, left.ids_B, right.ids_B)
    host = Sampler(128, "cpu").sample(logits_BV, rows, [20] * 4)
    assert ids.tolist() == host.ids.tolist()
    lse = torch.logaddexp(left.lse_B, right.lse_B)
    torch.testing.assert_close(lse, torch.logsumexp(logits_BV, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("width", [pytest.param(4, marks=pytest.mark.slow), 150])
def test_alternatives_and_entropy_equal_the_hosts(width):
    """Of every definition; with few ids left by truncation; more than there are finite logits."""
    kinds = [1, 2, 3, 5, 10, 11, 12, 9]
    definitions = ["raw", "temperature", "processed"]
    params = [SamplingParams(**PARAMS[kind]) for kind in kinds]
    wants = [Want(logprobs=definitions[i % 3], top_logprobs=max(1, width - i), entropy=True) for i in range(len(kinds))]
    wants[3] = Want(logprobs="processed", top_logprobs=width, entropy=True)
    rows = [RowSampling(p, w, 9 + i, PROMPT, (0,), OUTPUT) for i, (p, w) in enumerate(zip(params, wants, strict=True))]
    logits_BV = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(6)) * 3
    logits_BV[2] = (logits_BV[2]).round()
    logits_BV[4, 20:120] = -float("inf")
    positions = [13] * len(rows)
    host = Sampler(VOCAB, "cpu").sample(logits_BV, rows, positions)
    columns = columns_of(rows, positions)
    columns.definition_S = torch.tensor([DEFINITIONS.index(w.logprobs) for w in wants], dtype=torch.int32)
    table = DeviceTable(len(rows), 4, torch.device("cpu"))
    table.columns.admit(list(range(len(rows))), wants)
    table.new_S.fill_(6)
    out = SampleOut.empty(len(rows), "cpu", entropy=True)
    workspace = SampleWorkspace.empty(len(rows), VOCAB, "cpu", tile=TILE)
    sample_rows(logits_BV, columns, out, workspace)
    sample_top(logits_BV, table, columns, out, workspace)
    torch.testing.assert_close(out.entropy_B, host.entropy, atol=2e-5, rtol=1e-5)
    for row, want in enumerate(wants):
        at = table.columns.top_row(row), 6 % 4
        ids = table.columns.top_ids_RWK[at][: want.top_logprobs]
        values = table.columns.top_logprobs_RWK[at][: want.top_logprobs]
        order = np.lexsort((ids, -values))
        assert ids[order].tolist() == host.top_ids[row, : want.top_logprobs].tolist(), row
        expected = host.top_logprobs[row, : want.top_logprobs]
        torch.testing.assert_close(values[order], expected, atol=2e-5, rtol=1e-5)


def test_one_definition_costs_no_other():
    rows = host_rows(2, Want()) * 3
    columns = columns_of(rows, [13] * 6)
    columns.definition_S = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    logits_BV = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(7)) * 2
    every, one = SampleOut.empty(6, "cpu"), SampleOut.empty(6, "cpu")
    workspace = SampleWorkspace.empty(6, VOCAB, "cpu", tile=TILE)
    sample_rows(logits_BV, columns, every, workspace)
    sample_rows(logits_BV, columns, one, workspace, every=False)
    assert one.ids_B.tolist() == every.ids_B.tolist()
    for row, definition in enumerate(columns.definition_S.tolist()):
        name = f"{DEFINITIONS[definition]}_B"
        assert getattr(one, name)[row] == getattr(every, name)[row]
    assert one.raw_B.isnan().tolist() == [False, True, False, True, False, False]


def test_rows_that_the_host_holds_are_drawn_alike():
    """As first tokens are: parameters come from the host, edits are made before."""
    rows = host_rows(4, Want(extra_logprobs=["raw"]))[2:] + host_rows(14, Want())[11:14:2]
    logits_BV = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(8)) * 3
    logits_BV[3, 1] = float("nan")
    positions = list(range(13, 13 + len(rows)))
    host = Sampler(VOCAB, "cpu").sample(logits_BV, rows, positions)
    device = draw_on_device(logits_BV, rows, positions)
    assert device.bad_R.tolist() == host.bad.tolist()
    assert device.ids_R.tolist() == host.ids.tolist()
    bare = [r for r, row in enumerate(rows) if row.bare]
    torch.testing.assert_close(device.logprobs_R[bare], host.logprobs[bare], atol=2e-5, rtol=1e-5, equal_nan=True)
    assert sorted(device.kept) == [r for r, row in enumerate(rows) if row.truncates and not row.bare]
