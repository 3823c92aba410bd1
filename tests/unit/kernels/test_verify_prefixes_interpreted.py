"""Rows that verify drafts and share prefixes, interpreted: what they read together and what the definition says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import engine.attention.decode_metadata as decode_metadata
from engine.attention.decode_metadata import AttentionSize, saved_bytes, worthwhile
from engine.attention.triton import TritonAttention
from engine.batch import SharedPrefix
from engine.runner.round_stepper import RoundStepper, _Key
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import save_random
from tests.unit.kernels.attention_checks import VerifyRounds, check_blocks, check_verify_pieces
from tests.unit.kernels.test_attention_interpreted import LAYERS, Scene, make_spec
from tests.unit.kernels.test_rounds_interpreted import assert_same, device_engine

slow = pytest.mark.slow
NESTED = [SharedPrefix(0, 5, 5), SharedPrefix(0, 3, 9), SharedPrefix(3, 5, 13)]
LENGTHS = [45, 50, 61, 73, 58, 20]


def test_pieces_follow_from_queries() -> None:
    check_verify_pieces(torch.device("cpu"))


def check_rounds(layer: dict, prefixes: list[SharedPrefix], rounds: list[list[int]], kv_heads: int = 2) -> None:
    """Round after round over the same prefixes, whose lengths are not multiples of a tile: rows with more queries,
    with fewer, without any."""
    spec = make_spec(6, kv_heads, 16, **layer)
    buffers = None
    for number, queries in enumerate(rounds):
        lengths = [length if count else 0 for length, count in zip(LENGTHS, queries, strict=True)]
        scene = Scene(spec, LENGTHS, queries, 4, prefixes)
        if buffers is None:
            most = max(sum(each) for each in rounds) + 3
            each = max(max(each) for each in rounds)
            buffers = VerifyRounds(spec, scene.pool, scene.tables.shape[1], len(LENGTHS) + 1, most, each)
        expected, tokens = scene.expected(), sum(queries)
        # The same storage: later scenes differ in which tokens come with the step.
        buffers._pool.tokens(0).copy_(scene.pool.tokens(0))
        buffers.fill(scene.tables, lengths, queries, None if number else prefixes)
        shared = buffers.plan.shared
        shared.before.states.mean_INH.fill_(float("nan"))
        shared.before.states.lse_IN.fill_(float("nan"))
        buffers.q_RNH[:tokens] = scene.parts()[0]
        buffers.launch(scene.sink)
        torch.testing.assert_close(buffers.out_RNH[:tokens], expected, atol=2e-5, rtol=0)
        for prefix in prefixes:
            assert shared.before.own_start_B[prefix.start] >= prefix.num_pages * 4 // 16 * 16 > 0


@pytest.mark.parametrize(
    ("layer", "kv_heads"),
    [(LAYERS[4], 2), *(pytest.param(each, heads, marks=slow) for each in LAYERS for heads in (1, 6))],
)
def test_rounds_over_one_level(layer: dict, kv_heads: int) -> None:
    check_rounds(layer, [SharedPrefix(0, 4, 10), SharedPrefix(4, 6, 4)], [[2, 0, 6, 1, 3, 4]], kv_heads)


@slow
@pytest.mark.parametrize("layer", LAYERS)
def test_rounds_over_two_levels(layer: dict) -> None:
    check_rounds(layer, NESTED, [[1, 4, 16, 2, 5, 3], [3, 0, 1, 0, 0, 2], [2, 2, 2, 2, 2, 2]])


@slow
def test_prefixes_in_several_pieces_and_split_rows() -> None:
    """A prefix of several states and rows whose own tokens are cut into splits."""
    prefixes = [SharedPrefix(0, 2, 60)]
    scene = Scene(make_spec(2, 1), [1500, 1900], [3, 5], 16, prefixes)
    buffers = VerifyRounds(scene.spec, scene.pool, scene.tables.shape[1], 2, 8, each=8)
    buffers.fill(scene.tables, scene.lengths, scene.queries, prefixes)
    buffers.q_RNH[:] = scene.parts()[0]
    expected = scene.expected()
    buffers.launch()
    torch.testing.assert_close(buffers.out_RNH, expected, atol=2e-5, rtol=0)
    assert buffers.plan.splits > 1 and buffers.plan.shared.before.parts_B.tolist() == [4, 4]
    assert not buffers.plan.arrived_XK.any()


@slow
def test_blocks_share_what_verify_rows_do() -> None:
    scene = Scene(make_spec(), [61] * 6, [0] * 6, 4)
    check_blocks(scene.pool, scene.spec, scene.tables, 32, 2e-6)


def test_batches_share_what_pays(monkeypatch) -> None:
    """Rows that verify drafts in front, a chunk of a prompt behind them."""
    scene = Scene(make_spec(), [45, 50, 61, 33, 9], [3, 1, 4, 2, 6], 4, [SharedPrefix(0, 3, 9)])
    batch, expected = scene.batch(0), scene.expected()
    batch.provisional = 4
    for least, own_start in ((1 << 40, None), (1, [32, 32, 32, 0, 0])):
        monkeypatch.setattr(decode_metadata, "MIN_SAVED_BYTES", least)
        monkeypatch.setattr(decode_metadata, "MIN_SAVED_SEGMENT_BYTES", least)
        for deterministic in (False, True):
            backend = TritonAttention(scene.spec, deterministic)
            backend.plan(batch, scene.pool)
            shared = backend._prefill.shared
            if own_start is None or deterministic:
                assert shared is None
            else:
                torch.testing.assert_close(backend.run(*scene.parts(), 0), expected, atol=2e-5, rtol=0)
                assert shared.before.own_start_B.tolist() == own_start


def test_states_count_against_what_is_saved() -> None:
    """At 8B heads, 32 samples of a prompt of 512 tokens are worth it for four queries each, of 32 tokens for none."""
    size = AttentionSize(32, 8, 128, 16, 2, 132)
    long, short = SharedPrefix(0, 32, 32), SharedPrefix(0, 32, 2)
    assert worthwhile([long], size, 4.0) == [long] and worthwhile([long, short], size, 16.0) == [long]
    assert worthwhile([SharedPrefix(0, 32, 8)], size) and not worthwhile([SharedPrefix(0, 32, 8)], size, 16.0)


def test_sharing_waits_until_it_has_lost_what_its_graph_takes(monkeypatch) -> None:
    """32 rows that share 32 pages of 8B heads save some 60 MB a layer: 0.7 ms a round of 36 layers."""
    monkeypatch.setattr(RoundStepper, "capture_seconds", 0.1)
    stepper, size = object.__new__(RoundStepper), AttentionSize(32, 8, 128, 16, 2, 132)
    pool = SimpleNamespace(num_layers=36)
    stepper._parts = SimpleNamespace(pool=pool, backend=SimpleNamespace(size=lambda _: size))
    stepper._forgone = 0.0
    plan = SimpleNamespace(prefixes=[SharedPrefix(0, 32, 32)], rows=32, rounds=4)
    pays = [stepper._pays(plan, 128) for _ in range(100)]
    first = pays.index(True)
    seconds = 4 * (first + 1) * 36 * sum(saved_bytes(plan.prefixes, size, 4.0)) / 3e12
    assert 20 < first < 50 and 0.1 <= seconds < 0.103
    assert pays.count(True) == 100 // (first + 1), "each graph waits for itself"


def test_graphs_that_are_there_serve_before_others_are_made() -> None:
    """(verify rows, shares) of the graphs there are, whether rows share, whether one may be made, and what runs."""
    stepper, kind = object.__new__(RoundStepper), ("modes", None)
    stepper._pays = lambda plan, verify: False
    cases = [
        ([(16, False)], True, True, (16, False)),
        ([(16, False)], True, False, (16, False)),
        ([(32, True)], True, False, (32, True)),
        ([(32, True)], False, False, (32, True)),
        ([(32, False)], True, False, (32, False)),
        ([(16, True), (32, False)], False, False, (16, True)),
        ([(32, True), (32, False)], False, False, (32, False)),
        ([(32, False)], False, True, (16, False)),
        ([], True, True, (16, True)),
        ([], False, False, (16, False)),
    ]
    for captured, shares, capture, chosen in cases:
        stepper._captured = {_Key(8, verify, 16, 0, *kind, flag): None for verify, flag in captured}
        plan = SimpleNamespace(prefixes=[None] * shares, capture=capture)
        found = stepper._chosen(_Key(8, 16, 16, 0, *kind, shares), plan)
        assert found == _Key(8, chosen[0], 16, 0, *kind, chosen[1]), captured
    stepper._pays = lambda plan, verify: True
    plan, wanted = SimpleNamespace(prefixes=[None], capture=False), _Key(8, 16, 16, 0, *kind, True)
    stepper._captured = {wanted._replace(shares=False): None}
    assert stepper._chosen(wanted, plan) == wanted, "one that pays is made"
    # What gives all rows one window is no larger graph for those that differ, nor the other way round.
    stepper._captured = {_Key(8, 32, 0, 3, *kind, False): None}
    assert stepper._chosen(wanted, plan) == wanted
    stepper._captured = {_Key(8, 32, 32, 0, *kind, False): None}
    even = _Key(8, 16, 0, 1, *kind, False)
    assert stepper._chosen(even, SimpleNamespace(prefixes=[], capture=False)) == even


@slow
@pytest.mark.parametrize("mode", ["compact", "static"])
def test_rounds_of_a_group_equal_plain_steps(t_full, tmp_path, monkeypatch, mode: str) -> None:
    """Samples of a prompt between others, whose prefix every round on the device reads once."""
    monkeypatch.setattr(RoundStepper, "capture_seconds", -1e9)
    for name in ("MIN_SAVED_BYTES", "MIN_SAVED_SEGMENT_BYTES"):
        monkeypatch.setattr(decode_metadata, name, -(1 << 40))
    engine = device_engine(t_full, save_random(tmp_path / "d0"), mode=mode, least=1, probe_every=1)
    requests = [
        ask("before", prompt(9), max_new=5),
        ask("group", prompt(22, 50), n=2, max_new=6, temperature=1.0, seed=3),
        ask("after", prompt(5, 70), max_new=4, temperature=0.8, seed=4),
    ]
    assert_same(engine.generate(requests), make_engine(t_full, page_size=4).generate(requests))
    engine.check()
    plans = [round.launches._plan for round in engine._loop._rounds._stepper._captured.values()]
    assert any(plan.shared is not None and int(plan.shared.before.own_start_B.max()) == 16 for plan in plans)
    assert 0 < engine.counters.shared_rounds <= engine.counters.device_rounds
    assert engine.draft_counters()["draft_verified"] > 3
