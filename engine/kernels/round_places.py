"""Which tokens of a round will be taken, before they are.

Owns, by verify row, the slot whose ring its token will stand in and how many of the round stand before it there:
what `engine.kernels.sample_top` asks of rows that verify. Ignores stops and lengths, which end a row earlier; what
stands behind its last token is written over before anybody reads it.

Shapes: B rows of a round, G drafts, R verify rows.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.round_rows import VerifyRows


@dataclass(slots=True)
class Places:
    """int32 [R]: the slot of a token that will be taken, -1 where none will be, and the tokens of its slot before
    it in the same step."""

    slots_R: torch.Tensor
    before_R: torch.Tensor

    @staticmethod
    def empty(verify: int, device: torch.device) -> Places:
        return Places(*(torch.full((verify,), -1, dtype=torch.int32, device=device) for _ in range(2)))


def places_reference(
    rows: VerifyRows,
    drafts_BG: torch.Tensor,
    ids_R: torch.Tensor,
    keep_B: torch.Tensor,
    accepted_B: torch.Tensor | None = None,
) -> Places:
    """What `find_places` fills, as new tensors; the host steers."""
    places = Places.empty(len(ids_R), ids_R.device)
    for row, b in enumerate(rows.owner_R.tolist()):
        if b < 0:
            continue
        start = int(rows.starts_B1[b])
        k, last = row - start, int(keep_B[b])
        if accepted_B is not None:
            last = min(last, int(accepted_B[b]))
        elif ids_R[start:row].tolist() != drafts_BG[b, :k].tolist():
            last = -1
        places.before_R[row] = k
        if k <= last:
            places.slots_R[row] = rows.slots_R[row]
    return places


@triton.jit
def _places_kernel(
    owner_ptr, slots_ptr, starts_ptr, drafts_ptr, ids_ptr, keep_ptr, accepted_ptr, slots_out_ptr, before_ptr,
    G: tl.constexpr, WIDE: tl.constexpr, JUDGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.program_id(0)
    owner = tl.load(owner_ptr + row).to(tl.int64)
    real = owner >= 0
    owner = tl.maximum(owner, 0)
    start = tl.load(starts_ptr + owner)
    k = tl.where(real, row - start, -1)
    last = tl.load(keep_ptr + owner).to(tl.int32)
    if JUDGED:
        last = tl.minimum(last, tl.load(accepted_ptr + owner))
    else:
        k_W = tl.arange(0, WIDE)
        before_W = k_W < k
        drafts_W = tl.load(drafts_ptr + owner * G + k_W, mask=before_W, other=0)
        drawn_W = tl.load(ids_ptr + start + k_W, mask=before_W, other=0)
        last = tl.where(tl.sum((drafts_W != drawn_W).to(tl.int32), 0) > 0, -1, last)
    tl.store(slots_out_ptr + row, tl.where(real & (k <= last), tl.load(slots_ptr + row), -1))
    tl.store(before_ptr + row, k)


def find_places(
    rows: VerifyRows,
    drafts_BG: torch.Tensor,
    ids_R: torch.Tensor,
    keep_B: torch.Tensor,
    out: Places,
    accepted_B: torch.Tensor | None = None,
) -> None:
    """Rows whose token `ids_R` int64 stands behind drafts that are all kept: under the coupled rule those that equal
    the target's own, else the first `accepted_B`."""
    drafts, early = drafts_BG.shape[1], is_early(ids_R)
    _places_kernel[(ids_R.shape[0],)](
        rows.owner_R, rows.slots_R, rows.starts_B1, drafts_BG, ids_R, keep_B,
        keep_B if accepted_B is None else accepted_B, out.slots_R, out.before_R,
        G=drafts, WIDE=power_of_two(drafts), JUDGED=accepted_B is not None, EARLY=early, num_warps=1, **options(early),
    )  # fmt: skip
