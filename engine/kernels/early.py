"""Launches that overlap the kernel before them.

Owns the rules of programmatic dependent launch, for devices that have it (compute capability 9.0 and
newer). Ignores which kernels use it; who may overlap, and by what option, `lora.kernels.early` says for
both packages, since it may not import this one.

A kernel launched `early` becomes resident while the one before it drains. Three rules keep any
chain of such launches right:

1. every program calls `await_inputs` before its first dependent read or write, and before leaving:
   a grid no program of which waits could end before its predecessor does;
2. only afterwards does it call `release_next`. So whatever runs before a kernel's own wait may rely
   on everything up to two launches back, and on nothing later;
3. before the wait, only what launches two or more back wrote, or nobody writes (weights), is read.

Launches without the option in between are safe: they start when all before them is complete.
"""

# pyright: reportArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from lora.kernels.early import is_early, options

__all__ = ["await_inputs", "is_early", "options", "prefetch", "release_next"]


@triton.jit
def await_inputs(EARLY: tl.constexpr):
    """Wait for the launch before this one, its writes included."""
    if EARLY:
        tl_cuda.gdc_wait()


@triton.jit
def release_next(EARLY: tl.constexpr):
    """Let the next launch become resident."""
    if EARLY:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def prefetch(base_ptr, bytes, EARLY: tl.constexpr):
    """Ask for `bytes` (a multiple of 16) from an aligned address in the level-2 cache. A hint: nothing
    is read or written. Call it before the wait, on storage that nobody writes."""
    if EARLY:
        tl.inline_asm_elementwise(
            """{
            .reg .pred one;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 one, thread, 0;
            @one cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            args=[base_ptr.to(tl.uint64, bitcast=True), bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
