"""The policy before GRPO: random weights, then supervised training on careless demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.types import Span
from recipes.arithmetic import BOS, EOS, PAD, ArithmeticCodec, Question, TaskConfig, demonstration, token_id
from recipes.grpo.config import ModelConfig, WarmupConfig
from trainer_bridge.environment import Message
from trainer_bridge.samples import TrainingSample
from trainer_bridge.trainer import PolicyTrainer


def make_policy(config: ModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.context,
            initializer_range=config.initializer_range,
            tie_word_embeddings=True,
            bos_token_id=token_id(tokenizer, BOS),
            eos_token_id=token_id(tokenizer, EOS),
            pad_token_id=token_id(tokenizer, PAD),
        )
    )


def warm_up(
    trainer: PolicyTrainer,
    codec: ArithmeticCodec,
    eos_id: int,
    questions: Sequence[Question],
    task: TaskConfig,
    config: WarmupConfig,
    seed: int,
    observe: Callable[[int, float], None],
) -> None:
    """`config.steps` updates on fresh demonstrations; `observe` gets each step and its loss."""
    rng = random.Random(f"{seed}/warm-up")
    for step in range(config.steps):
        chosen = rng.sample(list(questions), min(config.batch, len(questions)))
        samples = [_demonstrated(question, demonstration(question, task, rng), codec, eos_id) for question in chosen]
        observe(step, trainer.supervised_step(samples))


def _demonstrated(question: Question, answer: str, codec: ArithmeticCodec, eos_id: int) -> TrainingSample:
    prompt_ids = codec.render([Message("user", question.text)], first=True)
    output_ids = [*codec.render([Message("assistant", answer)], first=False), eos_id]
    length = len(output_ids)
    return TrainingSample(
        group_id=question.text,
        index=0,
        prompt_ids=np.asarray(prompt_ids, np.uint32),
        output_ids=np.asarray(output_ids, np.uint32),
        loss_mask=np.ones(length, bool),
        rollout_logprobs=np.zeros(length, np.float32),
        spans=[Span(start=0, end=length, policy_version=0)],
        temperature=1.0,
        finish="stop",
    )
