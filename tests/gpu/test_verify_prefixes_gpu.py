"""Rows that verify drafts and share prefixes on a GPU: captured rounds, and engines that run them."""

from __future__ import annotations

import pytest
import torch

import engine.attention.decode_metadata as decode_metadata
from engine.batch import SharedPrefix
from engine.memory.kv_pool import KVPool
from engine.runner.round_stepper import RoundStepper
from tests.gpu.test_attention_kernels import ALL, BF16, DEVICE, Scene, close, make_spec
from tests.gpu.test_engine_gpu import assert_equal
from tests.gpu.test_rounds_gpu import FIELDS, speculating
from tests.support import ask, make_engine, prompt
from tests.unit.dspark.served import save_random, timeless
from tests.unit.kernels.attention_checks import VerifyRounds, check_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("layer", [{}, ALL])
def test_one_captured_round_serves_any_queries_and_prefixes(layer: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MIN_SAVED_BYTES", "MIN_SAVED_SEGMENT_BYTES"):
        monkeypatch.setattr(decode_metadata, name, -(1 << 40))
    spec = make_spec(128, 8, 4, layer)
    rounds = [
        ([16, 0, 3, 1] * 8, [SharedPrefix(0, 32, 40)]),
        ([2] * 32, [SharedPrefix(0, 16, 30), SharedPrefix(16, 30, 37)]),
        ([1, 5, 0, 9] * 8, [SharedPrefix(4, 20, 33), SharedPrefix(4, 12, 40)]),
        ([8] * 32, []),
    ]
    buffers = graph = None
    for queries, prefixes in rounds:
        lengths = [640 + 13 * row + count if count else 0 for row, count in enumerate(queries)]
        scene = Scene(spec, lengths, queries, 16, BF16, prefixes, columns=80)
        if buffers is None:
            pool = KVPool(spec, 32 * 80, 16, BF16, DEVICE)
            sink = None if scene.sink is None else torch.empty_like(scene.sink)
            buffers = VerifyRounds(spec, pool, 80, 32, 512)
            buffers.launch(sink)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                buffers.launch(sink)
        scene.write()
        stored = scene.pool.tokens(0)
        buffers._pool.tokens(0)[: len(stored)] = stored
        if sink is not None:
            sink.copy_(scene.sink)
        buffers.fill(scene.tables, lengths, queries, prefixes)
        buffers.q_RNH[: sum(queries)] = scene.parts()[0]
        for _ in range(2):
            buffers.out_RNH.fill_(float("nan"))
            graph.replay()
            close(buffers.out_RNH[: sum(queries)], scene.expected())


@pytest.mark.parametrize(("dtype", "tolerance"), [(BF16, 2e-2), (torch.float32, 5e-6)])
def test_blocks_share_what_verify_rows_do(dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene(make_spec(64, 2, 4, {}), [600] * 6, [0] * 6, 16, dtype)
    check_blocks(scene.pool, scene.spec, scene.tables, 512, tolerance)


@pytest.mark.parametrize("mode", ["static", "compact"])
def test_rounds_that_share_prefixes_equal_plain_steps(t_full, tmp_path, monkeypatch, mode: str) -> None:
    """Groups between other requests; what they share is read once from the first round on, or by each."""
    drafter = save_random(tmp_path / "d0")
    requests = [ask("before", prompt(9), max_new=20)]
    for number in range(3):
        shared = dict(n=7, max_new=30, temperature=1.0, seed=number)
        requests += [ask(f"group-{number}", prompt(70 + number, 40 * number), **shared)]
        requests += [ask(f"single-{number}", prompt(30, 300 + number), max_new=25, temperature=0.8, seed=number)]
    expected = make_engine(t_full, loop="overlapped", burst=8, **FIELDS).generate(list(requests))
    # Graphs that share are made whatever they save.
    monkeypatch.setattr(RoundStepper, "capture_seconds", -1e9)
    for least in (1 << 40, -(1 << 40)):
        for name in ("MIN_SAVED_BYTES", "MIN_SAVED_SEGMENT_BYTES"):
            monkeypatch.setattr(decode_metadata, name, least)
        engine = speculating(t_full, drafter, mode=mode, least=1)
        timeless(engine)
        for _ in range(2):
            assert_equal(engine.generate(list(requests)), expected)
        engine.check()
        plans = [round.launches._plan for round in engine._loop._rounds._stepper._captured.values()]
        assert any(plan.shared is not None for plan in plans) == (least < 0)
        assert bool(engine.counters.shared_rounds) == (least < 0)
        assert engine.counters.device_rounds > 10 and engine.draft_counters()["draft_verified"] > 10
