"""Attention of one query a row over pages, and over stored states of prefixes read elsewhere.

Owns the kernel that reads each row's own tokens and finishes its output. Ignores how rows were cut
into items (`decode_work`) and who reads shared prefixes (`prefix_attention`).

A program computes one key/value head of one item. Where a row has several items, the last program
to arrive merges all of them in order of tokens, so that results do not depend on timing.

Shapes: B rows, N query heads, H head size, K key/value heads, G = N / K, W items, S prefix states a
row, M = G padded to at least 16 query rows, D = H padded to a power of two.
"""

# A launch takes plain values where the kernel declares compile-time ones.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.attention_tile import (
    add_sink,
    attend_reference,
    attend_tokens,
    empty_state,
    mean_and_lse,
    merge_all,
    power_of_two,
    store_state,
    tile_rows,
)
from engine.kernels.early import await_inputs, is_early, options, release_next


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a kernel must know of a layer. 0 stands for no window and no soft-cap."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int = 0
    softcap: float = 0.0
    sink: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def block_d(self) -> int:
        return max(16, power_of_two(self.head_dim))

    @property
    def constants(self) -> dict:
        """Compile-time arguments common to the attention kernels."""
        return dict(
            HEADS=self.num_heads,
            KV_HEADS=self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self.block_d,
            PAGE=self.page_size,
            SCALE=self.head_dim**-0.5,
            WINDOW=self.window,
            SOFTCAP=self.softcap,
        )


@dataclass(frozen=True, slots=True)
class TileConfig:
    block_n: int
    num_warps: int
    num_stages: int
    block_m: int = 16

    @property
    def options(self) -> dict:
        """Launch options."""
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(slots=True)
class States:
    """Room for stored states: mean_INH and lse_IN, fp32."""

    mean_INH: torch.Tensor
    lse_IN: torch.Tensor

    @classmethod
    def empty(cls, leading: tuple[int, ...], heads: int, size: int, device: torch.device | str) -> States:
        mean = torch.empty((*leading, heads, size), dtype=torch.float32, device=device)
        return cls(mean, torch.empty((*leading, heads), dtype=torch.float32, device=device))


