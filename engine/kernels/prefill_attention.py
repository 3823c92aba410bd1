"""Causal attention of rows of any number of queries over their pages.

Owns the kernel for prompt chunks (cached context plus new tokens) and for verification rows of a few
queries. Ignores single-query rows, for which `decode_attention` is faster.

A tile holds a few queries of one row with all heads of one key/value head; `tile_row_X` and
`tile_query_X` say which. Keys may be cut into splits, as many as a row's length is worth: the last of a tile's to
arrive merges their states, in their order. Of rows that share prefixes, what `prefix_attention` read for all
their queries is merged last.

Shapes: T query tokens of all rows back to back, B rows, X tiles, N query heads, H head size,
M = queries of a tile times heads of a group, D = H padded to a power of two.
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
    merge_each,
    store_state,
    tile_rows,
)
from engine.kernels.decode_attention import LayerShape, States, TileConfig
from engine.kernels.early import await_inputs, is_early, options, release_next

MIN_SPLIT = 128
"""Tokens that a split has at least: fewer are read sooner than another's state."""


@dataclass(slots=True)
class Before:
    """What rows need not read: row b's own tokens start at own_start_B[b], and parts_B[b] stored states cover those
    before, of each of its queries. `states` are [S, R], of the first R queries of all."""

    own_start_B: torch.Tensor
    parts_B: torch.Tensor
    states: States


