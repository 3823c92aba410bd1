"""Chunks of prompts through fixed buffers: the same states as launch by launch."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from engine.models.spec import read_spec
from engine.runner import prefill_graphs
from engine.runner.prefill_graphs import PrefillGraphs, token_tiers, worthwhile_tokens
from tests.support import ask, make_engine, prompt
from tests.unit.engine.lora_cases import ask_with, save_adapter


def engine_with_graphs(folder, monkeypatch):
    monkeypatch.setattr(prefill_graphs, "MAX_ROWS", 4)
    monkeypatch.setattr(prefill_graphs, "USES_BEFORE_CAPTURE", 0)
    engine = make_engine(folder, page_size=4, attention="triton", loop="overlapped", max_running=6, prefill_tokens=32)
    runner, pages = engine._parts.runner, engine._parts.pages
    runner.prefill_graphs = PrefillGraphs(
        runner.model.spec,
        runner.fused,
        runner.attention,
        pages.pool,
        48,
        pages.table.pages_SP.shape[1],
        engine.counters,
    )
    return engine


def test_prompts_through_fixed_buffers_equal_plain_ones(t_full, tmp_path, monkeypatch):
    """Two in one chunk, one of them with an adapter, one over two chunks, one over a cached prefix; buffers are
    used again."""
    adapter = save_adapter(t_full, tmp_path, 1)
    engine, plain = engine_with_graphs(t_full, monkeypatch), make_engine(t_full, page_size=4)
    for each in (engine, plain):
        each.adapters.register_folder("LA", adapter)
    work = [
        ask("a", prompt(12), max_new=1),
        ask_with("LA", "b", prompt(5, 40), max_new=1),
        ask("c", prompt(40, 90), max_new=1),
    ]
    used = []
    hidden = engine._parts.runner.prefill_graphs.hidden
    engine._parts.runner.prefill_graphs.hidden = lambda *inputs: used.append(hidden(*inputs)) or used[-1]
    replies = engine.generate(work) + engine.generate([ask("d", prompt(17), max_new=1)])
    assert len(used) >= 3 and all(value is not None for value in used)
    assert {variant is None for _, variant in engine._parts.runner.prefill_graphs._captured} == {True, False}
    expected = plain.generate(work) + plain.generate([ask("d", prompt(17), max_new=1)])
    for reply, other in zip(replies, expected, strict=True):
        assert reply.samples[0].ids.tolist() == other.samples[0].ids.tolist()
        np.testing.assert_allclose(reply.samples[0].logprobs, other.samples[0].logprobs, atol=1e-4)
    engine.check()


def test_what_does_not_fit_runs_launch_by_launch(t_full, monkeypatch):
    engine = engine_with_graphs(t_full, monkeypatch)
    graphs = engine._parts.runner.prefill_graphs
    batch = make_batch(rows=5, tokens=5)
    assert graphs.hidden(batch) is None
    assert graphs.hidden(make_batch(rows=1, tokens=49)) is None
    assert graphs.hidden(dataclasses.replace(make_batch(rows=2, tokens=20), num_decode=1)) is None


def make_batch(rows: int, tokens: int):
    from engine.batch import ForwardBatch

    ids = torch.zeros(tokens, dtype=torch.int64)
    counts = [tokens // rows] * rows
    return ForwardBatch(
        input_ids_T=ids,
        positions_T=ids,
        write_slots_T=ids,
        query_lens=counts,
        seq_lens=counts,
        page_tables_BP=torch.zeros(rows, 8, dtype=torch.int32),
        row_keys=list(range(rows)),
        num_decode=0,
        logit_rows_R=ids[:1],
        shared_prefixes=[],
    )


@pytest.mark.parametrize("most", [20, 32, 100, 8192])
def test_tiers_reach_the_most_and_waste_at_most_half(most):
    tiers = token_tiers(most)
    assert tiers == sorted(set(tiers)) and (not tiers or tiers[-1] == most)
    assert all(after <= 1.5 * before for before, after in itertools.pairwise(tiers))


def test_small_models_gain_at_more_tokens(t_full):
    spec = read_spec(t_full)
    larger = dataclasses.replace(spec, hidden=4096, intermediate=12288, num_heads=32, num_kv_heads=8, head_dim=128)
    assert worthwhile_tokens(spec, 8192) == 8192 > worthwhile_tokens(larger, 8192) > 32
