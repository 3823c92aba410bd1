"""What an optimiser works on where the model computes in 16 bits: copies of its parameters in fp32.

Owns the copies, the gradients they gather over micro-batches, and the way back. A parameter that
is fp32 already is its own master. Ignores the optimiser. Without masters most updates would round
away: bfloat16 keeps 8 bits, and a step changes less than the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MasterWeights:
    """`params` are the trained parameters in order, `masters` what the optimiser takes for them."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self.params = list(params)
        self.masters = [
            param if param.dtype == torch.float32 else nn.Parameter(param.detach().float()) for param in self.params
        ]

    @property
    def copies(self) -> list[Tensor]:
        """The masters that are not parameters of the model themselves."""
        return [master for master, param in zip(self.masters, self.params, strict=True) if master is not param]

    def gather(self) -> None:
        """Add the parameters' gradients to their masters', and clear them."""
        for master, param in zip(self.masters, self.params, strict=True):
            if master is not param and param.grad is not None:
                gradient = param.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                param.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the parameters, in place."""
        for master, param in zip(self.masters, self.params, strict=True):
            if master is not param:
                param.copy_(master)

    @torch.no_grad()
    def load(self, copies: list[Tensor]) -> None:
        """Take saved copies back."""
        for master, saved in zip(self.copies, copies, strict=True):
            master.copy_(saved)
