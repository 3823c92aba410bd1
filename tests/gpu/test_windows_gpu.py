"""Windowed layers with pages of their own in captured steps, and experts with biases, on the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import ask, assert_sample_is_reference, make_engine, prompt, save_tiny

pytest.importorskip("triton")
from engine.kernels.biased_experts import biased_experts, biased_experts_reference
from engine.kernels.expert_rows import ExpertRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "fused": ("qwen3", {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}),
    "gemma3": ("gemma3_text", {"layer_types": [SLIDING, FULL], "query_pre_attn_scalar": 16}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("attention", ["triton", "auto"])
def test_captured_steps_with_windows(tmp_path, model, attention) -> None:
    """Several windows long, twice (the second time from the cache), in a pool that few windows fit."""
    kind, overrides = MODELS[model]
    folder = save_tiny(tmp_path, kind=kind, sliding_window=24, **overrides)
    fields = dict(page_size=16, window_tokens=256, max_running=6, prefill_tokens=40, device="cuda", dtype="float32")
    engine = make_engine(folder, attention=attention, loop="overlapped", **fields)
    work = [ask(f"g{n}", prompt(n, start=n), n=2, max_new=30) for n in (7, 33, 90)]
    for _ in range(2):
        for request, group in zip(work, engine.generate(work), strict=True):
            for sample in group.samples:
                assert_sample_is_reference(folder, request.prompt_ids, sample, 30)
    assert engine.counters.graph_captures > 0 and engine.counters.graph_eager_steps == 0
    engine.check()
    gauges = engine.gauges()
    assert gauges.window_pages_total == 16 and gauges.window_pages_private == 0
    before = np.concatenate([sample.logprobs for group in engine.generate(work) for sample in group.samples])
    engine.release_memory(["kv"])
    engine.resume_memory(["kv"])
    after = np.concatenate([sample.logprobs for group in engine.generate(work) for sample in group.samples])
    np.testing.assert_allclose(after, before, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 37, 700])
def test_products_of_biased_experts(tokens: int) -> None:
    noise = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise, device="cuda").to(torch.bfloat16)

    chosen_TK = torch.rand(tokens, 16, generator=noise, device="cuda").topk(4).indices
    rows = ExpertRows.of(chosen_TK, 16)
    for gather, count in ((True, tokens), (False, 4 * tokens)):
        x, weight, bias = random(count, 720), random(16, 720, 200), random(16, 200)
        expected = biased_experts_reference(*(each.float() for each in (x, weight, bias)), rows, gather)
        error = (biased_experts(x, weight, bias, rows, gather).float() - expected).norm() / expected.norm()
        assert error < 5e-3, f"relative error {float(error):.1e}"
