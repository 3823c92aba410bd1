"""Cross-entropy on given answers."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer_bridge.batches import Batch, Denominators


def supervised_loss(current_BT: Tensor, batch: Batch, denominators: Denominators) -> Tensor:
    """This batch's share of: minus the sum of log-probabilities over all masked tokens of the step."""
    zero = torch.zeros((), device=current_BT.device)
    return -torch.where(batch.mask_BT, current_BT, zero).sum() / denominators.tokens
