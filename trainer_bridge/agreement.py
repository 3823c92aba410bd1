"""How far rollout and trainer log-probabilities of the same tokens lie apart, and how far they may.

Owns the measurement: mean |rollout - trainer| over the sampled tokens, and beside it, on the same
tokens and weights, what 16-bit arithmetic costs: the trainer's own model against itself with a
key/value cache, one token at a time as in generation, and both sides against the model computed in
32 bits. The first of these is 0 for texts so short that a GPU sums both ways in the same order; the
last says which side the difference comes from. Ignores who sampled.

Shapes: R rows (samples whose prompts have equal length), T new tokens, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer_bridge.logprobs import token_logprobs
from trainer_bridge.samples import TrainingSample
from trainer_bridge.tally import Tally
from trainer_bridge.trainer import PolicyTrainer

MAX_ROWS = 64
MAX_EXACT = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Agreement:
    """Mean absolute differences in nats over `tokens` trained tokens; those to `exact` values are None for a
    model of more than `MAX_EXACT` parameters, whose 32-bit copy may not fit."""

    tokens: int
    rollout_trainer: float
    cached_uncached: float
    rollout_exact: float | None
    trainer_exact: float | None


def measure_agreement(trainer: PolicyTrainer, samples: Sequence[TrainingSample]) -> Agreement:
    """Over samples of the policy the trainer holds now."""
    tally, exact = Tally(), _exact(trainer.model)
    for rows in _rows(samples):
        passes = [cached_logprobs(model, rows).cpu() for model in (trainer.model, exact) if model is not None]
        for row, (sample, uncached_T) in enumerate(zip(rows, trainer.score(rows), strict=True)):
            rollout_T = torch.from_numpy(np.array(sample.rollout_logprobs))
            cached_T, *exact_T = (values_RT[row, : len(uncached_T)] for values_RT in passes)
            differences = {"rollout": rollout_T - uncached_T, "cached": cached_T - uncached_T}
            if exact_T:
                differences |= {"rollout_exact": rollout_T - exact_T[0], "trainer_exact": uncached_T - exact_T[0]}
            mask_T = torch.from_numpy(sample.loss_mask)
            for name, values_T in differences.items():
                tally.add(name, float(values_T[mask_T].abs().double().sum()), sample.num_trained)
    tokens = sum(sample.num_trained for sample in samples)
    ends = (tally.mean(name) if exact is not None else None for name in ("rollout_exact", "trainer_exact"))
    return Agreement(tokens, tally.mean("rollout"), tally.mean("cached"), *ends)


def _exact(model: nn.Module) -> nn.Module | None:
    """The same weights for sums in 32 bits; None where they are too many."""
    params = list(model.parameters())
    if all(param.dtype == torch.float32 for param in params):
        return model
    return copy.deepcopy(model).float() if sum(param.numel() for param in params) <= MAX_EXACT else None


@torch.no_grad()
def cached_logprobs(model: nn.Module, rows: Sequence[TrainingSample]) -> Tensor:
    """log p of output tokens, fp32 [R, T], prompts in one pass and then token by token through the
    model's cache. Prompts have equal length; columns past a row's end mean nothing."""
    device = next(model.parameters()).device
    prompts = torch.tensor(np.stack([sample.prompt_ids for sample in rows]).astype(np.int64), device=device)
    longest = max(len(sample.output_ids) for sample in rows)
    outputs = np.zeros((len(rows), longest), np.int64)
    for row, sample in enumerate(rows):
        outputs[row, : len(sample.output_ids)] = sample.output_ids
    targets_RT = torch.from_numpy(outputs).to(device)
    temperature_R1 = torch.tensor([[sample.temperature or 1.0] for sample in rows], device=device)
    columns = []
    state: dict[str, Any] = {}
    ids = prompts
    for place in range(longest):
        result = model(input_ids=ids, use_cache=True, logits_to_keep=1, **state)
        ids = targets_RT[:, place : place + 1]
        columns.append(token_logprobs(result.logits, ids, temperature_R1))
        # The argument has the name of the field: `cache`, or `past_key_values` in earlier releases.
        field = "cache" if "cache" in result else "past_key_values"
        state = {field: result[field]}
    return torch.cat(columns, dim=1)


def _rows(samples: Sequence[TrainingSample]) -> Iterator[list[TrainingSample]]:
    by_prompt: dict[int, list[TrainingSample]] = defaultdict(list)
    for sample in samples:
        by_prompt[len(sample.prompt_ids)].append(sample)
    for members in by_prompt.values():
        for start in range(0, len(members), MAX_ROWS):
            yield members[start : start + MAX_ROWS]
