"""Tensors that wait in host memory while somebody else needs the device.

Owns the host copies and the moves. A tensor object keeps its identity, so that optimisers and
modules need not know; only its storage goes and comes. Ignores what the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Offload:
    """One set of tensors, out or in. Host buffers are made once and used again."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._out: list[tuple[Tensor, torch.device]] = []

    @property
    def is_out(self) -> bool:
        return bool(self._out)

    def move_out(self, tensors: Iterable[Tensor]) -> int:
        """Copy to the host and free the storages; returns the bytes freed. Without effect while
        tensors are out."""
        if self._out:
            return 0
        moved = [tensor for tensor in tensors if tensor.numel()]
        for tensor in moved:
            self._buffer(tensor).copy_(tensor.detach(), non_blocking=True)
        devices = {tensor.device for tensor in moved if tensor.device.type == "cuda"}
        for device in devices:
            torch.cuda.synchronize(device)
        freed = sum(tensor.nbytes for tensor in moved)
        for tensor in moved:
            self._out.append((tensor, tensor.device))
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if devices:
            torch.cuda.empty_cache()
        return freed

    def move_in(self) -> None:
        """Bring everything back. Without effect while it is in."""
        for tensor, device in self._out:
            tensor.data = self._buffers[id(tensor)].to(device, non_blocking=True, copy=True)
        for device in {device for _, device in self._out if device.type == "cuda"}:
            torch.cuda.synchronize(device)
        self._out.clear()

    def _buffer(self, tensor: Tensor) -> Tensor:
        """Pinned where the tensor is on a GPU: copies then run at the speed of the bus."""
        buffer = self._buffers.get(id(tensor))
        if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            self._buffers[id(tensor)] = buffer
        return buffer
