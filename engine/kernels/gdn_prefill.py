"""The gated delta rule over many tokens of several rows, in chunks.

Owns the chunked form (Yang, Wang, Zhang, Shen and Kim, 2024, arxiv.org/abs/2406.06484, with decay as in
2412.06464): what a chunk's tokens learn of each other is a triangular system, solved for all chunks at once;
then each row goes through its chunks with the state. What a head does with a token is `gdn_decode`'s. Chunks end
at multiples of CHUNK counted from a row's first token ever, wherever the rows' tokens here start, so that who
goes on from a state that was kept there computes the same bits.

Shapes: T tokens of R rows back to back, N key heads, H value heads, K key size, V value size, S slots,
L a chunk's tokens, C = 2 * N * K + H * V, O = H * V, I columns of the product before.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.gdn_decode import check_rows, constants, log_decay, sigmoid
from engine.kernels.state_tile import state_tile
from engine.layers.gated_delta_reference import CHUNK, L2_EPS, GatedDeltaHeads, GatedDeltaShape


@triton.jit
def gdn_solve_kernel(
    qkv_ptr, inputs_ptr, rate_ptr, bias_ptr, ends_ptr, positions_ptr,
    values_ptr, keys_ptr, scores_ptr, factors_ptr, inputs_stride, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    RAW: tl.constexpr, RAW_STRIDE: tl.constexpr, STRENGTH: tl.constexpr, STRENGTH_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a chunk and head: what its tokens would learn from an empty state (`values`), how that answers to a
    state (`keys`), how outputs read what was learned (`scores`), and of each token the factors on q and k and
    the decay since the chunk's start. Places outside the row neither decay nor learn."""
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    row, head = tl.program_id(1), tl.program_id(2)
    key_head, column = head // SHARED, head % SHARED
    place, k_at, v_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    in_k, in_v = k_at < KEY, v_at < VALUE
    rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
    await_inputs(EARLY)
    release_next(EARLY)
    start, end = tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1)
    first = start - tl.load(positions_ptr + row) % CHUNK + tl.program_id(0) * CHUNK
    if first >= end:
        return
    token = first + place
    inside = (token >= start) & (token < end)
    line = token.to(tl.int64)
    lines, wanted = (qkv_ptr + line * WIDTH)[:, None], inside[:, None] & in_k[None, :]
    q = tl.load(lines + key_head * KEY + k_at[None, :], mask=wanted, other=0.0)
    k = tl.load(lines + (KEY_HEADS + key_head) * KEY + k_at[None, :], mask=wanted, other=0.0)
    gates = inputs_ptr + line * inputs_stride
    raw = tl.load(gates + RAW + key_head * RAW_STRIDE + column, mask=inside, other=0.0)
    strength = sigmoid(tl.load(gates + STRENGTH + key_head * STRENGTH_STRIDE + column, mask=inside, other=0.0))
    strength = tl.where(inside, strength, 0.0)
    past = tl.cumsum(tl.where(inside, log_decay(raw, bias, rate), 0.0), 0)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    q_factor = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + eps) * scale
    k_factor = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + eps)
    q = (q.to(tl.float32) * q_factor[:, None]).to(DTYPE)
    k = (k.to(tl.float32) * k_factor[:, None]).to(DTYPE)
    between = tl.exp(tl.where(place[:, None] >= place[None, :], past[:, None] - past[None, :], float("-inf")))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * between
    mixed = tl.dot(k, tl.trans(k), input_precision="ieee") * between * strength[:, None]
    mixed = tl.where(place[:, None] > place[None, :], mixed, 0.0)
    # Rows of the inverse of 1 + mixed, each from those above it.
    solved = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for at in range(1, CHUNK):
        weights = tl.sum(tl.where(place[:, None] == at, mixed, 0.0), 0)
        taken = tl.sum(weights[:, None] * solved, 0)
        solved = tl.where(place[:, None] == at, solved - taken[None, :], solved)
    solved = solved.to(DTYPE)
    v = tl.load(
        lines + 2 * KEY_HEADS * KEY + head * VALUE + v_at[None, :], mask=inside[:, None] & in_v[None, :], other=0.0
    )
    values = tl.dot(solved, (v.to(tl.float32) * strength[:, None]).to(DTYPE), input_precision="ieee")
    seen = (k.to(tl.float32) * (strength * tl.exp(past))[:, None]).to(DTYPE)
    keys = tl.dot(solved, seen, input_precision="ieee")
    of_head = line * VALUE_HEADS + head
    tl.store(
        values_ptr + of_head[:, None] * VALUE + v_at[None, :], values.to(DTYPE), mask=inside[:, None] & in_v[None, :]
    )
    tl.store(keys_ptr + of_head[:, None] * KEY + k_at[None, :], keys.to(DTYPE), mask=wanted)
    tl.store(scores_ptr + of_head[:, None] * CHUNK + place[None, :], scores.to(DTYPE), mask=inside[:, None])
    tl.store(factors_ptr + of_head * 3, q_factor, mask=inside)
    tl.store(factors_ptr + of_head * 3 + 1, k_factor, mask=inside)
    tl.store(factors_ptr + of_head * 3 + 2, past, mask=inside)


