"""A trainer in 16 bits, offloaded between its turns, and how far it is from a rollout."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer_bridge.agreement import cached_logprobs, measure_agreement
from trainer_bridge.config import LossConfig, OptimConfig
from trainer_bridge.trainer import PolicyTrainer


def trainer(dtype: torch.dtype, rate: float = 1e-5) -> PolicyTrainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype)
    return PolicyTrainer(model, OptimConfig(learning_rate=rate, warmup_steps=0, max_tokens=20), 0)


def step(one: PolicyTrainer, make_sample, seed: int) -> None:
    samples = [make_sample(3, 5, seed=seed, index=i, advantage=1.0 - i) for i in range(4)]
    one.train_step(samples, LossConfig(is_cap=None), 5)


def test_small_updates_add_up_in_the_masters_until_16_bits_can_hold_them(make_sample) -> None:
    one = trainer(torch.bfloat16)
    before = [param.detach().clone() for param in one.model.parameters()]
    masters = [master.detach().clone() for master in one.weights.masters]
    step(one, make_sample, 0)
    changed = sum(int((p != b).sum()) for p, b in zip(one.model.parameters(), before, strict=True))
    moved = sum(int((m != b).sum()) for m, b in zip(one.weights.masters, masters, strict=True))
    total = sum(param.numel() for param in one.model.parameters())
    assert changed < total / 4 and moved > total / 2
    for param, master in zip(one.model.parameters(), one.weights.masters, strict=True):
        assert torch.equal(param, master.bfloat16()) and param.grad is None
    assert trainer(torch.float32).weights.copies == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_offloaded_trainer_goes_on_as_if_it_had_stayed(make_sample, dtype) -> None:
    stayed, left = trainer(dtype, 1e-3), trainer(dtype, 1e-3)
    for seed in range(3):
        step(stayed, make_sample, seed)
        step(left, make_sample, seed)
        held = sum(param.nbytes for param in left.model.parameters())
        freed = left.offload()
        assert freed >= (7 if dtype == torch.bfloat16 else 3) * held
        assert all(param.numel() == 0 for param in left.model.parameters()) and left.offload() == 0
        with pytest.raises(AssertionError, match="restored before it is used"):
            step(left, make_sample, seed)
        left.restore()
        left.restore()
    for (name, value), other in zip(stayed.model.state_dict().items(), left.model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    embedding, head = left.model.get_input_embeddings().weight, left.model.get_output_embeddings().weight  # type: ignore[operator]
    assert embedding is head


def test_agreement_compares_the_same_tokens_under_the_same_weights(make_sample) -> None:
    one = trainer(torch.float32)
    samples = [make_sample(3 + i % 2, 2 + i, index=i, temperature=0.7) for i in range(5)]
    samples[1].loss_mask[0] = False
    scores = one.score(samples)
    for sample, scored in zip(samples, scores, strict=True):
        (cached,) = cached_logprobs(one.model, [sample])
        torch.testing.assert_close(cached, scored, atol=1e-5, rtol=1e-5)
        sample.rollout_logprobs = scored.numpy() + 0.25
    found = measure_agreement(one, samples)
    assert found.tokens == sum(len(sample.output_ids) for sample in samples) - 1
    assert found.rollout_trainer == pytest.approx(0.25, abs=1e-5) and found.cached_uncached < 1e-5
    for sample, scored in zip(samples, scores, strict=True):
        sample.rollout_logprobs = scored.numpy()
    assert measure_agreement(one, samples).rollout_trainer < 1e-6
    assert found.rollout_exact == pytest.approx(0.25, abs=1e-5) and found.trainer_exact < 1e-5
    wobbling = measure_agreement(trainer(torch.bfloat16), samples)
    # How far 16-bit products of other shapes are apart is the machine's: with instructions for them, not at all.
    assert 0.0 <= wobbling.cached_uncached < 0.1 and wobbling.rollout_trainer > 1e-4
    # The other one's weights had not been rounded.
    assert 1e-5 < wobbling.trainer_exact < wobbling.rollout_trainer + wobbling.rollout_exact
