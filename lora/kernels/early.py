"""Launches that overlap the kernel before them, as the adapters' kernels use them.

Owns the launch option, for the engine's kernels too, and the device calls, for compute capability
9.0 and newer, `held` among them. The rules that keep a
chain of such launches right are the engine's (`engine.kernels.early`), which this package cannot import:
every program waits before its first dependent access and before it leaves, only then lets the next
launch in, and reads nothing earlier but what was written two or more launches back.
"""

# pyright: reportArgumentType=false
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@functools.cache
def _capable(index: int | None) -> bool:
    return torch.cuda.get_device_capability(index) >= (9, 0)


def is_early(tensor: torch.Tensor) -> bool:
    """Whether launches on the tensor's device may overlap."""
    return tensor.is_cuda and _capable(tensor.device.index)


def options(early: bool) -> dict[str, bool]:
    """Launch options; empty where overlap is impossible, since older compilers refuse the key."""
    return {"launch_pdl": True} if early else {}


@triton.jit
def await_launch(EARLY: tl.constexpr):
    """Wait for the launch before this one, its writes included, then let the next become resident."""
    if EARLY:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@triton.jit
def held(x, EARLY: tl.constexpr):
    """`x`, no part of which is touched before this line. The compiler moves a change of layout up to the load it
    belongs to, where it waits for memory, and no later load passes its barriers: so every load comes first,
    then this of each."""
    if EARLY:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", args=[x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
        )
    return x
