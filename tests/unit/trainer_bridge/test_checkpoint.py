"""Checkpoints: whole or absent, and a resumed trainer goes on as if it had not stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.errors import InvalidRequest
from recipes.arithmetic import make_tokenizer
from trainer_bridge.checkpoint import latest_checkpoint, load_policy, save_checkpoint, save_policy
from trainer_bridge.config import LossConfig, OptimConfig
from trainer_bridge.trainer import PolicyTrainer

CONFIG = OptimConfig(learning_rate=1e-2, warmup_steps=3, decay_steps=8)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )


def saving(trainer: PolicyTrainer):
    return lambda folder: save_policy(folder, trainer.model, make_tokenizer())


def steps(trainer: PolicyTrainer, make_sample, first: int, count: int) -> None:
    for step in range(first, first + count):
        samples = [make_sample(3, 5, seed=step, index=i, advantage=1.0 - i) for i in range(3)]
        trainer.train_step(samples, LossConfig(), max_new=5)


def test_a_resumed_trainer_reaches_the_same_weights_bit_for_bit(make_sample, tmp_path: Path) -> None:
    straight = PolicyTrainer(model(), CONFIG, 0)
    steps(straight, make_sample, 0, 6)
    first = PolicyTrainer(model(), CONFIG, 0)
    steps(first, make_sample, 0, 3)
    save_checkpoint(tmp_path, 3, first, saving(first), {"policy_version": 3})
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint.run == {"policy_version": 3}
    second = PolicyTrainer(load_policy(checkpoint.policy), CONFIG, 0)
    checkpoint.restore(second)
    assert second.updates == 3 and second.scheduler.get_last_lr() == first.scheduler.get_last_lr()
    steps(second, make_sample, 3, 3)
    for (name, value), other in zip(
        straight.model.state_dict().items(), second.model.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), name


def test_only_the_newest_checkpoints_are_kept_and_partial_ones_are_not_found(tmp_path: Path) -> None:
    trainer = PolicyTrainer(model(), CONFIG, 0)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, step, trainer, saving(trainer), {"step": step})
    (tmp_path / ".step-000099.partial").mkdir()
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "step-000002",
        "step-000010",
    ]
    assert latest_checkpoint(tmp_path).run == {"step": 10}
    with pytest.raises(InvalidRequest, match="a folder with a checkpoint"):
        latest_checkpoint(tmp_path / "nowhere")


def test_a_saved_policy_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    policy = model()
    for _ in range(2):  # saving over an earlier one replaces it
        save_policy(tmp_path / "policy", policy, make_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").decode([4, 5]) == "01"
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(loaded(ids).logits, policy.eval()(ids).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
