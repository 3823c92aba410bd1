"""A drafter's context in Triton's interpreter against its reference and its model."""

from __future__ import annotations

import pytest
import torch

from engine.attention.registry import make_attention
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import SharedEnds
from engine.dspark.drafter import Committed
from engine.kernels.draft_context import ContextLayers, write_context, write_context_reference
from engine.layers.rotary import Rotary
from engine.memory.kv_pool import KVPool
from engine.models.spec import RopeSpec
from tests.unit.dspark.drafters import random_drafter
from tests.unit.kernels.test_fused_ops_interpreted import noise, poison


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("kv_heads", "size"), [(3, 12), pytest.param(5, 64, marks=pytest.mark.slow)])
def test_keys_and_values_of_all_layers(kv_heads, size, normed):
    rotary = Rotary(RopeSpec(theta=100.0), size, 32, torch.float32, torch.device("cpu"))
    norms = [noise(size, seed=2 + layer) for layer in range(2)] if normed else []
    pools = [[poison(10, 2 * kv_heads, size) for _ in range(2)] for _ in range(2)]
    expected, actual = (ContextLayers.of(pool, norms, 1e-6, rotary.cos_CE, rotary.sin_CE) for pool in pools)
    # A position past the table takes the last one, padding is skipped.
    kv, positions, slots = noise(2, 4, 2 * kv_heads * size), torch.tensor([0, 40, 7, 31]), torch.tensor([5, 1, -1, 8])
    write_context_reference(expected, kv, positions, slots)
    write_context(actual, kv, positions, slots)
    for one, other in zip(*pools, strict=True):
        torch.testing.assert_close(other, one, atol=2e-6, rtol=2e-5, equal_nan=True)
        assert one[[5, 1, 8]].isfinite().all() and one[[0, 2]].isnan().all()


def test_a_drafter_with_kernels_writes_what_its_model_says():
    """New weights reach it as well: they are written where the old ones were."""
    model = random_drafter(0)
    spec = model.spec.backbone
    features = {layer: noise(5, spec.hidden, seed=layer) for layer in model.spec.target_layers}
    ends = SharedEnds(lambda ids_T: ids_T, lambda hidden_RD: hidden_RD)
    pools = [KVPool(spec, 4, 4, torch.float32, "cpu") for _ in range(2)]
    backend = make_attention("torch_ref", spec, torch.device("cpu"))
    plain, fused = (BlockDrafter(model, ends, pool, backend) for pool in pools)
    fused.use_kernels()
    for scale in (1.0, 1.5):
        for parameter in model.parameters():
            parameter.mul_(scale)
        token = torch.arange(5)
        for drafter in (plain, fused):
            drafter.commit(Committed([], [], token, token + 3, token + 6, features))
        for layer in range(spec.num_layers):
            one, other = (pool.tokens(layer)[4:] for pool in pools)
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)
            assert one[2:7].abs().min() > 0
