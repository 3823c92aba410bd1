"""How large the key/value pool becomes."""

from __future__ import annotations

import pytest
import torch

from engine.errors import InvalidRequest
from engine.memory.budget import PoolBudget, pool_budget, whole_pages
from tests.unit.memory.test_kv_pool import SPEC


def test_a_fraction_of_what_is_left_after_steps_and_graphs() -> None:
    budget = PoolBudget(free_bytes=10_000, reserved_bytes=2_000, fraction=0.5, token_bytes=40)
    assert budget.num_tokens == 100 and "100 tokens" in budget.describe()
    assert PoolBudget(10_000, 2_000, 0.5, 40, useful_tokens=70).num_tokens == 70
    assert "of use" in PoolBudget(10_000, 2_000, 0.5, 40, useful_tokens=70).describe()
    assert PoolBudget(1_000, 2_000, 0.5, 40).num_tokens == 0


def test_more_rows_and_tokens_reserve_more() -> None:
    def reserved(tokens: int, rows: int) -> int:
        budget = pool_budget(SPEC, torch.bfloat16, torch.device("cpu"), 0.5, tokens, rows)
        assert budget.token_bytes == 2 * 2 * 2 * 4 * 2 and budget.free_bytes > 0
        assert budget.useful_tokens == rows * 32
        return budget.reserved_bytes

    row = reserved(1, 2) - reserved(1, 1)
    token = reserved(2, 1) - reserved(1, 1)
    assert row >= SPEC.vocab_size * 4 + token and token >= (2 * SPEC.hidden + 2 * SPEC.intermediate) * 2


def test_pools_hold_whole_pages_and_at_least_one() -> None:
    assert [whole_pages(tokens, 16) for tokens in (16, 31, 32)] == [16, 16, 32]
    with pytest.raises(InvalidRequest, match="kv_tokens"):
        whole_pages(15, 16)
