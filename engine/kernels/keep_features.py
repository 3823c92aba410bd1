"""What a drafter needs of a step's tokens, put aside until the burst is over.

Owns the places where tokens lie meanwhile, and the copy to them in one launch for all captured layers. A row's
token lies at (position mod places) * B + row: rows go forward by one position a step, so that no two tokens of as
many steps as there are places meet. Rows without a write slot (-1: padding, or finished) put nothing aside, so what
they did before stays. Ignores what is made of it, and when.

Shapes: B rows of a step, M captured layers, D hidden, T tokens that are put aside.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next

MAX_BLOCK = 1024
TOGETHER = 8
"""Layers that one launch copies."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """Outputs [T, M, D] of the captured layers, with each token's id, position and write slot (int64; -1 where
    there is none). `places_1` int64 is the number of steps that they have room for."""

    features_TMD: torch.Tensor
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    slots_T: torch.Tensor
    places_1: torch.Tensor

    @staticmethod
    def empty(tokens: int, layers: int, hidden: int, dtype: torch.dtype, device: torch.device | str) -> KeptTokens:
        def column(count: int, fill: int) -> torch.Tensor:
            return torch.full((count,), fill, dtype=torch.int64, device=device)

        # Products meet what nobody has put there as well: it must not be NaN.
        features_TMD = torch.zeros(tokens, layers, hidden, dtype=dtype, device=device)
        return KeptTokens(features_TMD, column(tokens, 0), column(tokens, 0), column(tokens, -1), column(1, 1))


def keep_features_reference(
    kept: KeptTokens,
    features: Sequence[torch.Tensor],
    ids_B: torch.Tensor,
    positions_B: torch.Tensor,
    slots_B: torch.Tensor,
) -> None:
    real_R = (slots_B >= 0).nonzero()[:, 0]
    places_R = (positions_B[real_R] % kept.places_1) * len(slots_B) + real_R
    kept.features_TMD[places_R] = torch.stack(list(features), dim=1)[real_R].to(kept.features_TMD.dtype)
    for column_T, column_B in ((kept.ids_T, ids_B), (kept.positions_T, positions_B), (kept.slots_T, slots_B)):
        column_T[places_R] = column_B[real_R].long()


@triton.jit
def _copy_part(source_ptr, target_ptr, layer, D: tl.constexpr, at, inside):
    values = tl.load(source_ptr + at, mask=inside, other=0.0)
    tl.store(target_ptr + layer * D + at, values.to(target_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "first"])
def keep_features_kernel(
    ptr0, ptr1, ptr2, ptr3, ptr4, ptr5, ptr6, ptr7, ids_ptr, positions_ptr, slots_ptr, features_ptr, kept_ids_ptr,
    kept_positions_ptr, kept_slots_ptr, places_ptr, rows, first,
    COUNT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions_ptr + row).to(tl.int64)
    place = (position % tl.load(places_ptr)) * rows + row
    if tl.program_id(1) == 0:
        tl.store(kept_ids_ptr + place, tl.load(ids_ptr + row).to(tl.int64))
        tl.store(kept_positions_ptr + place, position)
        tl.store(kept_slots_ptr + place, slot)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < D
    source, target_ptr = row * D, features_ptr + (place * M + first) * D
    _copy_part(ptr0 + source, target_ptr, 0, D, at, inside)
    if COUNT > 1:
        _copy_part(ptr1 + source, target_ptr, 1, D, at, inside)
    if COUNT > 2:
        _copy_part(ptr2 + source, target_ptr, 2, D, at, inside)
    if COUNT > 3:
        _copy_part(ptr3 + source, target_ptr, 3, D, at, inside)
    if COUNT > 4:
        _copy_part(ptr4 + source, target_ptr, 4, D, at, inside)
    if COUNT > 5:
        _copy_part(ptr5 + source, target_ptr, 5, D, at, inside)
    if COUNT > 6:
        _copy_part(ptr6 + source, target_ptr, 6, D, at, inside)
    if COUNT > 7:
        _copy_part(ptr7 + source, target_ptr, 7, D, at, inside)


def keep_features(
    kept: KeptTokens,
    features: Sequence[torch.Tensor],
    ids_B: torch.Tensor,
    positions_B: torch.Tensor,
    slots_B: torch.Tensor,
) -> None:
    """Put aside the outputs [B, D] of all captured layers, in order, and what belongs to them (integers of any
    kind)."""
    _, layers, width = kept.features_TMD.shape
    rows = len(slots_B)
    assert len(features) == layers, f"{len(features)} layers, room for {layers}"
    whole = all(part.shape == (rows, width) and part.is_contiguous() for part in features)
    assert whole, f"outputs must be contiguous [{rows}, {width}]"
    block, early = min(MAX_BLOCK, triton.next_power_of_2(width)), is_early(kept.features_TMD)
    for first in range(0, layers if rows else 0, TOGETHER):
        sources = list(features[first : first + TOGETHER])
        keep_features_kernel[(rows, triton.cdiv(width, block))](
            *sources,
            *[sources[0]] * (TOGETHER - len(sources)),
            ids_B,
            positions_B,
            slots_B,
            kept.features_TMD,
            kept.ids_T,
            kept.positions_T,
            kept.slots_T,
            kept.places_1,
            rows,
            first,
            COUNT=len(sources),
            M=layers,
            D=width,
            BLOCK=block,
            EARLY=early,
            num_warps=max(1, min(4, block // 256)),
            **options(early),
        )
