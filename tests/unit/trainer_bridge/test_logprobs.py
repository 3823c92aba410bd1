"""Trainer log-probabilities, padded and packed, and the trainer's update. Cases C1, J9."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from engine.errors import InvalidRequest
from trainer_bridge.advantages import assign_advantages
from trainer_bridge.batches import Denominators, micro_batches, pack, pad
from trainer_bridge.config import FLOOR, LossConfig, OptimConfig
from trainer_bridge.logprobs import entropies, model_logits, token_logprobs
from trainer_bridge.trainer import PolicyTrainer


def tiny_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            pad_token_id=0,
        )
    ).eval()


def test_case_c1_temperature_divides_logits() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(1, 4, 4)
    targets = torch.arange(4)[None]
    scored = token_logprobs(logits, targets, torch.full((1, 4), 0.5))
    torch.testing.assert_close(scored, torch.tensor([[-0.1451, -2.1451, -4.1451, -6.1451]]), atol=1e-4, rtol=0)
    at_one = token_logprobs(logits, targets, torch.ones(1, 4))
    torch.testing.assert_close(at_one, torch.tensor([[-0.4402, -1.4402, -2.4402, -3.4402]]), atol=1e-4, rtol=0)
    expected = torch.distributions.Categorical(logits=logits / 0.5).entropy()
    torch.testing.assert_close(entropies(logits, torch.full((1, 4), 0.5)), expected)


def direct(model, sample) -> torch.Tensor:
    """log p of each output token by one unpadded run."""
    ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.output_ids.tolist()])[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(sample.prompt_ids) - 1 : -1] / (sample.temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.tensor(sample.output_ids.tolist())[:, None])[:, 0]


@pytest.mark.parametrize("packed", [False, True])
def test_case_c1_batches_give_each_sample_what_it_gets_alone(make_sample, packed) -> None:
    model = tiny_model()
    samples = [make_sample(1 + i, 7 - i, index=i, temperature=t) for i, t in enumerate([0.6, 1.0, 1.5, 0.0, 1.0, 0.3])]
    batch = pack(samples, 20, pad_id=0) if packed else pad(samples, pad_id=0)
    with torch.no_grad():
        scored = token_logprobs(model_logits(model, batch), batch.targets_BT, batch.temperature_BT)
    expected = torch.cat([direct(model, sample) for sample in samples]).sort().values
    torch.testing.assert_close(scored[batch.mask_BT].sort().values, expected, atol=2e-5, rtol=1e-5)
    if packed:
        assert batch.ids_BT.shape[0] == 3 < len(samples)


def test_batch_columns_line_up_with_the_tokens_they_predict(make_sample) -> None:
    sample = make_sample(3, 4, mask=[True, False, True, True], advantage=2.0)
    batch = pad([sample, make_sample(1, 9, index=1)], pad_id=0)
    assert batch.mask_BT[0].tolist() == [False, False, True, False, True, True] + [False] * 4
    assert batch.targets_BT[0, 2:6].tolist() == sample.output_ids.tolist()
    assert batch.rollout_logprobs_BT[0, 2:6].tolist() == sample.rollout_logprobs.tolist()
    assert batch.sample_tokens_BT[0, 0] == 3 and batch.advantages_BT[0, 2] == 2.0
    assert Denominators.of([sample], 8) == Denominators(tokens=3, samples=1, max_new=8)


def test_micro_batches_keep_the_bound_and_every_sample(make_sample) -> None:
    samples = [make_sample(2, 1 + i % 9, index=i) for i in range(30)]
    parts = list(micro_batches(samples, 40))
    assert sorted(s.index for part in parts for s in part) == list(range(30))
    assert all(max(s.num_tokens for s in part) * len(part) <= 40 for part in parts)
    assert [len(part) for part in micro_batches(samples, 1)] == [1] * 30
    with pytest.raises(InvalidRequest, match="row_tokens"):
        pack(samples, 5, pad_id=0)


def updated(samples, loss: LossConfig, **options) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    model = tiny_model()
    trainer = PolicyTrainer(model, OptimConfig(learning_rate=1e-2, warmup_steps=0, clip_norm=1e9, **options), 0)
    # Plain gradient descent: Adam's first step is the gradient's sign and would hide its size.
    trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
    metrics = trainer.train_step(samples, loss, max_new=9)
    return dict(model.state_dict()), metrics


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_case_j9_update_does_not_depend_on_micro_batches_or_packing(make_sample, kind) -> None:
    samples = [make_sample(3, n, index=i, reward=float(i % 2)) for i, n in enumerate([1, 1, 4, 4, 9, 2])]
    assign_advantages(samples, divide_by_std=True)
    loss = LossConfig(kind=kind)
    whole, metrics = updated(samples, loss)
    assert metrics["actor/grad_norm"] > 1e-3
    for options in ({"max_tokens": 1}, {"max_tokens": 16}, {"max_tokens": 14, "packed": True}):
        other, other_metrics = updated(samples, loss, **options)
        for name, value in whole.items():
            torch.testing.assert_close(other[name], value, atol=1e-6, rtol=1e-5)
        assert other_metrics["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-4, abs=1e-6)


def test_a_rewarded_answer_becomes_likelier_and_several_updates_clip(make_sample) -> None:
    samples = [make_sample(3, 4, index=i, reward=float(i == 0)) for i in range(4)]
    assign_advantages(samples, divide_by_std=True)
    trainer = PolicyTrainer(tiny_model(), OptimConfig(learning_rate=5e-3, warmup_steps=0, updates=2), 0)
    before = [scores.sum().item() for scores in trainer.score(samples)]
    for sample, scores in zip(samples, trainer.score(samples), strict=True):
        sample.rollout_logprobs = scores.numpy()
    first = trainer.train_step(samples, LossConfig(), 9)
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-5
    for _ in range(5):
        metrics = trainer.train_step(samples, LossConfig(is_cap=None), 9)
    after = [scores.sum().item() for scores in trainer.score(samples)]
    assert after[0] > before[0] and sum(after[1:]) < sum(before[1:])
    assert metrics["actor/pg_clipfrac"] > 0 and trainer.updates == 12


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(make_sample) -> None:
    samples = [make_sample(3, 4, index=i, advantage=1.0) for i in range(2)]
    trainer = PolicyTrainer(tiny_model(), OptimConfig(), 0)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    samples[0].advantage = float("nan")
    metrics = trainer.train_step(samples, LossConfig(), 9)
    assert metrics["actor/skipped_updates"] == 1 and trainer.updates == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    samples[0].advantage = 1.0
    trainer.train_step(samples, LossConfig(), 9)
    assert trainer.updates == 1


def test_rate_rises_then_falls_to_its_floor() -> None:
    config = OptimConfig(warmup_steps=4, decay_steps=14)
    assert [config.rate(i) for i in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert config.rate(4) == 1.0 and config.rate(9) == pytest.approx((1 + FLOOR) / 2)
    assert config.rate(14) == config.rate(99) == pytest.approx(FLOOR)
    with pytest.raises(InvalidRequest, match=r"^optim\.decay_steps"):
        OptimConfig(warmup_steps=5, decay_steps=5)
