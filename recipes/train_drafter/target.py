"""The model that a drafter is made for, and how it is spoken to.

Owns finding or teaching it. Ignores what it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from engine.errors import InvalidRequest
from recipes.arithmetic import CharacterCodec, make_sums
from recipes.chat_codec import ChatCodec
from recipes.grpo.config import ChatModel
from recipes.grpo.policy import make_policy
from recipes.grpo.warmup import warm_up
from recipes.tokenizers import mask_token
from recipes.train_drafter.config import TaughtModel
from rollout.model_catalog import resolve_model
from trainer_bridge.checkpoint import save_policy
from trainer_bridge.environment import TextCodec


@dataclass(frozen=True, slots=True)
class Target:
    """`stop_ids` end an answer beside the model's own; `mask_id` fills a drafter's block: a token that
    conversations do not contain."""

    name: str
    folder: Path
    codec: TextCodec
    stop_ids: list[int]
    mask_id: int


def find_target(
    config: ChatModel | TaughtModel, output: Path, seed: int, observe: Callable[[int, int, float], None]
) -> Target:
    """`observe` gets step, steps and loss while a target is taught; once taught it is kept in `output`."""
    if isinstance(config, ChatModel):
        folder = resolve_model(config.name)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.chat_template is None or tokenizer.eos_token_id is None:
            raise InvalidRequest(field="target.name", expected="a model with a chat template", actual=config.name)
        return Target(config.name, folder, ChatCodec(tokenizer), [tokenizer.eos_token_id], mask_token(tokenizer))
    folder = output / "target"
    saved = folder if (folder / "config.json").is_file() else None
    policy = make_policy(config.shape, seed, saved)
    if saved is None:
        questions = make_sums(config.task, seed).training
        steps = config.warmup.steps
        warm_up(policy, questions, config.task, config.warmup, seed, lambda step, loss: observe(step + 1, steps, loss))
        save_policy(folder, policy.model, policy.tokenizer)
    assert isinstance(policy.codec, CharacterCodec)
    return Target("a model taught sums", folder, policy.codec, [policy.end_id], mask_token(policy.tokenizer))
