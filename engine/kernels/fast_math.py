"""Single instructions for fp32 functions, where a few units in the last place do not matter.

Owns the exponential that flushes subnormal numbers to zero: compiled from Triton's own, it carries
several more instructions to treat those. The interpreter uses Triton's own.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def fast_exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
