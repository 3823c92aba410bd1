"""Models of several layer kinds, served: whatever the cache and the schedule do, tokens are transformers'."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import (
    TOLERANCE,
    ask,
    assert_sample_is_reference,
    make_engine,
    prompt,
    reference_greedy,
    reference_logprobs,
    save_tiny,
)
from tests.unit.engine.schedules import fuzz

SLIDING, FULL = "sliding_attention", "full_attention"
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
NEMOTRON = {
    "layers_block_type": ["linear_attention", FULL, "moe", "mlp"],
    "n_routed_experts": 6,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_hidden_layers": None,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "num_hidden_layers": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
KINDS = {
    "gemma3": ("gemma3_text", {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING], "num_hidden_layers": 3}),
    "lfm2": ("lfm2", {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3, "block_multiple_of": 32}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 8, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "falcon-h1": ("falcon_h1", MAMBA2 | {"mamba_d_ssm": 128, "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8]}),
    "nemotron-h": ("nemotron_h", NEMOTRON),
    "granite": ("granitemoehybrid", MAMBA2 | {"layer_types": ["linear_attention", FULL], "num_local_experts": 0}),
    "qwen3-next": ("qwen3_next", GATED_DELTA),
    "qwen3.5-moe": ("qwen3_5_moe_text", GATED_DELTA),
}


QUICK = ("gemma3", "gpt-oss", "falcon-h1")


@pytest.fixture(
    scope="session", params=[kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def folder(request, tmp_path_factory):
    kind, overrides = KINDS[request.param]
    return save_tiny(tmp_path_factory.mktemp(request.param), seed=4, kind=kind, **overrides)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_random_schedules(folder, tmp_path, loop):
    """Aborts, pauses, updates of three kinds and a pool too small, with every token computed again."""
    kind, overrides = next(each for name, each in KINDS.items() if name in folder.name)
    other = save_tiny(tmp_path, seed=5, kind=kind, **overrides)
    few = {"window_tokens": 28} if "sliding_window" in overrides else {}
    tally = fuzz([folder, other], range(100), loop, **few)
    assert tally.schedules == 100 and tally.samples > 1000


@pytest.mark.usefixtures("both_loops")
def test_every_hit_depth(folder):
    """Depths on both sides of pages and of the window, asked twice: cold and warm are the same, and whoever
    asks again finds all whole pages, also where the first one was told of a branch point."""
    lengths = (9, 16, 21)
    reference = {n: reference_greedy(folder, prompt(n), 3) for n in lengths}
    logprobs = {n: reference_logprobs(folder, [*prompt(n), *reference[n]])[n:] for n in lengths}
    for depth in (3, 5, 8, 12, 17):
        engine = make_engine(folder, prefill_tokens=7)
        engine.generate([ask("warm", prompt(depth), max_new=1)])
        for n, again in ((n, again) for n in lengths for again in (False, True)):
            (group,) = engine.generate([ask("g", prompt(n), max_new=3)])
            assert group.samples[0].ids.tolist() == reference[n]
            np.testing.assert_allclose(group.samples[0].logprobs, logprobs[n], atol=TOLERANCE)
            assert group.hit.structural >= min(depth, n - 1) // 4 * 4
            if again:
                grid = engine._parts.pages.hit_grid
                assert group.hit.usable == (n - 1) // grid * grid
        engine.check()


@pytest.mark.usefixtures("both_loops")
def test_mixed_batches_forks_and_retraction(folder):
    """A pool too small for all: groups fork, some samples are retracted, and nobody's tokens change."""
    engine = make_engine(folder, kv_tokens=64, prefill_tokens=16)
    prompts = [prompt(5 + 4 * i, start=10 + 30 * i) for i in range(4)]
    groups = engine.generate([ask(f"g{i}", ids, n=2, max_new=14) for i, ids in enumerate(prompts)])
    assert engine.counters.retractions > 0
    for ids, group in zip(prompts, groups, strict=True):
        for sample in group.samples:
            assert_sample_is_reference(folder, ids, sample, 14)
    engine.check()
