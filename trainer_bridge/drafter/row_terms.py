"""What a draft's logits say beside the target's: cross-entropy, distance, and whether both favour one token.

Owns the terms of single rows, the reference in torch, and the choice of how they are computed: in one launch
each way on a GPU (`trainer_bridge.drafter.fused_loss`), in torch elsewhere. Ignores weights and divisors.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowTerms(NamedTuple):
    """float32 [R]: -log q(label), 0 where q is 0; sum_v |q(v) - p(v)|. bool [R]: whether the lowest of the highest
    logits are those of one token. The last two are None without a target."""

    ce_R: Tensor
    distance_R: Tensor | None
    agreed_R: Tensor | None


def row_terms(logits_RV: Tensor, target_RV: Tensor | None, labels_R: Tensor, temperature: float) -> RowTerms:
    """q and p are the softmaxes of logits and target over `temperature`, in fp32. Gradients reach the logits
    alone. On a GPU they are written over the logits, which nothing else may need: one backward pass, no more."""
    if logits_RV.is_cuda:
        from trainer_bridge.drafter.fused_loss import fused_terms

        return fused_terms(logits_RV, target_RV, labels_R, temperature)
    return row_terms_reference(logits_RV, target_RV, labels_R, temperature)


def row_terms_reference(logits_RV: Tensor, target_RV: Tensor | None, labels_R: Tensor, temperature: float) -> RowTerms:
    log_q_RV = torch.log_softmax(logits_RV.float() / temperature, dim=-1)
    picked_R = log_q_RV.gather(-1, labels_R[:, None])[:, 0]
    ce_R = torch.where(picked_R.isneginf(), 0.0, -picked_R)
    if target_RV is None:
        return RowTerms(ce_R, None, None)
    with torch.no_grad():
        p_RV = torch.softmax(target_RV.float() / temperature, dim=-1)
        agreed_R = logits_RV.argmax(-1) == target_RV.argmax(-1)
    return RowTerms(ce_R, (log_q_RV.exp() - p_RV).abs().sum(-1), agreed_R)
