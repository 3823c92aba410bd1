"""A run of memory whose addresses outlive its contents.

Owns giving physical memory back to the system and taking it again at the same addresses, so that
whatever holds them (views, captured graphs) stays valid. Ignores what is stored.

On a GPU that is the driver's virtual memory management (`engine.memory.cuda_slab`); on the CPU a
private anonymous mapping whose pages the kernel takes back.

Shapes: U bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch


class Slab(Protocol):
    """`data_U` is uint8 and the same object for life. While unmapped nobody may touch it. What
    `map` brings back is undefined until written: owners fill it."""

    data_U: torch.Tensor

    @property
    def mapped(self) -> bool: ...

    def map(self) -> None:
        """Back it with memory. Idempotent; raises `TooLarge` where there is too little, and then has
        changed nothing."""
        ...

    def unmap(self) -> None:
        """Give the memory back once all work that uses it is done. Idempotent."""
        ...


def make_slab(num_bytes: int, device: torch.device, what: str) -> Slab:
    """A mapped slab of at least `num_bytes`; `what` names it in errors."""
    assert num_bytes > 0, f"{what}: a slab of {num_bytes} bytes"
    if device.type == "cuda":
        from engine.memory.cuda_slab import CudaSlab

        return CudaSlab(num_bytes, device, what)
    return HostSlab(num_bytes)


class HostSlab:
    """Pages come as they are touched; unmapped ones read as zeros."""

    def __init__(self, num_bytes: int) -> None:
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data_U = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._mapped = True

    @property
    def mapped(self) -> bool:
        return self._mapped

    def map(self) -> None:
        self._mapped = True

    def unmap(self) -> None:
        if self._mapped:
            self._pages.madvise(mmap.MADV_DONTNEED)
            self._mapped = False


ALIGNMENT = 512
"""Bytes that parts of a slab start at multiples of: what torch's own allocator promises on a GPU."""


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def part(slab: Slab, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the slab's bytes from `start` on."""
    assert start % ALIGNMENT == 0, f"a part at byte {start} is not aligned to {ALIGNMENT}"
    count = dtype.itemsize * torch.Size(shape).numel()
    return slab.data_U[start : start + count].view(dtype).view(shape)


class SlabTensors:
    """Tensors in a slab of their own: zero at first, and whenever their memory has come back."""

    def __init__(
        self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device | str, what: str
    ) -> None:
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
        starts = [0, *accumulate(map(aligned, sizes))]
        self.device = torch.device(device)
        self._bytes = sum(sizes)
        self._slab = make_slab(starts[-1], self.device, what)
        self.tensors = [part(self._slab, start, *kind) for start, kind in zip(starts, kinds, strict=False)]
        """The same ones for life."""
        self._zero()

    @property
    def released(self) -> bool:
        return not self._slab.mapped

    @property
    def bytes(self) -> int:
        """Bytes held now; 0 while released."""
        return 0 if self.released else self._bytes

    def release(self) -> None:
        """Give the memory back. Idempotent."""
        self._slab.unmap()

    def restore(self) -> None:
        """Take memory again, at the same addresses. Idempotent."""
        if self.released:
            self._slab.map()
            self._zero()

    def _zero(self) -> None:
        if self.device.type != "cpu":  # a fresh mapping of host memory is zero, and stays unbacked until touched
            self._slab.data_U.zero_()
