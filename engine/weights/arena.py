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

    `room` says how many rows a module wants behind its `weight`: that is then the first rows of `wide`, which
    others write the rest of. Nobody else sees it, and what is there is lost whenever memory is released.
    """

    def __init__(
        self,
        build: Callable[[torch.device], M],
        device: torch.device,
        what: str = "weights",
        room: Callable[[nn.Module], int] | None = None,
    ) -> None:
        self._slab: Slab | None = None
        self._host: torch.Tensor | None = None
        self._used = 0
        self.wide: dict[nn.Parameter, torch.Tensor] = {}
        """By weight [N, ...]: [N + room, ...], for those with room."""
        self.releases = 0
        """How often memory was given back."""
        builder = threading.get_ident()

        def place(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
            # The hook hears of every module in the process; other threads' are not ours.
            if threading.get_ident() != builder:
                return None
            more = room(module) if room is not None and name == "weight" else 0
            shape = tuple(parameter.shape)
            if more:
                shape = shape[0] + more, *shape[1:]
            start = self._used
            self._used += aligned(torch.Size(shape).numel() * parameter.itemsize)
            if self._slab is None:
                return None
            wide = part(self._slab, start, shape, parameter.dtype)
            if not more:
                return nn.Parameter(wide, requires_grad=False)
            placed = nn.Parameter(wide[: parameter.shape[0]], requires_grad=False)
            self.wide[placed] = wide
            return placed

        hook = register_module_parameter_registration_hook(place)  # type: ignore[arg-type]
        try:
            build(torch.device("meta"))
            size, self._used = self._used, 0
            self._slab = make_slab(size, device, what)
            self.model = build(device)
        finally:
            hook.remove()
        assert self._used == size, f"{what}: two builds of one model took {self._used} and {size} bytes"

    @property
    def num_bytes(self) -> int:
        """Bytes held now; 0 while released."""
        return self._used if self._memory.mapped else 0

    @property
    def _memory(self) -> Slab:
        assert self._slab is not None, "the sizes are known"
        return self._slab

    def release(self, keep: bool) -> None:
        """Give the memory back; with `keep` the values wait in host memory. Idempotent."""
        if not self._memory.mapped:
            return
        if keep:
            # Not pinned: torch keeps pinned blocks for good and rounds them up to powers of two.
            self._host = torch.empty(self._memory.data_U.shape, dtype=torch.uint8).copy_(self._memory.data_U)
        self._memory.unmap()
        self.releases += 1

    @torch.no_grad()
    def restore(self) -> None:
        """Take memory again, at the same addresses, with the values kept. Where none were, parameters
        are NaN, so that one which no update fills can never pass for a weight. Idempotent."""
        if self._memory.mapped:
            return
        self._memory.map()
        if self._host is not None:
            self._memory.data_U.copy_(self._host)
            self._host = None
            return
        for parameter in self.model.parameters():
            parameter.fill_(float("nan"))
