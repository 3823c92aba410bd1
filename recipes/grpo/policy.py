"""The policy a run starts from, with its tokenizer and the way it is spoken to.

Owns making or loading it. Ignores what it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import InvalidRequest
from recipes.arithmetic import BOS, EOS, PAD, CharacterCodec, make_tokenizer, token_id
from recipes.chat_codec import ChatCodec
from recipes.grpo.config import ChatModel, RandomModel
from rollout.model_catalog import resolve_model
from trainer_bridge.checkpoint import load_policy
from trainer_bridge.environment import TextCodec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Policy:
    """`end_id` ends an answer, `pad_id` fills rows of batches and is never looked at."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    codec: TextCodec
    end_id: int
    pad_id: int


def make_policy(config: RandomModel | ChatModel, seed: int, saved: Path | None = None) -> Policy:
    """The policy of `config`, its weights from the folder `saved` where there is one."""
    if isinstance(config, RandomModel):
        characters = make_tokenizer()
        return Policy(
            model=_random_model(config, seed) if saved is None else load_policy(saved),
            tokenizer=characters,
            codec=CharacterCodec(characters),
            end_id=token_id(characters, EOS),
            pad_id=token_id(characters, PAD),
        )
    if config.dtype not in DTYPES:
        raise InvalidRequest(field="model.dtype", expected=f"one of {sorted(DTYPES)}", actual=config.dtype)
    folder = resolve_model(config.name)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
        raise InvalidRequest(field="model.name", expected="a model with a chat template and an end", actual=config.name)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model = load_policy(saved or folder, DTYPES[config.dtype])
    return Policy(model, tokenizer, ChatCodec(tokenizer), tokenizer.eos_token_id, pad_id)


def _random_model(config: RandomModel, seed: int) -> LlamaForCausalLM:
    tokenizer = make_tokenizer()
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