def decode_reference(
    q_BNH: torch.Tensor,
    layer_kv: torch.Tensor,
    page_tables_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    shape: LayerShape,
    sink_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_BNH in double precision; rows of length 0 are zeros."""
    out_BNH = torch.zeros(q_BNH.shape, dtype=torch.float64, device=q_BNH.device)
    for row, length in enumerate(seq_lens_B.tolist()):
        if length:
            position_C = torch.arange(length, device=q_BNH.device)
            pages_C = page_tables_BP[row, position_C // shape.page_size].long()
            kv_C2KH = layer_kv[pages_C * shape.page_size + position_C % shape.page_size]
            out_BNH[row : row + 1], _ = attend_reference(
                q_BNH[row : row + 1],
                kv_C2KH,
                position_C[-1:],
                position_C,
                shape.window or None,
                shape.softcap or None,
                sink_N,
            )
    return out_BNH


@triton.jit(
    do_not_specialize=["table_stride", "prefix_rows"],
    do_not_specialize_on_alignment=[
        "sink_ptr",
        "tables_ptr",
        "seq_lens_ptr",
        "items_ptr",
        "arrived_ptr",
        "part_lse_ptr",
        "prefix_lse_ptr",
    ],
)
def _decode_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    sink_ptr,
    tables_ptr,
    seq_lens_ptr,
    items_ptr,
    part_ptr,
    part_lse_ptr,
    arrived_ptr,
    prefix_ptr,
    prefix_lse_ptr,
    q_stride,
    out_stride,
    table_stride,
    prefix_rows,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    item_ptr = items_ptr + item * 8
    row = tl.load(item_ptr)
    if not SHARED:
        await_inputs(EARLY)
        release_next(EARLY)
    if row < 0:
        return
    lo = tl.load(item_ptr + 1)
    hi = tl.load(item_ptr + 2)
    split = tl.load(item_ptr + 3)
    splits = tl.load(item_ptr + 4)
    _query_M, head_M, mask_M, mask_MD = tile_rows(kv_head, 1, HEADS, KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_D)
    at_MD = head_M[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    wide_row = row.to(tl.int64)
    q_MD = tl.load(q_ptr + wide_row * q_stride + at_MD, mask=mask_MD, other=0.0)
    position_M = tl.zeros([BLOCK_M], tl.int32)
    if WINDOW > 0:
        end = tl.load(seq_lens_ptr + row)
        lo = tl.maximum(lo, end - WINDOW)
        position_M += end - 1
    acc_MD, sum_M, top_M = empty_state(BLOCK_M, BLOCK_D)
    acc_MD, sum_M, top_M = attend_tokens(
        q_MD,
        acc_MD,
        sum_M,
        top_M,
        kv_ptr + kv_head * HEAD_DIM,
        tables_ptr + wide_row * table_stride,
        lo,
        hi,
        position_M,
        KV_HEADS,
        HEAD_DIM,
        BLOCK_N,
        BLOCK_D,
        PAGE,
        SCALE,
        SOFTCAP,
        WINDOW,
        False,
        False,
    )
    last = split == 0
    if splits > 1:
        state = item.to(tl.int64) * HEADS
        store_state(part_ptr, part_lse_ptr, state + head_M, acc_MD, sum_M, top_M, mask_M, mask_MD, HEAD_DIM)
        tl.debug_barrier()  # every thread's state is stored before the program counts as arrived
        arrived = tl.atomic_add(arrived_ptr + row * KV_HEADS + kv_head, 1, sem="acq_rel")
        last = arrived == splits - 1
        if last:
            tl.debug_barrier()
            tl.store(arrived_ptr + row * KV_HEADS + kv_head, 0)
            acc_MD, sum_M, top_M = empty_state(BLOCK_M, BLOCK_D)
            first_M = (item - split) * HEADS + head_M
            acc_MD, sum_M, top_M = merge_all(
                acc_MD, sum_M, top_M, part_ptr, part_lse_ptr, first_M, splits, HEADS, mask_M, mask_MD, HEAD_DIM, BLOCK_D
            )  # fmt: skip
    if last:
        if SHARED:
            await_inputs(EARLY)  # the prefix kernel's states
            release_next(EARLY)
            acc_MD, sum_M, top_M = merge_all(
                acc_MD, sum_M, top_M, prefix_ptr, prefix_lse_ptr, row * HEADS + head_M, tl.load(item_ptr + 5),
                prefix_rows.to(tl.int64) * HEADS, mask_M, mask_MD, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        if SINK:
            sink_M = tl.load(sink_ptr + head_M, mask=mask_M, other=0.0).to(tl.float32)
            # A row of length 0 stays empty: its accumulator is zero whatever the sink adds to its sum.
            acc_MD, sum_M, top_M = add_sink(acc_MD, sum_M, top_M, sink_M)
        mean_MD, _ = mean_and_lse(acc_MD, sum_M, top_M)
        tl.store(out_ptr + wide_row * out_stride + at_MD, mean_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


def decode_attention(
    q_BNH: torch.Tensor,
    layer_kv: torch.Tensor,
    page_tables_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    items_W8: torch.Tensor,
    out_BNH: torch.Tensor,
    partial: States,
    arrived_BK: torch.Tensor,
    shape: LayerShape,
    config: TileConfig,
    sink_N: torch.Tensor | None = None,
    prefix: States | None = None,
) -> None:
    """Write out_BNH, zeros for rows of length 0.

    `partial` holds W states, `arrived_BK` int32 zeros that are zeros again afterwards. `prefix` holds
    [S, B] states of which each row reads as many as its items say: where launches overlap
    (`engine.kernels.early`), the one before must then be the prefix kernel's, and items come from two
    launches back at least. Every batch has a row, so some program waits.
    """
    assert q_BNH.stride()[1:] == (shape.head_dim, 1) == out_BNH.stride()[1:], "heads of a row must be contiguous"
    assert layer_kv.is_contiguous() and page_tables_BP.stride(1) == 1
    assert partial.lse_IN.shape[0] >= items_W8.shape[0], "a state for each item"
    shared, early = prefix is not None, is_early(q_BNH)
    prefix_states = prefix if prefix is not None else partial
    _decode_kernel[(shape.num_kv_heads, items_W8.shape[0])](
        q_BNH,
        layer_kv,
        out_BNH,
        sink_N,
        page_tables_BP,
        seq_lens_B,
        items_W8,
        partial.mean_INH,
        partial.lse_IN,
        arrived_BK,
        prefix_states.mean_INH,
        prefix_states.lse_IN,
        q_BNH.stride(0),
        out_BNH.stride(0),
        page_tables_BP.stride(0),
        prefix_states.lse_IN.shape[1],
        **shape.constants,
        SINK=sink_N is not None,
        SHARED=shared,
        EARLY=early,
        BLOCK_M=max(16, power_of_two(shape.group)),
        BLOCK_N=config.block_n,
        **config.options,
        **options(early),
    )
