"""Llama and Qwen3 against transformers: architectures, rope kinds, pages, chunks, batches."""

from __future__ import annotations

import pytest
import torch

from tests.oracle.model_oracle import (
    Harness,
    check_logits,
    engine_copy,
    random_ids,
    reference_logits,
    tiny_reference,
)

VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e3}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-yarn-mscale": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
            }
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32}),
}


@pytest.mark.parametrize("backend", ["torch", "torch_ref"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_transformers(variant: str, backend: str) -> None:
    model_type, overrides = VARIANTS[variant]
    reference = tiny_reference(model_type, **overrides)
    harness = Harness(engine_copy(reference), backend=backend)
    ids = random_ids(90, seed=1)
    row = harness.row(ids[:70])
    harness.prefill(row, chunk=32)
    for token in ids[70:]:
        row.ids.append(token)
        harness.step([row], [])
    check_logits(harness.all_logits(row), reference_logits(reference, ids))


def test_sliding_window_layers_equal_transformers() -> None:
    reference = tiny_reference(
        "qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3
    )
    model = engine_copy(reference)
    assert [layer.window for layer in model.spec.layers] == [None, 9, 9]
    harness = Harness(model, backend="auto")
    ids = random_ids(40, seed=2)
    row = harness.row(ids)
    harness.prefill(row, chunk=7)
    check_logits(harness.all_logits(row), reference_logits(reference, ids))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request):
    reference = tiny_reference(request.param, seed=3)
    return reference, engine_copy(reference)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 3, 16, None])
def test_chunks_and_pages(pair, page_size: int, chunk: int | None) -> None:
    reference, model = pair
    harness = Harness(model, page_size=page_size, seed=page_size)
    ids = random_ids(37, seed=4)
    row = harness.row(ids)
    harness.prefill(row, chunk)
    check_logits(harness.all_logits(row), reference_logits(reference, ids))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_continuing_at_every_hit_depth(pair, page_size: int) -> None:
    reference, model = pair
    ids = random_ids(36, seed=5)
    expected = reference_logits(reference, ids)
    harness = Harness(model, page_size=page_size)
    donor = harness.row(ids)
    harness.prefill(donor)
    for depth in range(0, len(ids), max(page_size, 3) // page_size * page_size):
        row = harness.row(ids)
        row.pages, row.cached = donor.pages[: -(-depth // page_size)], depth
        if depth % page_size:
            continue
        harness.prefill(row, chunk=10)
        check_logits(harness.all_logits(row), expected[depth:])


@pytest.mark.parametrize("batch", [1, 2, 5, 16])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_mixed_batches(pair, batch: int, page_size: int) -> None:
    """Rows join and leave: each step decodes what is ready beside a chunk of what is not."""
    reference, model = pair
    harness = Harness(model, page_size=page_size, seed=batch)
    texts = [random_ids(12 + 5 * index, seed=10 + index) for index in range(batch)]
    prompts = [max(1, len(text) // 2 + index % 3 - 1) for index, text in enumerate(texts)]
    rows = [harness.row(text[:prompt]) for text, prompt in zip(texts, prompts, strict=True)]
    while any(row.cached < len(text) for row, text in zip(rows, texts, strict=True)):
        decode, prefill, budget = [], [], 11
        for row, text, prompt in zip(rows, texts, prompts, strict=True):
            if row.cached == len(text):
                continue
            if row.cached >= prompt:
                row.ids.append(text[row.cached])
                decode.append(row)
            elif budget:
                count = min(budget, prompt - row.cached)
                prefill.append((row, count))
                budget -= count
        harness.step(decode, prefill)
    for row, text in zip(rows, texts, strict=True):
        check_logits(harness.all_logits(row), reference_logits(reference, text))


def test_captured_layers_are_the_states_after_each_layer(pair) -> None:
    reference, model = pair
    harness = Harness(model)
    ids = random_ids(20, seed=6)
    row = harness.row(ids)
    capture = {0: torch.empty(0), 1: torch.empty(0)}
    harness.runner.hidden(harness.batch([], [(row, 20)]), capture)
    with torch.no_grad():
        states = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
    for layer, hidden in capture.items():
        torch.testing.assert_close(hidden, states[layer + 1][0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_prompt_logprobs(pair, chunk: int, temperature: float) -> None:
    reference, model = pair
    harness = Harness(model)
    ids = random_ids(30, seed=7)
    row = harness.row(ids)
    hidden = harness.runner.hidden(harness.batch([], [(row, 30)]))
    actual = harness.runner.prompt_logprobs(hidden[:-1], torch.tensor(ids[1:]), temperature, chunk)
    wanted = torch.log_softmax(reference_logits(reference, ids)[:-1] / temperature, dim=-1)
    torch.testing.assert_close(actual, wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], atol=1e-4, rtol=0)
