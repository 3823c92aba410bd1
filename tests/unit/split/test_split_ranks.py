"""Several ranks serve what one serves, token for token: prompts in chunks, prefix hits, forks, draws, retraction.

Ranks are processes that meet over gloo.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.test_generate_latent import save
from tests.unit.engine.lora_cases import save_adapter
from tests.unit.split.ranks import results

KINDS = {
    "v3": ("v3", {}),
    "v32": ("v32-4", {}),
    "glm": ("glm-16", {"indexer_types": ["full", "shared", "full", "shared"]}),
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return make(tmp_path_factory, "glm")


def make(tmp_path_factory, name: str):
    """Four layers, of which the ranks own one or two."""
    kind, fields = KINDS[name]
    return save(tmp_path_factory.mktemp(name), kind, seed=4, num_hidden_layers=4, **fields)


def assert_same(one: dict, ranks: list[dict], tolerance: float) -> None:
    for rank in ranks:
        assert rank["ids"] == one["ids"] and rank["hits"] == one["hits"]
        assert rank["drawn"] == ranks[0]["drawn"], "a seed that nobody chose is the same on all"
        assert rank["retractions"] == one["retractions"]
        assert rank["logprobs"] == ranks[0]["logprobs"], "ranks agree to the bit"
        for mine, other in zip(rank["logprobs"], one["logprobs"], strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one(tmp_path_factory, tmp_path, size) -> None:
    folders = [make(tmp_path_factory, name) for name in KINDS]
    for alone, ranks in zip(results(folders, tmp_path / "a", 1), results(folders, tmp_path / "b", size), strict=True):
        (one,) = alone
        assert one["retractions"] > 0 and max(one["hits"]) > 0
        assert_same(one, ranks, 1e-4)
        stored = [rank["bytes"] - rank["step_bytes"] for rank in ranks]
        assert sum(stored) == one["bytes"] and max(stored) < one["bytes"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deterministic_ranks_equal_one_to_the_bit(glm, tmp_path) -> None:
    folders = [glm]
    ((one,),) = results(folders, tmp_path / "a", 1, deterministic=True)
    (ranks,) = results(folders, tmp_path / "b", 2, deterministic=True)
    assert_same(one, ranks, 0.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_and_scoring(glm, tmp_path) -> None:
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj"]
    for seed, name in enumerate("ab"):
        save_adapter(glm, glm / f"adapter-{name}", seed, target_modules=targets)
    ((one,),), (ranks,) = (results([glm], tmp_path / str(size), size, "adapted") for size in (1, 2))
    assert_same(one, ranks, 1e-4)
    assert one["ids"][0] != one["ids"][1] != one["ids"][2], "adapters matter"
    for rank in ranks:
        np.testing.assert_allclose(rank["scored"], one["scored"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_ranks_that_decide_otherwise_are_named(glm, tmp_path) -> None:
    (ranks,) = results([glm], tmp_path / "a", 3, "disagree")
    for found in ranks:
        assert found["kind"] == "Corrupt"
        assert found["message"].startswith("ranks[2]: expected step 3 as rank 0 decided it"), found["message"]


def test_two_ranks_equal_one(glm, tmp_path) -> None:
    folders = [glm]
    ((one,),), (ranks,) = (results(folders, tmp_path / str(size), size, "glance") for size in (1, 2))
    assert_same(one, ranks, 1e-4)
    assert max(one["hits"]) > 0
    sent = ranks[0]["sent"]
    assert min(sent.values()) > 0, "pages travelled, and queries where those were less"
    assert sent == ranks[1]["sent"] and sum(sent.values()) < ranks[0]["whole"] / 4, "what nobody refers to stays"
