"""All parameters of a model in one slab.

Owns where each parameter lies. Ignores values: whoever maps the arena anew fills it. Derived
tensors that no checkpoint holds (rotary tables, epsilons) are small and stay outside, so that
nothing can be forgotten on return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from engine.memory.slab import Slab, aligned, make_slab, part

M = TypeVar("M", bound=nn.Module)


class WeightArena(Generic[M]):
    """Build a model whose parameters are views of one slab: `arena.model`.

    `build` makes the model on a device it is given. It runs twice, first without storage to learn
    the sizes, so that memory never holds the weights twice. Parameters and their addresses stay for
    the arena's life.
    """

    def __init__(self, build: Callable[[torch.device], M], device: torch.device, what: str = "weights") -> None:
        sizes = [aligned(parameter.nbytes) for parameter in build(torch.device("meta")).parameters()]
        self._slab: Slab = make_slab(sum(sizes), device, what)
        self._host: torch.Tensor | None = None
        self._used = 0
        builder = threading.get_ident()

        def place(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
            # The hook hears of every module in the process; other threads' are not ours.
            if threading.get_ident() != builder:
                return None
            start, self._used = self._used, self._used + aligned(parameter.nbytes)
            return nn.Parameter(part(self._slab, start, tuple(parameter.shape), parameter.dtype), requires_grad=False)

        hook = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]
        try:
            self.model = build(device)
        finally:
            hook.remove()
        assert self._used == sum(sizes), f"{what}: two builds of one model took {self._used} and {sum(sizes)} bytes"

    @property
    def num_bytes(self) -> int:
        """Bytes held now; 0 while released."""
        return self._used if self._slab.mapped else 0

    def release(self, keep: bool) -> None:
        """Give the memory back; with `keep` the values wait in host memory. Idempotent."""
        if not self._slab.mapped:
            return
        if keep:
            # Not pinned: torch keeps pinned blocks for good and rounds them up to powers of two.
            self._host = torch.empty(self._slab.data_U.shape, dtype=torch.uint8).copy_(self._slab.data_U)
        self._slab.unmap()

    @torch.no_grad()
    def restore(self) -> None:
        """Take memory again, at the same addresses, with the values kept. Where none were, parameters
        are NaN, so that one which no update fills can never pass for a weight. Idempotent."""
        if self._slab.mapped:
            return
        self._slab.map()
        if self._host is not None:
            self._slab.data_U.copy_(self._host)
            self._host = None
            return
        for parameter in self.model.parameters():
            parameter.fill_(float("nan"))
