"""A trainer's log-probabilities of given tokens.

Owns the one formula that makes them comparable with rollouts: log softmax of logits over the
rollout's temperature, in fp32. Dividing a log-probability by the temperature is something else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer_bridge.batches import Batch


def token_logprobs(logits_BTV: Tensor, targets_BT: Tensor, temperature_BT: Tensor) -> Tensor:
    """log p(target) at each position, fp32 [B, T]."""
    scaled_BTV = logits_BTV.float() / temperature_BT[..., None]
    chosen_BT = scaled_BTV.gather(-1, targets_BT[..., None])[..., 0]
    return chosen_BT - torch.logsumexp(scaled_BTV, dim=-1)


def entropies(logits_BTV: Tensor, temperature_BT: Tensor) -> Tensor:
    """Entropy in nats of the same distributions, fp32 [B, T]."""
    logprobs_BTV = (logits_BTV.float() / temperature_BT[..., None]).log_softmax(-1)
    return -(logprobs_BTV.exp() * logprobs_BTV).sum(-1)


def model_logits(model: nn.Module, batch: Batch, start: int = 0) -> Tensor:
    """Logits of a transformers causal model at a batch's positions from `start` on, [B, T - start, V]."""
    return model(
        input_ids=batch.ids_BT,
        position_ids=batch.positions_BT,
        attention_mask=batch.attention_mask,
        use_cache=False,
        logits_to_keep=batch.ids_BT.shape[1] - start,
    ).logits
