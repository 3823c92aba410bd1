"""Llama and Qwen3 against transformers: architectures, rope kinds, pages, chunks, batches."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.batch import SharedPrefix
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


def quick_first(chosen: list[tuple], values: tuple) -> list:
    """All pairs with a page size; those not chosen are slow."""
    others = [pair for pair in itertools.product(values, (1, 4, 16)) if pair not in chosen]
    return [*chosen, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in others)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request):
    reference = tiny_reference(request.param, seed=3)
    return reference, engine_copy(reference)


@pytest.mark.parametrize(("chunk", "page_size"), quick_first([(1, 4), (3, 16), (16, 1), (None, 4)], (1, 3, 16, None)))
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


@pytest.mark.parametrize(("batch", "page_size"), quick_first([(1, 1), (2, 16), (5, 4), (16, 1)], (1, 2, 5, 16)))
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


@pytest.mark.parametrize("mates", [1, 2, 6])
def test_deterministic_rows_keep_their_bits_beside_others(pair, mates: int) -> None:
    _, model = pair
    ids, prompt = random_ids(45, seed=8), 21

    def run(num_mates: int) -> torch.Tensor:
        harness = Harness(model, deterministic=True, seed=num_mates)
        row = harness.row(ids[:prompt])
        others = [harness.row(random_ids(9 + 7 * index, seed=index)) for index in range(num_mates)]
        harness.step([], [(other, len(other.ids) - 2) for other in others] + [(row, prompt)])
        for step, token in enumerate(ids[prompt:]):
            row.ids.append(token)
            for other in others[step % 3 :]:
                other.ids.append(step)
            batch = [*others[step % 3 :], row]
            harness.step(batch if step % 2 else batch[::-1], [])
        return harness.all_logits(row)

    assert torch.equal(run(0), run(mates))


def test_unwritten_pages_never_reach_the_output(pair) -> None:
    """The pool is poisoned with NaN; a released and restored pool serves again."""
    reference, model = pair
    ids = random_ids(30, seed=9)
    harness = Harness(model)
    for _ in range(2):
        row = harness.row(ids[:20])
        harness.prefill(row)
        for token in ids[20:]:
            row.ids.append(token)
            harness.step([row], [])
        check_logits(harness.all_logits(row), reference_logits(reference, ids))
        harness.pool.release()
        assert harness.pool.bytes == 0
        harness.pool.restore()
        harness.pool.fill(float("nan"))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_forked_groups_share_a_prefix(pair, page_size: int) -> None:
    reference, model = pair
    harness = Harness(model, page_size=page_size)
    prompt = random_ids(75, seed=11)
    parent = harness.row(prompt)
    harness.prefill(parent)
    texts = [prompt + random_ids(12, seed=20 + index) for index in range(6)]
    rows = [harness.fork(parent) for _ in texts]
    lone_ids = random_ids(25, seed=40)
    lone = harness.row(lone_ids[:13])
    harness.prefill(lone)
    for step in range(12):
        for row, text in zip(rows, texts, strict=True):
            row.ids.append(text[75 + step])
        lone.ids.append(lone_ids[13 + step])
        # Two of the group leave half-way: the prefix is still shared, its tile shrinks.
        running = rows if step < 6 else rows[1:5]
        shared = SharedPrefix(1, 1 + len(running), 75 // page_size)
        harness.step([lone, *running], [], [shared])
    check_logits(harness.all_logits(lone), reference_logits(reference, lone_ids))
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        expected = reference_logits(reference, text)[75:]
        check_logits(harness.all_logits(row), expected if 0 < index < 5 else expected[:6])
