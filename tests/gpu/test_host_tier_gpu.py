"""Pages that go to pinned host memory and come back beside running steps: order and bits, on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cache.key import Namespace
from engine.memory.host_tier import HostTier
from engine.metrics import EngineCounters
from tests.support import ask, make_engine, save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "fused": ("llama", {}, {}),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "layer_types": [SLIDING, FULL]}, {"window_tokens": 512}),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL], "block_multiple_of": 32}, {"state_slots": 48}),
}
SPACE = Namespace()


def digest(number: int) -> bytes:
    return number.to_bytes(20, "little")


def test_copies_keep_their_place_among_readers_and_writers() -> None:
    """Units are written, kept, and written again at once, over many turns without a wait: every row that comes back
    is what it was when it was kept, and what it was brought to is read by what is launched after it."""
    device = torch.device("cuda")
    pool = [torch.zeros(65, 4096, device=device), torch.zeros(65, 3, 1000, device=device, dtype=torch.bfloat16)]
    tier = HostTier({"full": pool}, 64 << 20, EngineCounters())
    for turn in range(40):
        for tensor in pool:
            tensor[1:33].fill_(turn)
        tier.keep("full", SPACE, [(digest(32 * turn + unit), unit) for unit in range(1, 33)])
        for tensor in pool:
            tensor[1:33].fill_(-1)
    for turn in range(40):
        rows = [tier.find("full", SPACE, digest(32 * turn + unit)) for unit in range(1, 33)]
        arrival = tier.bring("full", [row for row in rows if row is not None])
        assert arrival is not None
        assert all(tier.arrived("full", arrival, range(33, 65)))
        assert all(bool((tensor[33:] == turn).all()) for tensor in pool)
    row = tier.find("full", SPACE, digest(5))
    assert row is not None and tier.arenas["full"].data_UX.is_pinned()
    torch.cuda.synchronize()
    tier.arenas["full"].data_UX[row.slot, 100] += 1
    arrival = tier.bring("full", [row])
    assert arrival is not None and tier.arrived("full", arrival, [1]) == [False]
    assert tier.counters.host_failed == 1 and bool((pool[0][1] == -1).all())
    tier.check()


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_a_small_pool_serves_as_a_large_one(tmp_path, model, loop) -> None:
    """Three turns of prompts that need three pools: tokens and hits of an engine that keeps everything."""
    kind, overrides, sizes = MODELS[model]
    folder = save_tiny(tmp_path, kind=kind, **overrides)
    random = np.random.default_rng(1)
    prompts = [random.integers(1, 500, 150) for _ in range(12)]
    fields = dict(page_size=16, max_running=4, prefill_tokens=128, device="cuda", dtype="float32", loop=loop)
    engine = make_engine(folder, kv_tokens=12 * 176 // 3, host_mib=64, **fields, **sizes)
    large = make_engine(folder, kv_tokens=8192, **fields)
    for turn in range(3):
        work = [ask(f"{turn} {i}", ids, max_new=20) for i, ids in enumerate(prompts)]
        for mine, theirs in zip(engine.generate(work), large.generate(work), strict=True):
            assert mine.samples[0].ids.tolist() == theirs.samples[0].ids.tolist()
            np.testing.assert_allclose(mine.samples[0].logprobs, theirs.samples[0].logprobs, atol=1e-4)
        engine.check()
    assert engine.counters.host_restored > 100 and engine.counters.host_failed == 0
    assert engine.counters.hit_tokens > 0.8 * large.counters.hit_tokens > 0
