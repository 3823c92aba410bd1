"""Single instructions for fp32 functions, where a few units in the last place do not matter.

Owns exponentials and reciprocals that flush subnormal numbers to zero: compiled from Triton's own,
each carries several more instructions to treat those. The interpreter uses Triton's own.
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


@triton.jit
def fast_reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
