"""Root-mean-square normalisation.

Owns the norm's weight and its rounding: statistics in fp32, the normalised value rounded to the
model's dtype before the weight multiplies it, as the published models were trained.
"""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Over the last dimension, of any leading shape."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight
