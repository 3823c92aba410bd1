"""The target's embedding and head as a drafter is trained with them.

Owns logits in the weights' dtype, of which a train_step has gigabytes: nothing is gained by widening what was
rounded already. Ignores how serving computes them (`engine.dspark.block_model.shared_ends`).
"""

from __future__ import annotations

import torch

from engine.dspark.block_model import SharedEnds
from engine.models.decoder import DenseDecoderLM


def training_ends(model: DenseDecoderLM) -> SharedEnds:
    """Frozen; gradients pass through the head to the states it reads."""
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    scale, cap = model.spec.scales.logits, model.spec.logit_softcap

    def logits(hidden_RD: torch.Tensor) -> torch.Tensor:
        logits_RV = head.project(hidden_RD.to(head.weight.dtype))
        if scale == 1.0 and cap is None:
            return logits_RV
        scaled_RV = logits_RV.float() * scale
        return scaled_RV if cap is None else torch.tanh(scaled_RV / cap) * cap

    return SharedEnds(model.model.embed_tokens, logits)
