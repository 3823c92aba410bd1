"""The case book's adapters as peft folders, and what peft makes of them, one sequence at a time."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM

from engine.types import AdapterRef, GroupRequest, SamplingParams
from tests.support import prompt

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(base: Path, folder: Path, seed: int, **options) -> Path:
    """LA and LB of the case book by default: r = 4, alpha = 8, random A and B on all linear layers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": ALL} | options))
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5 / math.sqrt(parameter.shape[-1]))
    adapted.save_pretrained(folder)
    return folder


@lru_cache(maxsize=16)
def peft_model(base: Path, folder: Path):
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, folder).eval()


@lru_cache(maxsize=256)
@torch.inference_mode()
def _logprobs(base: Path, folder: Path, ids: tuple[int, ...]) -> torch.Tensor:
    logits = peft_model(base, folder)(torch.tensor([ids]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)


def logprobs_of(base: Path, folder: Path, ids) -> torch.Tensor:
    return _logprobs(base, folder, tuple(map(int, ids))).clone()


def greedy_of(base: Path, folder: Path, ids, num: int) -> list[int]:
    sequence = [int(i) for i in ids]
    for _ in range(num):
        sequence.append(int(logprobs_of(base, folder, sequence)[-1].argmax()))
    return sequence[len(ids) :]


def ask_with(name: str | None, group_id: str, ids=None, n: int = 1, rev=None, on_publish="finish", **sampling):
    """A greedy request of the policy `name`, the base's where that is None."""
    ref = None if name is None else AdapterRef(name=name, rev=rev, on_publish=on_publish)
    params = SamplingParams(**({"temperature": 0.0, "max_new": 12} | sampling))
    ids = prompt(24) if ids is None else np.asarray(ids, dtype=np.uint32)
    return GroupRequest(group_id=group_id, prompt_ids=ids, n=n, sampling=params, adapter=ref)
