"""A drafter's context into its pool: keys and values of all its layers in one launch.

Owns the optional norm of key heads, their rotation, and the write of both kinds. Rounds where
`engine.kernels.rope_kv_write` does. A token whose slot is -1 (padding) is skipped; a position past the rotary
table, which a drafter is never asked about, takes the last one. Ignores where projections come from.

Layers are told apart by addresses, of their storage and of their norms' weights: both keep theirs, so one table
of them serves as long as the drafter lives, and a captured launch sees every new weight.

Shapes: L layers, T tokens, K key/value heads, H head size, C positions. `kv_LTE` is [L, T, 2K * H], key heads
before value heads.
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
from engine.kernels.rms_norm import rms_norm_reference

HEADS_PER_PROGRAM = 8


@dataclass(frozen=True, slots=True)
class ContextLayers:
    """What is written to, and with what: storage [S, 2K, H] of each layer, and the weights [H] of its key norm
    (`norms` is empty without norms). `addresses` int64 [2, L] are theirs, on their device."""

    storage: tuple[torch.Tensor, ...]
    norms: tuple[torch.Tensor, ...]
    eps: float
    cos_CH: torch.Tensor
    sin_CH: torch.Tensor
    addresses: torch.Tensor

    @staticmethod
    def of(
        storage: Sequence[torch.Tensor],
        norms: Sequence[torch.Tensor],
        eps: float,
        cos_CH: torch.Tensor,
        sin_CH: torch.Tensor,
    ) -> ContextLayers:
        assert all(layer.is_contiguous() for layer in storage), "storage must be contiguous"
        assert not norms or len(norms) == len(storage), f"{len(norms)} norms for {len(storage)} layers"
        places = [[part.data_ptr() for part in parts] for parts in (storage, norms or storage)]
        addresses = torch.tensor(places, dtype=torch.int64).to(storage[0].device)
        return ContextLayers(tuple(storage), tuple(norms), eps, cos_CH, sin_CH, addresses)


def write_context_reference(
    layers: ContextLayers, kv_LTE: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor
) -> None:
    real_R = (slots_T >= 0).nonzero()[:, 0]
    at_R = positions_T[real_R].long().clamp(max=len(layers.cos_CH) - 1)
    cos_R1H, sin_R1H = layers.cos_CH[at_R, None], layers.sin_CH[at_R, None]
    for index, storage in enumerate(layers.storage):
        k_RKH, v_RKH = kv_LTE[index, real_R].unflatten(-1, storage.shape[1:]).chunk(2, dim=1)
        if layers.norms:
            k_RKH = rms_norm_reference(k_RKH, layers.norms[index], layers.eps)
        k_RKH = k_RKH * cos_R1H + torch.roll(k_RKH, storage.shape[2] // 2, -1) * sin_R1H
        storage[slots_T[real_R].long()] = torch.cat((k_RKH, v_RKH), dim=1)


@triton.jit
def write_context_kernel(
    kv_ptr, addresses_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, eps, layers, positions, layer_stride,
    token_stride,
    K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    await_inputs(EARLY)
    release_next(EARLY)
    if slot < 0:
        return
    dtype: tl.constexpr = kv_ptr.dtype.element_ty
    storage_ptr = tl.load(addresses_ptr + layer).to(tl.pointer_type(dtype))
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    real = at < H // 2
    inside = (head < 2 * K) & real
    source = kv_ptr + layer.to(tl.int64) * layer_stride + token * token_stride + head * H + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + H // 2, mask=inside, other=0.0).to(tl.float32)
    turned_first, turned_second = first, second
    if NORM:
        norm_ptr = tl.load(addresses_ptr + layers + layer).to(tl.pointer_type(dtype))
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1)[:, None] * (1.0 / H) + eps)
        weight_first = tl.load(norm_ptr + at, mask=real, other=0.0).to(tl.float32)
        weight_second = tl.load(norm_ptr + at + H // 2, mask=real, other=0.0).to(tl.float32)
        turned_first = ((first * scale).to(dtype).to(tl.float32) * weight_first).to(dtype).to(tl.float32)
        turned_second = ((second * scale).to(dtype).to(tl.float32) * weight_second).to(dtype).to(tl.float32)
    table = tl.minimum(tl.maximum(position, 0), positions - 1) * H + at
    cos_first = tl.load(cos_ptr + table, mask=real, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + table, mask=real, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + table + H // 2, mask=real, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + table + H // 2, mask=real, other=0.0).to(tl.float32)
    one = (turned_first * cos_first).to(dtype).to(tl.float32)
    rotated_first = one + (turned_second * sin_first).to(dtype).to(tl.float32)
    two = (turned_second * cos_second).to(dtype).to(tl.float32)
    rotated_second = two + (turned_first * sin_second).to(dtype).to(tl.float32)
    is_value = head >= K
    target = storage_ptr + slot * (2 * K * H) + head * H + at
    tl.store(target, tl.where(is_value, first, rotated_first).to(dtype), mask=inside)
    tl.store(target + H // 2, tl.where(is_value, second, rotated_second).to(dtype), mask=inside)


def write_context(
    layers: ContextLayers, kv_LTE: torch.Tensor, positions_T: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Slots and positions, integers of any kind, come from at least two launches before
    (`engine.kernels.early`)."""
    count, tokens, width = kv_LTE.shape
    _, heads, size = layers.storage[0].shape
    assert count == len(layers.storage) and width == heads * size, f"{count} layers of {width}"
    assert kv_LTE.stride(2) == 1, "heads of a token must be contiguous"
    assert kv_LTE.dtype == layers.storage[0].dtype, f"projection {kv_LTE.dtype}, pool {layers.storage[0].dtype}"
    half, early = triton.next_power_of_2(size // 2), is_early(kv_LTE)
    each = min(HEADS_PER_PROGRAM, triton.next_power_of_2(heads))
    if tokens:
        write_context_kernel[(tokens, count, triton.cdiv(heads, each))](
            kv_LTE,
            layers.addresses,
            layers.cos_CH,
            layers.sin_CH,
            positions_T,
            slots_T,
            layers.eps,
            count,
            layers.cos_CH.shape[0],
            kv_LTE.stride(0),
            kv_LTE.stride(1),
            K=heads // 2,
            H=size,
            HALF=half,
            HEADS=each,
            NORM=bool(layers.norms),
            EARLY=early,
            num_warps=max(1, min(4, each * half // 128)),
            enable_fp_fusion=False,
            **options(early),
        )