def prefill_reference(
    q_TNH: torch.Tensor,
    layer_kv: torch.Tensor,
    page_tables_BP: torch.Tensor,
    seq_lens: list[int],
    query_lens: list[int],
    shape: LayerShape,
    sink_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """out_TNH in double precision. Row b's queries are its last `query_lens[b]` positions."""
    out, start = [], 0
    for row, (length, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        position_C = torch.arange(length, device=q_TNH.device)
        pages_C = page_tables_BP[row, position_C // shape.page_size].long()
        kv_C2KH = layer_kv[pages_C * shape.page_size + position_C % shape.page_size]
        window, softcap = shape.window or None, shape.softcap or None
        q_QNH = q_TNH[start : start + queries]
        out.append(
            attend_reference(q_QNH, kv_C2KH, position_C[length - queries :], position_C, window, softcap, sink_N)[0]
        )
        start += queries
    return torch.cat(out)


@triton.jit(
    do_not_specialize=["table_stride", "num_tokens", "before_queries"],
    do_not_specialize_on_alignment=[
        "sink_ptr",
        "tables_ptr",
        "seq_lens_ptr",
        "query_starts_ptr",
        "tile_row_ptr",
        "tile_query_ptr",
        "lse_ptr",
        "arrived_ptr",
        "own_start_ptr",
        "parts_ptr",
        "before_lse_ptr",
    ],
)
def _prefill_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    sink_ptr,
    tables_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    tile_row_ptr,
    tile_query_ptr,
    mean_ptr,
    lse_ptr,
    arrived_ptr,
    own_start_ptr,
    parts_ptr,
    before_ptr,
    before_lse_ptr,
    q_stride,
    out_stride,
    table_stride,
    num_tokens,
    before_queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    AT_END: tl.constexpr,
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if not SHARED:
        await_inputs(EARLY)
        release_next(EARLY)
    QUERIES: tl.constexpr = BLOCK_M // (HEADS // KV_HEADS)
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tile_row_ptr + tile)
    if row < 0:
        if SHARED:
            await_inputs(EARLY)
        return
    first_query = tl.load(tile_query_ptr + tile)
    query_start = tl.load(query_starts_ptr + row)
    query_len = tl.load(query_starts_ptr + row + 1) - query_start
    if first_query >= query_len:
        if SHARED:
            await_inputs(EARLY)
        return
    queries = tl.minimum(query_len - first_query, QUERIES)
    seq_len = tl.load(seq_lens_ptr + row)
    query_M, head_M, mask_M, mask_MD = tile_rows(kv_head, queries, HEADS, KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_D)
    query_M = tl.minimum(query_M, queries - 1)
    token_M = (query_start + first_query + query_M).to(tl.int64)
    at_MD = head_M[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]
    q_MD = tl.load(q_ptr + token_M[:, None] * q_stride + at_MD, mask=mask_MD, other=0.0)
    first_position = seq_len - query_len + first_query
    position_M = first_position + query_M
    lo = 0
    if SHARED:
        lo = tl.load(own_start_ptr + row)
    hi = first_position + queries
    if AT_END:
        first_position = seq_len - 1
        position_M = query_M * 0 + first_position
        hi = seq_len
    if WINDOW > 0:
        lo = tl.maximum(first_position - WINDOW + 1, lo)
    split, splits = tl.program_id(2), 1
    if SPLITS > 1:
        length = (hi - lo + SPLITS * BLOCK_N - 1) // (SPLITS * BLOCK_N) * BLOCK_N
        length = tl.maximum(length, MIN_SPLIT)
        splits = tl.maximum((hi - lo + length - 1) // length, 1)
        if split >= splits:
            return
        lo += split * length
        hi = tl.minimum(hi, lo + length)
    # Whole tiles that every query sees, then the diagonal.
    if WINDOW > 0:
        middle = lo
    else:
        middle = lo + tl.maximum(tl.minimum(first_position + 1, hi) - lo, 0) // BLOCK_N * BLOCK_N
    acc_MD, sum_M, top_M = empty_state(BLOCK_M, BLOCK_D)
    head_kv_ptr = kv_ptr + kv_head * HEAD_DIM
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    if WINDOW == 0:
        acc_MD, sum_M, top_M = attend_tokens(
            q_MD,
            acc_MD,
            sum_M,
            top_M,
            head_kv_ptr,
            table_ptr,
            lo,
            middle,
            position_M,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_N,
            BLOCK_D,
            PAGE,
            SCALE,
            SOFTCAP,
            0,
            False,
            True,
        )
    acc_MD, sum_M, top_M = attend_tokens(
        q_MD,
        acc_MD,
        sum_M,
        top_M,
        head_kv_ptr,
        table_ptr,
        middle,
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
        True,
        False,
    )
    if SPLITS > 1:  # noqa: SIM102 (known when compiled; the next is not)
        if splits > 1:
            state_M = token_M * HEADS + head_M
            states = num_tokens.to(tl.int64) * HEADS
            store_state(
                mean_ptr, lse_ptr, split * states + state_M, acc_MD, sum_M, top_M, mask_M, mask_MD, HEAD_DIM
            )  # fmt: skip
            tl.debug_barrier()  # every thread's state is stored before the program counts as arrived
            place = arrived_ptr + tile * KV_HEADS + kv_head
            if tl.atomic_add(place, 1, sem="acq_rel") != splits - 1:
                return
            tl.debug_barrier()
            tl.store(place, 0)
            acc_MD, sum_M, top_M = empty_state(BLOCK_M, BLOCK_D)
            acc_MD, sum_M, top_M = merge_all(
                acc_MD, sum_M, top_M, mean_ptr, lse_ptr, state_M, splits, states, mask_M, mask_MD, HEAD_DIM, BLOCK_D
            )  # fmt: skip
    if SHARED:
        await_inputs(EARLY)  # the prefix kernel's states
        release_next(EARLY)
        stride = before_queries.to(tl.int64) * HEADS
        acc_MD, sum_M, top_M = merge_each(
            acc_MD, sum_M, top_M, before_ptr, before_lse_ptr, token_M * HEADS + head_M, tl.load(parts_ptr + row),
            stride, mask_M, mask_MD, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
    if SINK:
        sink_M = tl.load(sink_ptr + head_M).to(tl.float32)
        acc_MD, sum_M, top_M = add_sink(acc_MD, sum_M, top_M, sink_M)
    mean_MD, _lse_M = mean_and_lse(acc_MD, sum_M, top_M)
    out_MD = mean_MD.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token_M[:, None] * out_stride + at_MD, out_MD, mask=mask_MD)


def prefill_attention(
    q_TNH: torch.Tensor,
    layer_kv: torch.Tensor,
    page_tables_BP: torch.Tensor,
    seq_lens_B: torch.Tensor,
    query_starts_B1: torch.Tensor,
    tile_row_X: torch.Tensor,
    tile_query_X: torch.Tensor,
    out_TNH: torch.Tensor,
    shape: LayerShape,
    config: TileConfig,
    sink_N: torch.Tensor | None = None,
    splits: int = 1,
    partial: States | None = None,
    arrived_XK: torch.Tensor | None = None,
    at_end: bool = False,
    before: Before | None = None,
) -> None:
    """Write out_TNH for the tokens that tiles cover. With `at_end` every query of a row stands at its end
    and sees all of it, as a drafter's block does. With `before` rows read their own tokens alone: where launches
    overlap (`engine.kernels.early`), the one before must then be the prefix kernel's, and all other inputs come
    from two launches back at least.

    Tile x holds queries [tile_query, tile_query + block_m // G) of its row, counted within the row;
    tiles past a row's queries and tiles of row -1 are padding. Where splits > 1, the most that a row is cut into,
    `partial` holds [splits, T] states, and `arrived_XK` int32 zeros that are zeros again afterwards.
    """
    assert q_TNH.stride()[1:] == (shape.head_dim, 1) == out_TNH.stride()[1:], "heads of a token must be contiguous"
    assert layer_kv.is_contiguous() and page_tables_BP.stride(1) == 1
    assert config.block_m >= shape.group, f"a tile of {config.block_m} holds no query of {shape.group} heads"
    assert splits == 1 or (partial is not None and arrived_XK is not None), "splits need room for their states"
    early = is_early(q_TNH)
    _prefill_kernel[(shape.num_kv_heads, tile_row_X.shape[0], splits)](
        q_TNH,
        layer_kv,
        out_TNH,
        sink_N,
        page_tables_BP,
        seq_lens_B,
        query_starts_B1,
        tile_row_X,
        tile_query_X,
        partial.mean_INH if partial is not None else out_TNH,
        partial.lse_IN if partial is not None else out_TNH,
        arrived_XK if arrived_XK is not None else tile_row_X,
        before.own_start_B if before is not None else tile_row_X,
        before.parts_B if before is not None else tile_row_X,
        before.states.mean_INH if before is not None else out_TNH,
        before.states.lse_IN if before is not None else out_TNH,
        q_TNH.stride(0),
        out_TNH.stride(0),
        page_tables_BP.stride(0),
        q_TNH.shape[0],
        before.states.lse_IN.shape[1] if before is not None else 0,
        **shape.constants,
        SINK=sink_N is not None,
        SPLITS=splits,
        MIN_SPLIT=-(-MIN_SPLIT // config.block_n) * config.block_n,
        AT_END=at_end,
        SHARED=before is not None,
        EARLY=early,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        **config.options,
        **options(early),
    )


def cut_tiles(query_lens: list[int], seq_lens: list[int], queries: int) -> tuple[list[int], list[int]]:
    """(rows, first queries) of the tiles, longest contexts first so that the last to run are short."""
    tiles = []
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        tiles += [(-(length - count + first), row, first) for first in range(0, count, queries)]
    tiles.sort()
    return [row for _, row, _ in tiles], [first for _, _, first in tiles]
