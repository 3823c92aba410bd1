"""How large the key/value pool becomes."""

from __future__ import annotations

import pytest
import torch

from engine.errors import InvalidRequest
from engine.memory import budget as budgets
from engine.memory.budget import ADAPTER_SHARE, PoolBudget, adapter_mib, pool_budget, whole_pages
from lora.config import AdapterConfig
from lora.packing import pack, room_for
from tests.unit.lora.toy_geometry import all_linear, geometry, weights
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


def test_adapters_get_a_share_or_all_that_can_be_resident(monkeypatch) -> None:
    where, gpu = geometry(), torch.device("cuda")
    packed = pack(weights(all_linear(where, 64), where), where, torch.bfloat16)
    assert room_for(where, 64, torch.bfloat16) == packed.num_bytes
    monkeypatch.setattr(budgets, "_free_bytes", lambda device: 1 << 30)
    config = AdapterConfig(max_resident=4096)
    assert adapter_mib(config, where, torch.bfloat16, gpu) == 1024 // ADAPTER_SHARE
    few = AdapterConfig(max_resident=40)
    assert adapter_mib(few, where, torch.bfloat16, gpu) == 40 * packed.num_bytes >> 20
    assert adapter_mib(AdapterConfig(device_mib=7), where, torch.bfloat16, gpu) == 7
    plain, reserving = (pool_budget(SPEC, torch.bfloat16, gpu, 0.5, 1, 1, adapter_bytes=size) for size in (0, 1 << 20))
    assert reserving.reserved_bytes - plain.reserved_bytes == 1 << 20


def test_pools_hold_whole_pages_and_at_least_one() -> None:
    assert [whole_pages(tokens, 16) for tokens in (16, 31, 32)] == [16, 16, 32]
    with pytest.raises(InvalidRequest, match="kv_tokens"):
        whole_pages(15, 16)
