"""First factors of adapters copied behind the weights of the products they share inputs with.

Owns the copy of slots' first factors to places behind the weights, at all sites in one launch. Ignores which
slot belongs where (`lora.stack`).

Behind a weight [N, K] place p has the rows of every part in turn, each padded with zeros to R:
[P, G, R, K]. So the first places are the first rows, and a product of fewer places is one of a shorter weight.

Shapes: X sites, S slots, M moves, P places, G parts, R ranks of a place, K inputs, N outputs.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from lora.device_pool import DevicePool
from lora.geometry import MAX_PARTS

NUMBERS = 8192
"""That a program copies at a time."""


class Rooms:
    """Where the rows behind the weights begin, by site: `wide` are the weights with them, [N + room, K], which
    stay where they are for life. Sites without any have no entry."""

    def __init__(self, pool: DevicePool, wide: Mapping[int, torch.Tensor]) -> None:
        rows, self.behind = [], {}
        for site in range(len(pool.geometry.sites)):
            if site not in wide:
                rows.append((0, 0, 0))
                continue
            assert wide[site].is_contiguous() and wide[site].dtype == pool.dtype, f"site {site}: {wide[site].dtype}"
            self.behind[site] = wide[site][sum(pool.geometry.widths(site)) :]
            parts, inputs = len(pool.geometry.widths(site)), pool.geometry.inputs(site)
            rows.append((self.behind[site].data_ptr(), parts, inputs))
        inputs = [pool.geometry.inputs(site) for site in self.behind]
        self.aligned = math.gcd(8, *inputs)
        """What all numbers of inputs are a multiple of."""
        self.table_X3 = torch.tensor(rows, dtype=torch.int64, device=pool.device)


def stack_factors_reference(pool: DevicePool, rooms: Rooms, moves_M2: torch.Tensor, rank: int) -> None:
    for place, slot in moves_M2.tolist():
        for site, behind_NK in rooms.behind.items():
            parts = len(pool.geometry.widths(site))
            rows = behind_NK[place * parts * rank : (place + 1) * parts * rank].view(parts, rank, -1)
            rows.zero_()
            if pool.layout(slot, site).rank:
                for part, a_RK in enumerate(pool.factors(slot, site)[0]):
                    rows[part, : len(a_RK)] = a_RK


@triton.jit
def stack_factors_kernel(
    rooms_ptr, moves_ptr, values_ptr, offsets_ptr, ranks_ptr, sites, R: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    part, site = tl.program_id(0), tl.program_id(1)
    place = tl.load(moves_ptr + tl.program_id(2) * 2)
    here = tl.load(moves_ptr + tl.program_id(2) * 2 + 1) * sites + site
    address = tl.load(rooms_ptr + site * 3)
    parts = tl.load(rooms_ptr + site * 3 + 1)
    inputs = tl.multiple_of(tl.load(rooms_ptr + site * 3 + 2), ALIGNED)
    if part < parts:
        rank = tl.load(ranks_ptr + here * 4)
        offset = tl.multiple_of(tl.load(offsets_ptr + here * 2), 64)
        room_ptr = tl.multiple_of(address.to(tl.pointer_type(values_ptr.dtype.element_ty)), 2 * ALIGNED)
        r, k = tl.arange(0, R)[:, None], tl.arange(0, BLOCK)[None, :]
        from_RK = values_ptr + offset + (part * rank + r) * inputs + k
        to_RK = room_ptr + ((place * parts + part) * R + r) * inputs + k
        for first in range(0, inputs, BLOCK):
            real_RK = first + k < inputs
            value_RK = tl.load(from_RK + first, mask=real_RK & (r < rank), other=0.0)
            tl.store(to_RK + first, value_RK, mask=real_RK)


def stack_factors(pool: DevicePool, rooms: Rooms, moves_M2: torch.Tensor, rank: int) -> None:
    """Copy slots' first factors: `moves_M2` int32 are (place, slot), no place twice. `rank` is at least every
    padded rank met."""
    stack_factors_kernel[(MAX_PARTS, len(pool.geometry.sites), moves_M2.shape[0])](
        rooms.table_X3, moves_M2, pool.values_U, pool.offsets_SX2, pool.ranks_SX4, len(pool.geometry.sites),
        R=rank, BLOCK=max(64, NUMBERS // rank), ALIGNED=rooms.aligned, num_warps=8,
    )  # fmt: skip
