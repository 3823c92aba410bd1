"""The gated delta rule in torch: what its kernels are compared with, and the CPU's way to compute it.

Owns the shapes of a layer's heads, where a product keeps their numbers, and the references of
`engine.kernels.gdn_decode`, `gdn_prefill` and `gdn_gate`, which say what each computes.

Shapes: T tokens of R rows back to back, N key heads, H value heads, K key size, V value size, S slots,
L a chunk's tokens, C = 2 * N * K + H * V (queries, keys and values side by side), O = H * V; I columns of the
product before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.pointwise import sigmoid, silu, softplus

L2_EPS = 1e-6
CHUNK = 64


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def shared(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def convolved(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.outputs

    @property
    def outputs(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """Where a product keeps each value head's numbers: those of head h begin at `base` + `stride` * its key head
    + its place among those that share it, times their width."""

    base: int
    stride: int

    def of(self, shape: GatedDeltaShape, width: int = 1) -> torch.Tensor:
        """[H * width], on the CPU."""
        group = self.base + self.stride * torch.arange(shape.key_heads)[:, None]
        return (group + torch.arange(shape.shared * width)).flatten()


@dataclass(frozen=True, slots=True)
class GatedDeltaHeads:
    """Of every value head: `rate_H` and `bias_H` in fp32, and the columns of its raw decay and strength."""

    rate_H: torch.Tensor
    bias_H: torch.Tensor
    raw: HeadColumns
    strength: HeadColumns

    def decays(self, raw_TH: torch.Tensor) -> torch.Tensor:
        """log of what is left of a state, fp32."""
        return -self.rate_H.exp() * softplus(raw_TH.float() + self.bias_H)


def split_convolved(qkv_TC: torch.Tensor, shape: GatedDeltaShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normed q and k as heads see them [T, H, K], q scaled, and v [T, H, V], all fp32."""
    tokens, width = len(qkv_TC), shape.key_heads * shape.key_dim
    q, k, v = qkv_TC.float().split((width, width, shape.outputs), dim=1)
    q_TNK, k_TNK = (part.reshape(tokens, shape.key_heads, shape.key_dim) for part in (q, k))
    q_TNK = q_TNK * torch.rsqrt(q_TNK.square().sum(-1, keepdim=True) + L2_EPS) * shape.key_dim**-0.5
    k_TNK = k_TNK * torch.rsqrt(k_TNK.square().sum(-1, keepdim=True) + L2_EPS)
    q_THK, k_THK = (part.repeat_interleave(shape.shared, dim=1) for part in (q_TNK, k_TNK))
    return q_THK, k_THK, v.reshape(tokens, shape.value_heads, shape.value_dim)