@triton.jit
def gdn_scan_kernel(
    qkv_ptr, values_ptr, keys_ptr, scores_ptr, factors_ptr, state_ptr, slots_ptr, ends_ptr, positions_ptr, out_ptr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A row's chunks one after the other, for some value columns of a head: at most 32, which lie along the rows of
    every product here. With tokens along the rows, where products become wgmma, outputs were wrong from a
    chunk's 17th token on, though interpreted they were right (Triton 3.6 on an H200)."""
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // SHARED
    place, k_at = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    v_at = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k, in_v = k_at < KEY, v_at < VALUE
    await_inputs(EARLY)
    release_next(EARLY)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    start, end, position = tl.load(ends_ptr + row), tl.load(ends_ptr + row + 1), tl.load(positions_ptr + row)
    tile, in_tile = state_tile(state_ptr, slots_ptr, row, head, v_at, k_at, VALUE_HEADS, VALUE, KEY)
    state = tl.load(tile, mask=in_tile, other=0.0)
    for base in range(start - position % CHUNK, end, CHUNK):
        token = base + place
        inside = (token >= start) & (token < end)
        line = token.to(tl.int64)
        of_head = line * VALUE_HEADS + head
        last = (tl.minimum(base + CHUNK, end) - 1).to(tl.int64) * VALUE_HEADS + head
        wanted_k, wanted_v = inside[:, None] & in_k[None, :], inside[None, :] & in_v[:, None]
        keys = tl.load(keys_ptr + of_head[:, None] * KEY + k_at[None, :], mask=wanted_k, other=0.0)
        values = tl.load(values_ptr + of_head[None, :] * VALUE + v_at[:, None], mask=wanted_v, other=0.0)
        scores = tl.load(scores_ptr + of_head[:, None] * CHUNK + place[None, :], mask=inside[:, None], other=0.0)
        lines = (qkv_ptr + line * WIDTH)[:, None]
        q = tl.load(lines + key_head * KEY + k_at[None, :], mask=wanted_k, other=0.0).to(tl.float32)
        k = tl.load(lines + (KEY_HEADS + key_head) * KEY + k_at[None, :], mask=wanted_k, other=0.0).to(tl.float32)
        q_factor = tl.load(factors_ptr + of_head * 3, mask=inside, other=0.0)
        k_factor = tl.load(factors_ptr + of_head * 3 + 1, mask=inside, other=0.0)
        past = tl.load(factors_ptr + of_head * 3 + 2, mask=inside, other=0.0)
        total = tl.load(factors_ptr + last * 3 + 2)
        held = state.to(DTYPE)
        learned = values.to(tl.float32) - tl.dot(held, tl.trans(keys), input_precision="ieee")
        reading = (q * (q_factor * tl.exp(past))[:, None]).to(DTYPE)
        out = tl.dot(held, tl.trans(reading), input_precision="ieee")
        out += tl.dot(learned.to(DTYPE), tl.trans(scores), input_precision="ieee")
        at = out_ptr + of_head[None, :] * VALUE + v_at[:, None]
        tl.store(at, out.to(DTYPE), mask=wanted_v)
        kept = (learned * tl.where(inside, tl.exp(total - past), 0.0)[None, :]).to(DTYPE)
        k = (k * k_factor[:, None]).to(DTYPE)
        state = state * tl.exp(total) + tl.dot(kept, k, input_precision="ieee")
    tl.store(tile, state, mask=in_tile)


@dataclass(frozen=True, slots=True)
class PrefillSpace:
    """What the chunks' systems leave for the scan."""

    values_THV: torch.Tensor
    keys_THK: torch.Tensor
    scores_THL: torch.Tensor
    factors_TH3: torch.Tensor

    @staticmethod
    def empty(tokens: int, shape: GatedDeltaShape, like: torch.Tensor, chunk: int) -> PrefillSpace:
        heads = shape.value_heads
        return PrefillSpace(
            like.new_empty(tokens, heads, shape.value_dim),
            like.new_empty(tokens, heads, shape.key_dim),
            like.new_empty(tokens, heads, chunk),
            like.new_empty(tokens, heads, 3, dtype=torch.float32),
        )


def gdn_prefill(
    qkv_TC: torch.Tensor,
    inputs_TI: torch.Tensor,
    heads: GatedDeltaHeads,
    shape: GatedDeltaShape,
    state_SHVK: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor,
    positions_R: torch.Tensor,
    most: int,
    chunk: int = CHUNK,
    out: torch.Tensor | None = None,
    space: PrefillSpace | None = None,
) -> torch.Tensor:
    """out_TO. Row r has the tokens [ends_R1[r], ends_R1[r + 1]), the first at `positions_R[r]` of its sequence;
    no row falls into more than `most` chunks. What the scan needs of all tokens lies in `space`."""
    check_rows(qkv_TC, inputs_TI, state_SHVK, shape)
    tokens, rows, count = qkv_TC.shape[0], slots_R.shape[0], shape.value_heads
    out = qkv_TC.new_empty(tokens, shape.outputs) if out is None else out
    space = PrefillSpace.empty(tokens, shape, qkv_TC, chunk) if space is None else space
    early = is_early(out)
    block_k, block_v = (max(16, triton.next_power_of_2(size)) for size in (shape.key_dim, shape.value_dim))
    wide = qkv_TC.dtype == torch.float32
    sizes, part = constants(shape, heads), min(block_v, 16 if wide else 32)
    if tokens:
        gdn_solve_kernel[(most, rows, count)](
            qkv_TC, inputs_TI, heads.rate_H, heads.bias_H, ends_R1, positions_R,
            space.values_THV, space.keys_THK, space.scores_THL, space.factors_TH3,
            inputs_TI.stride(0), shape.key_dim**-0.5, L2_EPS, **sizes,
            CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=block_v, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
        sizes = {name: sizes[name] for name in ("KEY_HEADS", "VALUE_HEADS", "KEY", "VALUE")}
        gdn_scan_kernel[(rows, count, triton.cdiv(shape.value_dim, part))](
            qkv_TC, space.values_THV, space.keys_THK, space.scores_THL, space.factors_TH3, state_SHVK,
            slots_R, ends_R1, positions_R, out, **sizes,
            CHUNK=chunk, BLOCK_K=block_k, BLOCK_V=part, EARLY=early, num_warps=4,
            num_stages=1 if wide else 2, **options(early),
        )  # fmt: skip
    return out
