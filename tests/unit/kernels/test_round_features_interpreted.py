"""What rows of device rounds may ask for, in Triton's interpreter: adapters, alternatives, penalties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.kernels.round_adapters import tile_rows, tile_rows_reference
from lora.segments import Segments, Tiles, most_tiles
from tests.support import make_engine, prompt
from tests.unit.dspark.served import save_random, timeless
from tests.unit.engine.lora_cases import ask_with, save_adapter
from tests.unit.kernels.test_rounds_interpreted import assert_same, device_engine, work

slow = pytest.mark.slow


@pytest.mark.parametrize("block", [4, 16])
def test_verify_rows_are_tiled_by_adapter(block):
    """Rows of one adapter apart from each other, an idle one, adapters without a row, padding behind and none."""
    for adapters, windows, lens, verify in (
        ([2, 0, 1, 2, 3, 0, 2], [4, 1, 0, 4, -1, 2, 3], [4, 1, 0, 4, 7, 0, 3], 24),
        ([5, 5, 5], [4, 4, 4], [4, 4, 3], 14),
        ([0, 1], [-1, -1], [0, 0], 200),
    ):
        adapters_B, window_B, lens_B = np.array(adapters), torch.tensor(windows).int(), torch.tensor(lens).int()
        segments, slots_R = tile_rows_reference(adapters_B, window_B, lens_B, verify)
        out, expected = (
            Tiles(verify, most_tiles(verify, len({0, *adapters}), block), block, torch.device("cpu")) for _ in range(2)
        )
        expected.fill(segments)
        out._table_U.fill_(77)
        order_B = np.argsort(adapters_B, kind="stable")
        sorted_B = (torch.from_numpy(part.astype(np.int32)) for part in (order_B, adapters_B[order_B]))
        tile_rows(*sorted_B, window_B, lens_B, verify, out)
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
    assert any(key[-1] is not None for key in engine._loop._rounds._stepper._captured)
    assert_same(engine.generate(work(3)), plain_of(t_full, work(3)))
    assert any(key[-1] is None for key in engine._loop._rounds._stepper._captured)


def plain_of(t_full, requests):
    return make_engine(t_full, page_size=4).generate(requests)
