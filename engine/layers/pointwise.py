"""Functions of single numbers whose bits depend on nothing but the number.

Owns silu, sigmoid and softplus in terms of torch's exp and log1p, which compute a tensor's last elements as they do
all others. torch's own silu, sigmoid and softplus use other instructions there on a CPU, so that a row's
bits would depend on how many rows there are.
"""

from __future__ import annotations

import torch

STRAIGHT = 20.0
"""Above this softplus is the identity in fp32."""


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > STRAIGHT, x, torch.log1p(torch.exp(x.clamp(max=STRAIGHT))))
