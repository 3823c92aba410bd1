"""What a round feeds: the drafter's block, then the target's verify rows.

Owns the two gathers from the device table that need no host: where each row stands and how much it may
draft, and, once it is decided how many drafts each row verifies, the packed rows of the target. Ignores
how drafts are made, chosen (`engine.dspark.planner.spend`) and judged (`engine.kernels.round_commit`).

Verify rows are packed in front: row b has counts[b] = 1 + lens[b] of them, its anchor first, or none
where it is idle. A row that drafts nothing has a window of 0, an idle one of -1.

Shapes: B rows of a round, G drafts, R verify rows, K block slots, P page-table columns, S slots.
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
from engine.kernels.packed_rows import lay_tokens, pad_tokens, place_of
from engine.memory.device_table import DeviceTable

IDLE = -1


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """`context_len` is the target's, `draft_context` the drafter's; a round writes the drafter's states at
    `block` positions from the anchor on (0: it has none), whose ids are `mask_id` but for the anchor's. Where
    blocks are drafted `by_request`, a row's is as long as its window, behind `lead` slots that yield nothing,
    instead of whole or not at all."""

    context_len: int
    draft_context: int
    page_size: int
    block: int = 0
    mask_id: int = 0
    lead: int = 0
    by_request: bool = False


@dataclass(slots=True)
class BlockRows:
    """The drafter's inputs: the slots of every row's block back to back, row b's from starts_B1[b] on, and its
    length at its block's end (0: it drafts nothing). `slots_B` int32 are the slots of rows that draft, -1
    elsewhere, and `drawn_KB` int64 the positions after the anchor, where drafts will stand.

    Whole blocks are K slots each. Else `at_GB` int32 are the tokens that drafts are made from, -1 for those that
    are not made, and `active_GB` uint8 tells which are."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    write_slots_T: torch.Tensor
    seq_lens_B: torch.Tensor
    slots_B: torch.Tensor
    drawn_KB: torch.Tensor
    starts_B1: torch.Tensor
    at_GB: torch.Tensor | None = None
    active_GB: torch.Tensor | None = None

    @staticmethod
    def empty(rows: int, block: int, device: torch.device) -> BlockRows:
        """For whole blocks."""
        whole = BlockRows._of(rows, rows * block, block, device)
        whole.starts_B1.copy_(torch.arange(rows + 1) * block)
        return whole

    @staticmethod
    def packed(rows: int, tokens: int, drafts: int, device: torch.device) -> BlockRows:
        """For blocks of up to `drafts` drafts that fit `tokens` together (`engine.kernels.block_rows`)."""
        packed = BlockRows._of(rows, tokens, drafts, device)
        packed.at_GB = torch.full((drafts, rows), -1, dtype=torch.int32, device=device)
        packed.active_GB = torch.zeros(drafts, rows, dtype=torch.uint8, device=device)
        return packed

    @staticmethod
    def _of(rows: int, tokens: int, drawn: int, device: torch.device) -> BlockRows:
        def column(count: int, fill: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full((count,), fill, dtype=dtype, device=device)

        return BlockRows(
            ids_T=column(tokens, -1),
            positions_T=column(tokens, 0),
            write_slots_T=column(tokens, -1),
            seq_lens_B=column(rows, 0, torch.int32),
            slots_B=column(rows, -1, torch.int32),
            drawn_KB=column(drawn * rows, 0).view(drawn, rows),
            starts_B1=column(rows + 1, 0, torch.int32),
        )


@dataclass(slots=True)
class VerifyRows:
    """The target's inputs. `owner_R` is the row of the round that a verify row belongs to, -1 for padding,
    `slots_R` its slot, `ends_R` int64 the position of the token that its logits are about."""

    ids_R: torch.Tensor
    positions_R: torch.Tensor
    write_slots_R: torch.Tensor
    slots_R: torch.Tensor
    owner_R: torch.Tensor
    ends_R: torch.Tensor
    starts_B1: torch.Tensor
    seq_lens_B: torch.Tensor

    @staticmethod
    def empty(verify: int, rows: int, device: torch.device) -> VerifyRows:
        def column(count: int, fill: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((count,), fill, dtype=dtype, device=device)

        return VerifyRows(
            ids_R=column(verify, -1, torch.int64),
            positions_R=column(verify, 0, torch.int64),
            write_slots_R=column(verify, -1, torch.int64),
            slots_R=column(verify, -1, torch.int32),
            owner_R=column(verify, -1, torch.int32),
            ends_R=column(verify, 0, torch.int64),
            starts_B1=column(rows + 1, 0, torch.int32),
            seq_lens_B=column(rows, 0, torch.int32),
        )


def windows_reference(
    table: DeviceTable, slots_B: torch.Tensor, most_B: torch.Tensor, room_B: torch.Tensor, limits: RoundLimits
) -> torch.Tensor:
    """int32 [B]: the most drafts a row may verify now, -1 where it is idle."""
    slots = slots_B.clamp(min=0).long()
    anchor = table.computed_S[slots]
    running = (slots_B >= 0) & (table.finished_S[slots] == 0) & (anchor < room_B)
    left = (table.max_new_S[slots] - table.new_S[slots] - 1).long()
    window = torch.minimum(most_B.long(), left)
    window = torch.minimum(window, torch.minimum(room_B.long() - 1, torch.tensor(limits.context_len - 2)) - anchor)
    if limits.by_request:
        window = torch.minimum(window, limits.draft_context - limits.lead - anchor)
    elif limits.block:
        fits = (anchor + limits.block <= limits.draft_context) & (anchor + limits.block <= room_B)
        window = torch.where(fits, window, 0)
    return torch.where(running, window.clamp(min=0), IDLE).to(torch.int32)


@triton.jit(do_not_specialize=["table_stride", "rows"])
def _open_kernel(
    slots_ptr, most_ptr, room_ptr, finished_ptr, last_token_ptr, computed_ptr, new_ptr, max_new_ptr, tables_ptr,
    table_stride, window_ptr, anchor_ids_ptr, anchors_ptr, block_ids_ptr, block_positions_ptr, block_writes_ptr,
    block_lens_ptr, block_slots_ptr, drawn_ptr, rows, context_len, draft_context, mask_id,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, LEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    real = slot >= 0
    slot = tl.maximum(slot, 0)
    anchor = tl.load(computed_ptr + slot)
    token = tl.load(last_token_ptr + slot)
    room = tl.load(room_ptr + row)
    # A row without a page for its newest token waits until it has one.
    running = real & (tl.load(finished_ptr + slot) == 0) & (anchor < room)
    left = tl.load(max_new_ptr + slot) - tl.load(new_ptr + slot) - 1
    at = anchor.to(tl.int32)
    window = tl.minimum(tl.load(most_ptr + row).to(tl.int32), left)
    window = tl.minimum(window, tl.minimum(room - 1, context_len - 2) - at)
    if LEAD >= 0:
        window = tl.minimum(window, draft_context - LEAD - at)
    if BLOCK > 0:
        window = tl.where((at + BLOCK <= draft_context) & (at + BLOCK <= room), window, 0)
    window = tl.where(running, tl.maximum(window, 0), -1)
    tl.store(window_ptr + row, window)
    tl.store(anchor_ids_ptr + row, tl.where(running, token, -1))
    tl.store(anchors_ptr + row, tl.where(running, anchor, 0))
    if BLOCK > 0:
        drafts = window > 0
        k_W = tl.arange(0, WIDE)
        inside_W = k_W < BLOCK
        positions_W = anchor + k_W
        mask_W = inside_W & drafts
        page_W = tl.load(tables_ptr + row.to(tl.int64) * table_stride + positions_W // PAGE, mask=mask_W, other=0)
        writes_W = page_W.to(tl.int64) * PAGE + positions_W % PAGE
        at_W = row * BLOCK + k_W
        ids_W = tl.where(k_W == 0, token, mask_id)
        tl.store(block_ids_ptr + at_W, tl.where(drafts, ids_W, -1), mask=inside_W)
        tl.store(block_positions_ptr + at_W, tl.where(drafts, positions_W, 0), mask=inside_W)
        tl.store(block_writes_ptr + at_W, tl.where(drafts, writes_W, -1), mask=inside_W)
        tl.store(block_lens_ptr + row, tl.where(drafts, at + BLOCK, 0))
        tl.store(block_slots_ptr + row, tl.where(drafts, slot, -1).to(tl.int32))
        tl.store(drawn_ptr + k_W * rows + row, tl.where(drafts, positions_W + 1, 0), mask=inside_W)


def open_rows(
    table: DeviceTable,
    slots_B: torch.Tensor,
    most_B: torch.Tensor,
    room_B: torch.Tensor,
    page_tables_BP: torch.Tensor,
    limits: RoundLimits,
    window_B: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    anchors_B: torch.Tensor,
    block: BlockRows | None,
) -> None:
    """Where rows stand: `window_B` int32 as `windows_reference`, the newest token (-1 where idle) and its
    position, and the drafter's block where all are whole. A row has pages for `room_B` tokens and may
    verify `most_B` drafts; both int32, as are `slots_B` (-1 is padding)."""
    whole = 0 if limits.by_request else limits.block
    assert (block is None) == (whole == 0), "a whole block needs buffers"
    nothing = anchors_B
    _open_kernel[(slots_B.shape[0],)](
        slots_B,
        most_B,
        room_B,
        table.finished_S,
        table.last_token_S,
        table.computed_S,
        table.new_S,
        table.max_new_S,
        page_tables_BP,
        page_tables_BP.stride(0),
        window_B,
        anchor_ids_B,
        anchors_B,
        nothing if block is None else block.ids_T,
        nothing if block is None else block.positions_T,
        nothing if block is None else block.write_slots_T,
        nothing if block is None else block.seq_lens_B,
        nothing if block is None else block.slots_B,
        nothing if block is None else block.drawn_KB,
        slots_B.shape[0],
        limits.context_len,
        limits.draft_context,
        limits.mask_id,
        PAGE=limits.page_size,
        BLOCK=whole,
        WIDE=power_of_two(max(1, whole)),
        LEAD=limits.lead if limits.by_request else -1,
        num_warps=1,
    )


def pack_rows_reference(
    slots_B: torch.Tensor,
    window_B: torch.Tensor,
    lens_B: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    anchors_B: torch.Tensor,
    drafts_BG: torch.Tensor,
    page_tables_BP: torch.Tensor,
    page_size: int,
    verify: int,
) -> VerifyRows:
    """What `pack_rows` fills, as new tensors; the host steers."""
    rows = len(slots_B)
    packed = VerifyRows.empty(verify, rows, slots_B.device)
    at = 0
    for b in range(rows):
        packed.starts_B1[b] = at
        if window_B[b] < 0:
            continue
        length, anchor = int(lens_B[b]), int(anchors_B[b])
        for k in range(1 + length):
            position = anchor + k
            page = int(page_tables_BP[b, position // page_size])
            packed.ids_R[at] = anchor_ids_B[b] if k == 0 else drafts_BG[b, k - 1]
            packed.positions_R[at] = position
            packed.write_slots_R[at] = page * page_size + position % page_size
            packed.slots_R[at], packed.owner_R[at], packed.ends_R[at] = slots_B[b], b, position + 1
            at += 1
        packed.seq_lens_B[b] = anchor + 1 + length
    packed.starts_B1[rows] = at
    return packed


@triton.jit(do_not_specialize=["table_stride", "rows", "verify"])
def _pack_kernel(
    slots_ptr, window_ptr, lens_ptr, anchor_ids_ptr, anchors_ptr, drafts_ptr, tables_ptr, table_stride, ids_ptr,
    positions_ptr, writes_ptr, slots_out_ptr, owner_ptr, ends_ptr, starts_ptr, seq_lens_ptr, rows, verify,
    PAGE: tl.constexpr, DRAFTS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, PAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    await_inputs(EARLY)
    release_next(EARLY)
    row = tl.program_id(0)
    b_B = tl.arange(0, ROWS)
    window_B = tl.load(window_ptr + b_B, mask=b_B < rows, other=-1)
    lens_B = tl.load(lens_ptr + b_B, mask=b_B < rows, other=0).to(tl.int32)
    counts_B = tl.where(window_B >= 0, lens_B + 1, 0)
    start, count = place_of(counts_B, b_B, row)
    tl.store(starts_ptr + row, start)
    if row == rows:
        # Padding begins where the last row ends.
        for first in range(0, verify, PAD):
            at_P = first + tl.arange(0, PAD)
            mask_P = (at_P >= start) & (at_P < verify)
            pad_tokens(ids_ptr, positions_ptr, writes_ptr, at_P, mask_P)
            tl.store(ends_ptr + at_P, tl.full((PAD,), 0, tl.int64), mask=mask_P)
            tl.store(slots_out_ptr + at_P, tl.full((PAD,), -1, tl.int32), mask=mask_P)
            tl.store(owner_ptr + at_P, tl.full((PAD,), -1, tl.int32), mask=mask_P)
    else:
        slot = tl.load(slots_ptr + row).to(tl.int32)
        anchor = tl.load(anchors_ptr + row)
        k_W = tl.arange(0, WIDE)
        inside_W = (k_W < count) & (start + k_W < verify)
        drafts_at_W = row.to(tl.int64) * DRAFTS + tl.maximum(k_W - 1, 0)
        drafts_W = tl.load(drafts_ptr + drafts_at_W, mask=inside_W & (k_W > 0), other=0)
        ids_W = tl.where(k_W == 0, tl.load(anchor_ids_ptr + row), drafts_W)
        positions_W, at_W = anchor + k_W, start + k_W
        lay_tokens(
            ids_ptr, positions_ptr, writes_ptr, tables_ptr, table_stride, row, at_W, ids_W, positions_W, inside_W, PAGE
        )
        tl.store(slots_out_ptr + at_W, slot + k_W * 0, mask=inside_W)
        tl.store(owner_ptr + at_W, row + k_W * 0, mask=inside_W)
        tl.store(ends_ptr + at_W, positions_W + 1, mask=inside_W)
        tl.store(seq_lens_ptr + row, tl.where(count > 0, anchor.to(tl.int32) + count, 0))


def pack_rows(
    slots_B: torch.Tensor,
    window_B: torch.Tensor,
    lens_B: torch.Tensor,
    anchor_ids_B: torch.Tensor,
    anchors_B: torch.Tensor,
    drafts_BG: torch.Tensor,
    page_tables_BP: torch.Tensor,
    page_size: int,
    out: VerifyRows,
) -> None:
    """Pack anchors and the first `lens_B` drafts of every row that is not idle; they must fit `out`."""
    rows, drafts = drafts_BG.shape
    assert drafts_BG.is_contiguous() and drafts_BG.dtype == torch.int64, "drafts are contiguous int64"
    early = is_early(drafts_BG)
    _pack_kernel[(rows + 1,)](
        slots_B,
        window_B,
        lens_B,
        anchor_ids_B,
        anchors_B,
        drafts_BG,
        page_tables_BP,
        page_tables_BP.stride(0),
        out.ids_R,
        out.positions_R,
        out.write_slots_R,
        out.slots_R,
        out.owner_R,
        out.ends_R,
        out.starts_B1,
        out.seq_lens_B,
        rows,
        out.ids_R.shape[0],
        PAGE=page_size,
        DRAFTS=drafts,
        WIDE=power_of_two(drafts + 1),
        ROWS=power_of_two(rows),
        PAD=min(1024, power_of_two(out.ids_R.shape[0])),
        EARLY=early,
        num_warps=1,
        **options(early),
    )
