"""The product every linear layer uses.

Owns the choice of how x @ w.T is computed on a device. Ignores parameters and sharding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear(x_TD: torch.Tensor, weight_OD: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + b in the inputs' dtype, accumulated in fp32: y_TO."""
    return F.linear(x_TD, weight_OD, bias_O)
