"""Latent attention and chosen tokens against transformers: forward passes through pages and chunks."""

from __future__ import annotations

import pytest
import torch

from engine.attention.mla import choose_tokens
from tests.oracle.latent_models import KINDS, correct_gates, shape
from tests.oracle.model_oracle import Harness, check_logits, engine_copy, random_ids, reference_logits, tiny_reference
from tests.oracle.ties import lowest_positions

QUICK = ("v3", "v3-plain-queries", "v32-4", "glm-64")


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_kind_equals_transformers(kind: str) -> None:
    """A prompt of more tokens than are chosen in chunks that end inside pages, then single tokens."""
    model_type, overrides = shape(kind)
    for seed in range(1 if kind in QUICK else 6):
        reference = tiny_reference(model_type, seed=seed, **overrides)
        correct_gates(reference)
        harness = Harness(engine_copy(reference), backend="auto")
        ids = random_ids(50, seed=seed + 1)
        row = harness.row(ids[:40])
        harness.prefill(row, chunk=13)
        for token in ids[40:]:
            row.ids.append(token)
            harness.step([row], [])
        with lowest_positions():
            check_logits(harness.all_logits(row), reference_logits(reference, ids))


def test_ties_at_the_cut_go_to_the_lowest_positions() -> None:
    scores_QS = torch.tensor([[0.0, 2.0, -0.0, 0.0, 2.0, 9.0], [1.0, 1.0, 1.0, 5.0, 9.0, 9.0], [-1.0, 3, 0, 0, 0, 0]])
    chosen_QK = choose_tokens(scores_QS, torch.tensor([5, 4, 2]), 3)
    assert chosen_QK.tolist() == [[0, 1, 4], [0, 1, 3], [0, 1, -1]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["v3", "glm-16"])
def test_deterministic_rows_keep_their_bits_beside_others(kind: str, dtype: torch.dtype) -> None:
    model_type, overrides = shape(kind)
    reference = tiny_reference(model_type, **overrides)
    correct_gates(reference)
    model, found = engine_copy(reference, dtype), []
    for mates in (0, 1, 2, 3, 5, 9):
        harness = Harness(model, backend="auto", deterministic=True, seed=mates)
        row = harness.row(random_ids(31, 1))
        others = [harness.row(random_ids(10 + 3 * i, 50 + i)) for i in range(mates)]
        for each in (row, *others):
            harness.prefill(each)
            each.ids.append(7)
        harness.step([*others[: mates // 2], row, *others[mates // 2 :]], [])
        found.append(row.logits[-1])
    assert all(torch.equal(each, found[0]) for each in found)
