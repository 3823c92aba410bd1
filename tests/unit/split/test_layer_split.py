"""Who owns which layers, what that saves, and what ranks refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine import CacheConfig, EngineConfig
from engine.context_parallel import ALONE, ContextParallel
from engine.dspark.config import DSparkConfig
from engine.errors import Unsupported
from engine.memory.latent_pool import LatentPool
from engine.memory.layer_split import SplitBytes, SplitLatents, balanced, stored_numbers
from engine.models.spec import spec_from_config
from engine.split_build import split_config
from tests.oracle.latent_models import shape
from tests.unit.memory.test_latent_pool import COMMON


def spec_of(kind: str = "glm-16"):
    model_type, fields = shape(kind)
    return spec_from_config({"model_type": model_type, **COMMON, **fields})


def rank_of(rank: int, size: int) -> ContextParallel:
    """A rank that exchanges nothing."""
    return ContextParallel(rank, size, object(), object())  # type: ignore[arg-type]


def pool_of(rank: int, size: int) -> SplitLatents:
    return SplitLatents(spec_of(), 5, 4, torch.float32, "cpu", rank_of(rank, size))


def test_owners_hold_about_as_much() -> None:
    for latents, keys, ranks in itertools.product((1, 7, 78), (0, 3, 21), (1, 2, 4, 8)):
        sizes = [576] * latents + [128] * keys
        owners, held = balanced(sizes, ranks), [0] * ranks
        assert len(owners) == len(sizes)
        for size, owner in zip(sizes, owners, strict=True):
            held[owner] += size
        assert sum(held) == sum(sizes) and max(held) - min(held) <= 576
        if latents == 78 and keys == 21:
            assert max(held) - min(held) <= 128, "small things even out what large ones leave"
    assert balanced([5, 5, 5], 2) == [0, 1, 0], "every rank comes to the same"


def test_each_layer_is_stored_once_and_copied_with_its_page() -> None:
    pools = [pool_of(rank, 2) for rank in range(2)]
    for layer in range(3):
        found = [pool.stored(layer) for pool in pools]
        assert [rows is not None for rows in found] == [pool.owner(layer) == rank for rank, pool in enumerate(pools)]
    for layer in (0, 2):
        assert sum(pool.stored_index(layer) is not None for pool in pools) == 1
    whole = LatentPool(spec_of(), 5, 4, torch.float32, "cpu")
    assert sum(pool.bytes - pool.step.bytes for pool in pools) == whole.bytes
    planned = SplitBytes.of(spec_of(), 2, 4)
    assert [pool.token_bytes for pool in pools] == list(planned.stored) and pools[0].step.token_bytes == planned.step
    pool = pools[0]
    for pages in pool.pages():
        pages[1] = torch.randn(pages[1].shape)
    pool.copy_pages([1], [3])
    assert pool.pages() and all(torch.equal(pages[3], pages[1]) for pages in pool.pages())
    assert pool.copied == [1, 3]
    pool.fill(float("nan"))
    assert all(pages.isnan().all() for pages in pool.pages()) and pool.step.tokens(1).isnan().all()
    pool.release()
    assert pool.bytes == 0
    pool.restore()
    assert not any(pages.any() for pages in pool.pages()) and not pool.step.index_keys(0).any()


def test_more_ranks_than_layers_are_refused() -> None:
    assert len(stored_numbers(spec_of())) == 5
    with pytest.raises(Unsupported, match=r"ranks: expected at most 5.*got 6"):
        pool_of(0, 6)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (EngineConfig(dspark=DSparkConfig(drafter="ngram")), "dspark"),
        (EngineConfig(loop="overlapped"), "loop"),
        (EngineConfig(cache=CacheConfig(host_mib=64)), "cache.host_mib"),
    ],
)
def test_what_would_have_ranks_part_ways_is_refused(config: EngineConfig, field: str) -> None:
    assert split_config(config, spec_of(), ALONE) is config
    with pytest.raises(Unsupported, match=f"^{field}: "):
        split_config(config, spec_of(), rank_of(0, 2))


def test_models_without_latents_are_refused() -> None:
    with pytest.raises(Unsupported, match="ranks: expected 1"):
        split_config(EngineConfig(), replace(spec_of(), latent=None), rank_of(0, 2))