def split_gates(
    inputs_TI: torch.Tensor, heads: GatedDeltaHeads, shape: GatedDeltaShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decays and strengths [T, H], fp32."""
    raw_TH, strength_TH = (
        inputs_TI.index_select(1, columns.of(shape).to(inputs_TI.device)) for columns in (heads.raw, heads.strength)
    )
    return heads.decays(raw_TH), sigmoid(strength_TH.float())


def gdn_decode_reference(
    qkv_TC: torch.Tensor,
    inputs_TI: torch.Tensor,
    heads: GatedDeltaHeads,
    shape: GatedDeltaShape,
    state_SHVK: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `gdn_decode`. Sums do not depend on how many rows there are."""
    if ends_R1 is not None:
        out_TO = torch.empty_like(qkv_TC[:, : shape.outputs])
        for slot_1, start, end in zip(slots_R.split(1), ends_R1[:-1].tolist(), ends_R1[1:].tolist(), strict=True):
            for token in range(start, end):
                at = slice(token, token + 1)
                out_TO[at] = gdn_decode_reference(qkv_TC[at], inputs_TI[at], heads, shape, state_SHVK, slot_1)
        return out_TO
    q_RHK, k_RHK, v_RHV = split_convolved(qkv_TC, shape)
    decay_RH, strength_RH = split_gates(inputs_TI, heads, shape)
    state_RHVK = state_SHVK[slots_R].mul_(decay_RH.exp()[:, :, None, None])
    known_RHV = (state_RHVK * k_RHK[:, :, None]).sum(-1)
    learned_RHV = (v_RHV - known_RHV) * strength_RH[..., None]
    state_RHVK.addcmul_(learned_RHV[..., None], k_RHK[:, :, None])
    state_SHVK[slots_R] = state_RHVK
    return (state_RHVK * q_RHK[:, :, None]).sum(-1).flatten(1).to(qkv_TC.dtype)


def gdn_prefill_reference(
    qkv_TC: torch.Tensor,
    inputs_TI: torch.Tensor,
    heads: GatedDeltaHeads,
    shape: GatedDeltaShape,
    state_SHVK: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor,
    positions_R: torch.Tensor,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """As `gdn_prefill`; a chunk's sums depend on its tokens alone."""
    q_THK, k_THK, v_THV = split_convolved(qkv_TC, shape)
    decay_TH, strength_TH = split_gates(inputs_TI, heads, shape)
    out_TO = torch.empty_like(qkv_TC[:, : shape.outputs])
    starts, ends = ends_R1[:-1].tolist(), ends_R1[1:].tolist()
    for slot, start, end, position in zip(slots_R.tolist(), starts, ends, positions_R.tolist(), strict=True):
        for first in range(start - position % chunk, end, chunk):
            at = slice(max(first, start), min(first + chunk, end))
            q, k, v, decay, strength = (
                part[at].transpose(0, 1) for part in (q_THK, k_THK, v_THV, decay_TH, strength_TH)
            )
            out_HLV = _chunk(q, k, v, decay, strength, state_SHVK[slot])
            out_TO[at] = out_HLV.transpose(0, 1).flatten(1)
    return out_TO


def _chunk(
    q_HLK: torch.Tensor,
    k_HLK: torch.Tensor,
    v_HLV: torch.Tensor,
    decay_HL: torch.Tensor,
    strength_HL: torch.Tensor,
    state_HVK: torch.Tensor,
) -> torch.Tensor:
    """out_HLV; the state moves on."""
    past_HL1, strength_HL1 = decay_HL.cumsum(1)[..., None], strength_HL[..., None]
    state_HKV, grown_HL1 = state_HVK.transpose(1, 2), past_HL1.exp()
    between_HLL = (past_HL1 - past_HL1.transpose(1, 2)).tril().exp().tril()
    mixed_HLL = (k_HLK * strength_HL1) @ k_HLK.transpose(1, 2) * between_HLL
    wanted_HLV = strength_HL1 * (v_HLV - grown_HL1 * (k_HLK @ state_HKV))
    learned_HLV = torch.linalg.solve_triangular(mixed_HLL, wanted_HLV, upper=False, unitriangular=True)
    out_HLV = (q_HLK * grown_HL1) @ state_HKV + (q_HLK @ k_HLK.transpose(1, 2) * between_HLL) @ learned_HLV
    left_HL1 = (past_HL1[:, -1:] - past_HL1).exp()
    gained_HVK = (learned_HLV * left_HL1).transpose(1, 2) @ k_HLK
    state_HVK.mul_(grown_HL1[:, -1:]).add_(gained_HVK)
    return out_HLV


def gdn_gate_reference(
    x_TO: torch.Tensor,
    inputs_TI: torch.Tensor,
    columns: HeadColumns,
    weight_V: torch.Tensor,
    eps: float,
    shape: GatedDeltaShape,
) -> torch.Tensor:
    gate_TO = inputs_TI.index_select(1, columns.of(shape, shape.value_dim).to(x_TO.device))
    x_THV = x_TO.float().unflatten(1, (shape.value_heads, shape.value_dim))
    normed_THV = x_THV * torch.rsqrt(x_THV.square().mean(-1, keepdim=True) + eps)
    out_TO = (weight_V * normed_THV.to(x_TO.dtype)).flatten(1)
    return (out_TO * silu(gate_TO.float())).to(x_TO.dtype)
