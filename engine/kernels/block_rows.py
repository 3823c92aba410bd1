"""A drafter's blocks of different lengths, back to back.

Owns where the slots of each row's block stand among a tier's draft tokens, once it is known how many drafts
each row makes (`engine.kernels.round_rows`: its window). Ignores who chose that number
(`engine.dspark.planner.drafted`) and blocks that are all drafted whole.

Row b has `lead` slots that yield nothing, if it drafts at all, and one for each of window_B[b] drafts.

Shapes: B rows of a round, T draft tokens of a tier, G drafts, K block slots, P page-table columns.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import power_of_two
from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.packed_rows import lay_tokens, pad_tokens, place_of
from engine.kernels.round_rows import BlockRows, RoundLimits


def pack_blocks_reference(
    slots_B: torch.Tensor,
    window_B: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    anchors_B: torch.Tensor,
    page_tables_BP: torch.Tensor,
    limits: RoundLimits,
    tokens: int,
    drafts: int,
) -> BlockRows:
    """What `pack_blocks` fills, as new tensors; the host steers."""
    rows, page_size, lead = len(slots_B), limits.page_size, limits.lead
    packed = BlockRows.packed(rows, tokens, drafts, slots_B.device)
    assert packed.at_GB is not None and packed.active_GB is not None
    at = 0
    for b in range(rows):
        packed.starts_B1[b] = at
        made, anchor = max(0, int(window_B[b])), int(anchors_B[b])
        if made:
            packed.slots_B[b], packed.seq_lens_B[b] = slots_B[b], anchor + lead + made
        for k in range(lead + made if made else 0):
            position = anchor + k
            page = int(page_tables_BP[b, position // page_size])
            packed.ids_T[at] = anchor_ids_B[b] if k == 0 else limits.mask_id
            packed.positions_T[at] = position
            packed.write_slots_T[at] = page * page_size + position % page_size
            if k >= lead:
                packed.at_GB[k - lead, b], packed.active_GB[k - lead, b] = at, 1
                packed.drawn_KB[k - lead, b] = anchor + 1 + k - lead
            at += 1
    packed.starts_B1[rows] = at
    return packed


@triton.jit(do_not_specialize=["table_stride", "rows", "tokens"])
def _blocks_kernel(
    slots_ptr, window_ptr, anchor_ids_ptr, anchors_ptr, tables_ptr, table_stride, ids_ptr, positions_ptr, writes_ptr,
    lens_ptr, slots_out_ptr, drawn_ptr, starts_ptr, at_ptr, active_ptr, rows, tokens, mask_id,
    PAGE: tl.constexpr, LEAD: tl.constexpr, DRAFTS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    PAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.program_id(0)
    b_B = tl.arange(0, ROWS)
    window_B = tl.load(window_ptr + b_B, mask=b_B < rows, other=0)
    counts_B = tl.where(window_B > 0, window_B + LEAD, 0)
    start, count = place_of(counts_B, b_B, row)
    tl.store(starts_ptr + row, start)
    if row == rows:
        # Padding begins where the last row ends.
        for first in range(0, tokens, PAD):
            at_P = first + tl.arange(0, PAD)
            mask_P = (at_P >= start) & (at_P < tokens)
            pad_tokens(ids_ptr, positions_ptr, writes_ptr, at_P, mask_P)
    else:
        drafts = count > 0
        slot = tl.load(slots_ptr + row).to(tl.int32)
        anchor = tl.load(anchors_ptr + row)
        k_W = tl.arange(0, WIDE)
        inside_W = (k_W < count) & (start + k_W < tokens)
        positions_W, at_W = anchor + k_W, start + k_W
        ids_W = tl.where(k_W == 0, tl.load(anchor_ids_ptr + row), mask_id)
        lay_tokens(
            ids_ptr, positions_ptr, writes_ptr, tables_ptr, table_stride, row, at_W, ids_W, positions_W, inside_W, PAGE
        )
        tl.store(lens_ptr + row, tl.where(drafts, anchor.to(tl.int32) + count, 0))
        tl.store(slots_out_ptr + row, tl.where(drafts, slot, -1))
        # A draft's own places: its token among all, and the position it is drawn for.
        made_W = k_W + LEAD < count
        draft_W = k_W < DRAFTS
        tl.store(at_ptr + k_W * rows + row, tl.where(made_W, at_W + LEAD, -1), mask=draft_W)
        tl.store(active_ptr + k_W * rows + row, made_W.to(tl.uint8), mask=draft_W)
        tl.store(drawn_ptr + k_W * rows + row, tl.where(made_W, positions_W + 1, 0), mask=draft_W)


def pack_blocks(
    slots_B: torch.Tensor,
    window_B: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    anchors_B: torch.Tensor,
    page_tables_BP: torch.Tensor,
    limits: RoundLimits,
    out: BlockRows,
) -> None:
    """Pack the blocks of all rows that draft; they must fit `out`, which is made by `BlockRows.packed`."""
    assert out.at_GB is not None and out.active_GB is not None, "rows of whole blocks"
    drafts, rows = out.at_GB.shape
    tokens, early = out.ids_T.shape[0], is_early(anchors_B)
    _blocks_kernel[(rows + 1,)](
        slots_B, window_B, anchor_ids_B, anchors_B, page_tables_BP, page_tables_BP.stride(0), out.ids_T,
        out.positions_T, out.write_slots_T, out.seq_lens_B, out.slots_B, out.drawn_KB, out.starts_B1, out.at_GB,
        out.active_GB, rows, tokens, limits.mask_id,
        PAGE=limits.page_size, LEAD=limits.lead, DRAFTS=drafts, WIDE=power_of_two(drafts + limits.lead),
        ROWS=power_of_two(rows), PAD=min(1024, power_of_two(tokens)), EARLY=early, num_warps=1, **options(early),
    )  # fmt: skip
