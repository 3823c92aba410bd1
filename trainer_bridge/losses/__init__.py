"""Losses of policies, with every divisor stated and fixed before a step is split."""

from trainer_bridge.losses.policy import policy_loss
from trainer_bridge.losses.supervised import supervised_loss

__all__ = ["policy_loss", "supervised_loss"]
