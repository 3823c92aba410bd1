"""Windowed layers with pages of their own, in interpreted kernels: what no window reaches is not there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from engine.attention.torch_ref import TorchReference
from engine.attention.triton import TritonAttention
from engine.batch import WindowRows
from engine.kernels.biased_experts import biased_experts, biased_experts_reference
from engine.kernels.expert_rows import ExpertRows
from engine.memory.kv_pool import KVPool
from tests.support import ask, make_engine, prompt, save_tiny
from tests.unit.kernels.test_attention_interpreted import Scene, make_spec

WINDOW, PAGE = 7, 4


def windowed(scene: Scene, num_decode: int):
    """The scene's pool and batch with pages for windows alone; scratch and all else is poisoned."""
    pool = KVPool(scene.spec, 2, PAGE, torch.float32, "cpu", window_pages=scene.pool.num_pages)
    pool.fill(float("nan"))
    ids = list(range(1, pool.window_pages))
    random.Random(1).shuffle(ids)
    tables = torch.zeros_like(scene.tables)
    for row, (length, count) in enumerate(zip(scene.lengths, scene.queries, strict=True)):
        first = max(0, length - count - WINDOW + 1) // PAGE
        for column in range(first, -(-length // PAGE)):
            tables[row, column] = ids.pop()
            old, new = (int(table[row, column]) * PAGE for table in (scene.tables, tables))
            pool.tokens(0)[new : new + PAGE] = scene.pool.tokens(0)[old : old + PAGE]
    plain = scene.batch(num_decode)
    rows_T = torch.repeat_interleave(torch.arange(len(scene.lengths)), torch.tensor(scene.queries))
    slots_T = tables[rows_T, plain.positions_T // PAGE].long() * PAGE + plain.positions_T % PAGE
    nowhere = dict(write_slots_T=plain.write_slots_T * 0 - 1, page_tables_BP=plain.page_tables_BP * 0 + 1)
    return pool, replace(plain, window=WindowRows(slots_T, tables), **nowhere)


@pytest.mark.parametrize("sink", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps_read_windows_alone(sink: bool) -> None:
    """Decode rows beside prompts, by the reference and by the kernels; then decode rows from fixed buffers."""
    spec = make_spec(window=WINDOW, sink=sink)
    scene = Scene(spec, [33, 1, 9, 26, 5], [1, 1, 1, 6, 5], PAGE)
    expected = scene.expected()
    for backend in (TorchReference(spec), TritonAttention(spec)):
        pool, batch = windowed(scene, 3)
        backend.plan(batch, pool)
        torch.testing.assert_close(backend.run(*scene.parts(), 0, scene.sink), expected, atol=2e-5, rtol=0)
    metadata = backend.plan_decode_buffers(4, scene.tables.shape[1], pool)
    window = metadata.window
    window.page_tables_BP[:3] = batch.window.page_tables_BP[:3]
    metadata.seq_lens_B[:3] = torch.tensor(scene.lengths[:3], dtype=torch.int32)
    out = torch.full((4, spec.num_heads, spec.head_dim), float("nan"))
    metadata.cut()
    assert sorted(window.items_W8[window.items_W8[:, 0] == 0][:, 1:3].tolist()) == [[33 - WINDOW, 33]]
    backend.run_decode(torch.cat((scene.parts()[0][:3], out[3:] * 0)), pool.tokens(0), metadata, out, 0, scene.sink)
    torch.testing.assert_close(out[:3], expected[:3], atol=2e-5, rtol=0)


def test_biased_experts_are_products_of_each_with_its_rows() -> None:
    """Gathered by token and scattered by pair; one expert is chosen by many, some by nobody."""
    noise = torch.Generator().manual_seed(0)
    chosen_TK = torch.rand(19, 6, generator=noise).topk(2).indices.where(torch.arange(19)[:, None] < 17, 3)
    rows = ExpertRows.of(chosen_TK, 8)
    for gather, count in ((True, 19), (False, 38)):
        x, weight, bias = (torch.randn(*size, generator=noise) for size in ((count, 40), (8, 40, 70), (8, 70)))
        expected = biased_experts_reference(x, weight, bias, rows, gather)
        torch.testing.assert_close(biased_experts(x, weight, bias, rows, gather), expected, atol=2e-5, rtol=0)
        if gather:
            pair = rows.order_P[5]
            mine = x[pair // 2] @ weight[chosen_TK.view(-1)[pair]] + bias[chosen_TK.view(-1)[pair]]
            torch.testing.assert_close(expected[5], mine)


FUSED = ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]})
LAYERED = ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "deterministic"), [(FUSED, False), (FUSED, True), (LAYERED, False)])
def test_captured_steps_with_windows(tmp_path, model, deterministic) -> None:
    """Groups that fork and rows that end at other times, past several windows, from a small pool: by fused kernels
    and by the layers themselves."""
    folder = save_tiny(tmp_path, kind=model[0], sliding_window=8, **model[1])
    plain = make_engine(folder, window_tokens=0, prefix_cache=False, loop="serial")
    fields = dict(burst=3, max_running=6, prefill_tokens=16, deterministic=deterministic)
    device = make_engine(folder, loop="overlapped", attention="triton", window_tokens=56, **fields)
    work = [
        ask("long", prompt(21), max_new=11),
        ask("group", prompt(25, start=200), n=2, max_new=7, temperature=1.0, seed=3),
    ]
    for one, other in zip(device.generate(work), plain.generate(work), strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            assert abs(a.logprobs - b.logprobs).max() < 1e-4
    assert device.counters.graph_captures > 0
    device.check()
