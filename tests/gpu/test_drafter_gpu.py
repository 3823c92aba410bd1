"""A drafter's training on a CUDA device: the fused loss against torch, train_steps against those of a CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from engine.dspark.block_model import BlockDrafterModel
from tests.support import save_tiny
from tests.unit.trainer_bridge.drafter.worlds import World, make_trainer
from trainer_bridge.drafter.ends import training_ends
from trainer_bridge.drafter.features import FeatureExample
from trainer_bridge.drafter.row_terms import row_terms, row_terms_reference

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [4133, 49152])
def test_fused_terms_equal_torch(vocab, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = 3 * torch.randn(64, vocab, device="cuda", generator=generator)
    target = (logits + torch.randn(64, vocab, device="cuda", generator=generator)).to(dtype)
    logits = logits.to(dtype)
    logits[:, 5::7] = float("-inf")
    labels = torch.randint(0, vocab, (64,), device="cuda", generator=generator)
    weights = torch.rand(2, 64, device="cuda", generator=generator)
    found = []
    for terms in (row_terms, row_terms_reference):
        given = logits.clone().requires_grad_()
        own = terms(given * 1, target, labels, 0.8)
        assert own.distance_R is not None
        (own.ce_R * weights[0] + own.distance_R * weights[1]).sum().backward()
        assert given.grad is not None
        found.append((own, given.grad.float()))
    (fused, gradient), (plain, expected) = found
    torch.testing.assert_close(fused.ce_R, plain.ce_R, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(fused.distance_R, plain.distance_R, atol=1e-5, rtol=1e-5)
    # Where q and p are one but for rounding, either sign is right; 16 bits round what they keep.
    bound = 1e-5 if dtype == torch.float32 else 4e-3
    assert float((gradient - expected).norm() / expected.norm()) < bound
    assert not gradient[:, 5::7].any()


def test_train_steps_are_those_of_a_cpu(tmp_path):
    world = World(save_tiny(tmp_path, num_hidden_layers=2))
    items = world.items()
    there = []
    for item in items:
        assert item.last_TD is not None
        there.append(FeatureExample(item.example, item.features_TMD.cuda(), item.last_TD.cuda()))
    source = world.drafter()
    model = BlockDrafterModel(source.spec, torch.float32, "cuda")
    model.load_state_dict(source.state_dict())
    ends = training_ends(copy.deepcopy(world.parts.model).to("cuda"))
    trainers = [(make_trainer(source, world.ends), items), (make_trainer(model, ends, chunk=3), there)]
    for _ in range(4):
        cpu, gpu = (trainer.step(own) for trainer, own in trainers)
        for name, value in cpu.items():
            assert gpu[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    for one, other in zip(source.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other.cpu(), atol=1e-3, rtol=1e-2)
