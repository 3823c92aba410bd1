"""The gated delta rule, step by step on states in slots: one token a row, or several one after the other.

Owns what a head does with one token: its state decays by exp(-exp(rate) * softplus(raw + bias)), reads what it
holds under the normed key, and learns the difference to the value times sigmoid(strength); the output is read
by the normed query (Yang, Kautz and Hatamizadeh, 2024, arxiv.org/abs/2412.06464). States are fp32 and change in
place. What a token gives does not depend on where its row was cut. Ignores convolution and gate.

Shapes: T tokens of R rows back to back, N key heads, H value heads, K key size, V value size, S slots,
C = 2 * N * K + H * V (queries, keys and values side by side), O = H * V; I columns of the product before.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.early import await_inputs, is_early, options, release_next
from engine.kernels.state_tile import check_state, softplus, state_tile, step_blocks, tokens_of
from engine.layers.gated_delta_reference import L2_EPS, GatedDeltaHeads, GatedDeltaShape


@triton.jit
def log_decay(raw, bias, rate):
    return -tl.exp(rate) * softplus(raw.to(tl.float32) + bias)


@triton.jit
def sigmoid(value):
    return tl.fdiv(1.0, 1.0 + tl.exp(-value.to(tl.float32)))


@triton.jit
def gdn_decode_kernel(
    qkv_ptr, inputs_ptr, rate_ptr, bias_ptr, state_ptr, slots_ptr, ends_ptr, out_ptr, inputs_stride, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    RAW: tl.constexpr, RAW_STRIDE: tl.constexpr, STRENGTH: tl.constexpr, STRENGTH_STRIDE: tl.constexpr,
    SEVERAL: tl.constexpr, KEEP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    SHARED: tl.constexpr = VALUE_HEADS // KEY_HEADS
    WIDTH: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    row, head = tl.program_id(0), tl.program_id(1)
    key_head, place = head // SHARED, head % SHARED
    v_at = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_at = tl.arange(0, BLOCK_K)
    in_v, in_k = v_at < VALUE, k_at < KEY
    rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
    await_inputs(EARLY)
    release_next(EARLY)
    first, count = tokens_of(ends_ptr, row, SEVERAL)
    tile, inside = state_tile(state_ptr, slots_ptr, row, head, v_at, k_at, VALUE_HEADS, VALUE, KEY)
    state = tl.load(tile, mask=inside, other=0.0)
    line, gates = qkv_ptr + first * WIDTH, inputs_ptr + first * inputs_stride
    out_line = out_ptr + first * (VALUE_HEADS * VALUE) + head * VALUE
    for _ in range(count):
        q = tl.load(line + key_head * KEY + k_at, mask=in_k, other=0.0).to(tl.float32)
        k = tl.load(line + (KEY_HEADS + key_head) * KEY + k_at, mask=in_k, other=0.0).to(tl.float32)
        v = tl.load(line + 2 * KEY_HEADS * KEY + head * VALUE + v_at, mask=in_v, other=0.0).to(tl.float32)
        raw = tl.load(gates + RAW + key_head * RAW_STRIDE + place)
        strength = sigmoid(tl.load(gates + STRENGTH + key_head * STRENGTH_STRIDE + place))
        q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
        k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        state *= tl.exp(log_decay(raw, bias, rate))
        learned = (v - tl.sum(state * k[None, :], 1)) * strength
        state += learned[:, None] * k[None, :]
        out = tl.sum(state * q[None, :], 1)
        tl.store(out_line + v_at, out.to(out_ptr.dtype.element_ty), mask=in_v)
        line, gates, out_line = line + WIDTH, gates + inputs_stride, out_line + VALUE_HEADS * VALUE
    if KEEP:
        tl.store(tile, state, mask=inside)


def gdn_decode(
    qkv_TC: torch.Tensor,
    inputs_TI: torch.Tensor,
    heads: GatedDeltaHeads,
    shape: GatedDeltaShape,
    state_SHVK: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    keep: bool = True,
) -> torch.Tensor:
    """out_TO in the input's dtype. Row r is token r or, with `ends_R1`, tokens [ends_R1[r], ends_R1[r + 1]).
    Rows that share a slot must be padding. States stay as they were without `keep`."""
    check_rows(qkv_TC, inputs_TI, state_SHVK, shape)
    rows = slots_R.shape[0]
    out = qkv_TC.new_empty(qkv_TC.shape[0], shape.outputs) if out is None else out
    early = is_early(out)
    block_v, block_k = step_blocks(shape.value_dim, shape.key_dim)
    if rows:
        gdn_decode_kernel[(rows, shape.value_heads, triton.cdiv(shape.value_dim, block_v))](
            qkv_TC, inputs_TI, heads.rate_H, heads.bias_H, state_SHVK,
            slots_R, slots_R if ends_R1 is None else ends_R1, out,
            inputs_TI.stride(0), shape.key_dim**-0.5, L2_EPS, **constants(shape, heads),
            SEVERAL=ends_R1 is not None, KEEP=keep,
            BLOCK_K=block_k, BLOCK_V=block_v, EARLY=early, num_warps=4, **options(early),
        )  # fmt: skip
    return out


def constants(shape: GatedDeltaShape, heads: GatedDeltaHeads) -> dict[str, int]:
    return {
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": shape.value_heads,
        "KEY": shape.key_dim,
        "VALUE": shape.value_dim,
        "RAW": heads.raw.base,
        "RAW_STRIDE": heads.raw.stride,
        "STRENGTH": heads.strength.base,
        "STRENGTH_STRIDE": heads.strength.stride,
    }


def check_rows(qkv_TC: torch.Tensor, inputs_TI: torch.Tensor, state_SHVK: torch.Tensor, shape: GatedDeltaShape) -> None:
    assert qkv_TC.shape[1] == shape.convolved and qkv_TC.is_contiguous(), f"{tuple(qkv_TC.shape)} for {shape}"
    assert inputs_TI.shape[0] == qkv_TC.shape[0] and inputs_TI.stride(1) == 1, "gates of other tokens"
    check_state(state_SHVK, shape.value_heads, shape.value_dim, shape.key_dim)
