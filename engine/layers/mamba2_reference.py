"""What Mamba2's operations compute, in torch: the CPU's way, and what the kernels are compared with.

Owns their arithmetic and the values they take. Ignores Triton, which need not be installed.

Shapes: T tokens of R rows back to back, H heads, P head size, G groups of heads that share B and C, N state
size, S slots, L a chunk's tokens, C = H * P + 2 * G * N (x, B and C side by side), I = H * P, E a group's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.pointwise import silu, softplus


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        """The width of what all heads put out."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, slots=True)
class Mamba2Heads:
    """What a layer's heads have of their own, and the limits of step sizes."""

    a_log_H: torch.Tensor
    bias_H: torch.Tensor
    skip_H: torch.Tensor
    low: float = 0.0
    high: float = float("inf")

    def steps(self, raw_TH: torch.Tensor) -> torch.Tensor:
        return softplus(raw_TH.float() + self.bias_H.float()).clamp(self.low, self.high)

    @property
    def rate_H(self) -> torch.Tensor:
        return -self.a_log_H.float().exp()


def split_convolved(xbc_TC: torch.Tensor, shape: Mamba2Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H, P], B and C as heads see them [T, H, N], all fp32."""
    tokens, width = xbc_TC.shape[0], shape.groups * shape.state
    x, b, c = xbc_TC.float().split((shape.inner, width, width), dim=1)
    shared = [part.reshape(tokens, shape.groups, 1, shape.state) for part in (b, c)]
    per_group = shape.heads // shape.groups
    b_THN, c_THN = (part.expand(-1, -1, per_group, -1).flatten(1, 2) for part in shared)
    return x.reshape(tokens, shape.heads, shape.head_dim), b_THN, c_THN


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """A root-mean-square norm of each group; `gated_first` norms what is gated already."""

    weight_I: torch.Tensor
    groups: int
    eps: float
    gated_first: bool


def mamba2_decode_reference(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    heads: Mamba2Heads,
    shape: Mamba2Shape,
    state_SHPN: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `mamba2_decode`. Sums do not depend on how many rows there are."""
    if ends_R1 is not None:
        out_TI = torch.empty_like(xbc_TC[:, : shape.inner])
        for slot_1, start, end in zip(slots_R.split(1), ends_R1[:-1].tolist(), ends_R1[1:].tolist(), strict=True):
            for token in range(start, end):
                at = slice(token, token + 1)
                out_TI[at] = mamba2_decode_reference(xbc_TC[at], dt_TH[at], heads, shape, state_SHPN, slot_1)
        return out_TI
    x_RHP, b_RHN, c_RHN = split_convolved(xbc_TC, shape)
    step_RH = heads.steps(dt_TH)
    gained_RHPN = (step_RH[:, :, None] * x_RHP)[..., None] * b_RHN[:, :, None]
    state_RHPN = state_SHPN[slots_R].mul_((step_RH * heads.rate_H).exp()[:, :, None, None]).add_(gained_RHPN)
    state_SHPN[slots_R] = state_RHPN
    out_RHP = state_RHPN.mul_(c_RHN[:, :, None]).sum(-1) + heads.skip_H.float()[:, None] * x_RHP
    return out_RHP.flatten(1).to(xbc_TC.dtype)


def mamba2_prefill_reference(
    xbc_TC: torch.Tensor,
    dt_TH: torch.Tensor,
    heads: Mamba2Heads,
    shape: Mamba2Shape,
    state_SHPN: torch.Tensor,
    slots_R: torch.Tensor,
    ends_R1: torch.Tensor,
    positions_R: torch.Tensor,
    chunk: int,
) -> torch.Tensor:
    """As `mamba2_prefill`."""
    x_THP, b_THN, c_THN = split_convolved(xbc_TC, shape)
    step_TH = heads.steps(dt_TH)
    decay_TH = step_TH * heads.rate_H
    out_THP = heads.skip_H.float()[:, None] * x_THP
    rows = zip(slots_R.tolist(), ends_R1[:-1].tolist(), ends_R1[1:].tolist(), positions_R.tolist(), strict=True)
    for slot, at, end, position in rows:
        state_HPN, first = state_SHPN[slot], at
        while at < end:
            stop = min(end, at + chunk - (position + at - first) % chunk)
            weighed_HLP = (step_TH[at:stop, :, None] * x_THP[at:stop]).transpose(0, 1)
            b_HLN, c_HLN = b_THN[at:stop].transpose(0, 1), c_THN[at:stop].transpose(0, 1)
            past_HL = decay_TH[at:stop].cumsum(0).T
            between_HLL = (past_HL[:, :, None] - past_HL[:, None]).tril().exp().tril()
            inner_HLP = (c_HLN @ b_HLN.transpose(1, 2) * between_HLL) @ weighed_HLP
            outer_HLP = (c_HLN @ state_HPN.transpose(1, 2)) * past_HL.exp()[..., None]
            out_THP[at:stop] += (inner_HLP + outer_HLP).transpose(0, 1)
            left_HL1 = (past_HL[:, -1:] - past_HL).exp()[..., None]
            gained_HPN = (weighed_HLP * left_HL1).transpose(1, 2) @ b_HLN
            state_HPN.mul_(past_HL[:, -1].exp()[:, None, None]).add_(gained_HPN)
            at = stop
    return out_THP.flatten(1).to(xbc_TC.dtype)


def mamba2_gate_reference(x_TI: torch.Tensor, gate_TI: torch.Tensor, norm: GroupNorm | None) -> torch.Tensor:
    wide_TI, factor_TI = x_TI.float(), silu(gate_TI.float())
    if norm is None:
        return (wide_TI * factor_TI).to(x_TI.dtype)
    if norm.gated_first:
        wide_TI = wide_TI * factor_TI
    groups_TGE = wide_TI.unflatten(1, (norm.groups, -1))
    scale_TG1 = torch.rsqrt(groups_TGE.square().mean(-1, keepdim=True) + norm.eps)
    wide_TI = (groups_TGE * scale_TG1).flatten(1) * norm.weight_I.float()
    return (wide_TI if norm.gated_first else wide_TI * factor_TI).to(x_TI.dtype)
