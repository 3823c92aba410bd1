"""Root-mean-square normalisation.

Owns the norm's weight and its rounding: statistics in fp32, the normalised value rounded to the
model's dtype before the weight multiplies it (after, in unit norms), as the published models were trained.
Rows on a GPU take the kernel that computes the same in one launch, where no gradient is wanted.
"""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Over the last dimension, of any leading shape."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.inverse_width, self.epsilon = 1.0 / width, eps
        # Derived, not a weight: it lives beside the parameters on their device.
        self.eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dim() == 2 and x.is_contiguous() and not torch.is_grad_enabled():
            from engine.kernels.rms_norm import rms_norm

            return rms_norm(x, self.weight, self.epsilon)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=self.inverse_width).rsqrt_()
        if wide is x or wide.requires_grad:  # neither the input nor what a gradient needs may change
            return (wide * scale).to(x.dtype).mul_(self.weight)
        return wide.mul_(scale).to(x.dtype).mul_(self.weight)

    __call__ = forward  # no hooks: a layer is called hundreds of times a token


class UnitRMSNorm(RMSNorm):
    """Multiplies by 1 + weight in fp32 and rounds once, after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and not torch.is_grad_enabled():
            from engine.kernels.rms_norm import rms_norm

            rows = x.reshape(-1, x.shape[-1]).contiguous()
            return rms_norm(rows, self.weight, self.epsilon, unit=True).view(x.shape)
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self.eps, length, length, value=self.inverse_width).rsqrt_()
        return (wide * scale * (1.0 + self.weight.float())).to(x.dtype)

    __call__ = forward
