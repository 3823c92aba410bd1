"""Device memory behind an address range of its own.

Owns one reservation of the GPU's address space and the physical memory that comes and goes behind
it, through the driver's virtual memory management. Ignores torch's caching allocator, which knows
nothing of this memory: `torch.cuda.memory_allocated` does not count it, `mem_get_info` does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from engine.errors import TooLarge, Unsupported

try:
    from cuda.bindings import driver  # type: ignore[import-not-found]
except ImportError:  # without a GPU nobody needs it
    driver: Any = None


class CudaSlab:
    def __init__(self, num_bytes: int, device: torch.device, what: str) -> None:
        if driver is None:
            raise Unsupported(
                field="cuda-bindings", expected="the package, which torch for CUDA brings along", actual="not installed"
            )
        self._range = _Range(num_bytes, torch.device(device), what)
        self._range.map()
        # The tensor keeps the range alive, and with it the addresses, for as long as any view exists.
        self.data_U: torch.Tensor = torch.as_tensor(self._range, device=self._range.device)

    @property
    def mapped(self) -> bool:
        return self._range.handle is not None

    def map(self) -> None:
        self._range.map()

    def unmap(self) -> None:
        self._range.unmap()


class _Range:
    """The reservation, as torch takes foreign memory (`__cuda_array_interface__`)."""

    def __init__(self, num_bytes: int, device: torch.device, what: str) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.what = what
        self.handle: Any = None
        torch.cuda.synchronize(self.device)  # the driver needs torch's context on this thread
        self._place = driver.CUmemLocation()
        self._place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._place.id = self.device.index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = self._place
        unit = _call(
            driver.cuMemGetAllocationGranularity,
            self._properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
        self.num_bytes = -(-num_bytes // unit) * unit
        status, address = driver.cuMemAddressReserve(self.num_bytes, unit, 0, 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise TooLarge(field=what, expected=f"{self.num_bytes} bytes of addresses", actual=status.name)
        self.address = int(address)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }
        # At exit the driver takes everything back by itself, and may be gone before we are.
        self._end = weakref.finalize(self, _give_back, self.address, self.num_bytes, box := [None])
        self._end.atexit = False
        self._box = box

    def map(self) -> None:
        if self.handle is not None:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            handle = self._create()
            try:
                _call(driver.cuMemMap, self.address, self.num_bytes, 0, handle, 0)
                access = driver.CUmemAccessDesc()
                access.location = self._place
                access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                _call(driver.cuMemSetAccess, self.address, self.num_bytes, [access], 1)
            except RuntimeError:
                _call(driver.cuMemRelease, handle)
                raise
        self.handle = self._box[0] = handle

    def unmap(self) -> None:
        if self.handle is None:
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize(self.device)
            _call(driver.cuMemUnmap, self.address, self.num_bytes)
            _call(driver.cuMemRelease, self.handle)
        self.handle = self._box[0] = None

    def _create(self) -> Any:
        """Physical memory; torch's unused blocks are given back where they stand in the way."""
        for last in (False, True):
            status, handle = driver.cuMemCreate(self.num_bytes, self._properties, 0)
            if status == driver.CUresult.CUDA_SUCCESS:
                return handle
            if status != driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise RuntimeError(f"cuMemCreate: {status.name}")
            if not last:
                torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        raise TooLarge(field=self.what, expected=f"{self.num_bytes} bytes free on {self.device}", actual=free)


def _give_back(address: int, num_bytes: int, box: list[Any]) -> None:
    """The last view is gone: nobody can have work in flight but what a synchronisation ends."""
    torch.cuda.synchronize()
    if box[0] is not None:
        _call(driver.cuMemUnmap, address, num_bytes)
        _call(driver.cuMemRelease, box[0])
    _call(driver.cuMemAddressFree, address, num_bytes)


def _call(function: Any, *arguments: Any) -> Any:
    """A driver call's single result; anything but success raises RuntimeError naming both."""
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{function.__name__}: {status.name}")
    return results[0] if results else None
