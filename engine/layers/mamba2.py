"""Mamba2: a convolution, a state per head that decays and gains by what the input says, and a gate.

Owns what lies where in the layer's product; how parts come together is `engine.layers.convolved`'s. Each part is an
operation of `engine.kernels`, which runs as a kernel on a GPU and as its reference elsewhere. States are fp32, and
chunks of a prompt end on one grid of positions.

Shapes: T tokens, I the product's columns, E inner width, C convolved channels, H heads, X = O = E.
"""

from __future__ import annotations

from functools import cache

import torch

from engine.layers.convolved import ConvolvedMixer, Operations
from engine.layers.mamba2_reference import (
    GroupNorm,
    Mamba2Heads,
    Mamba2Shape,
    mamba2_decode_reference,
    mamba2_gate_reference,
    mamba2_prefill_reference,
)
from engine.layers.mixer import StateStep
from engine.models.mamba2 import Mamba2Spec
from engine.parallel import TensorParallel

CHUNK = 64
"""Tokens that are computed side by side. Chunks end at multiples of it, counted from a sequence's first token: who
goes on from a state that was kept there computes the same bits."""


@cache
def operations(device: str) -> Operations:
    """As kernels on a GPU. Elsewhere Triton need not be installed."""
    if device != "cuda":
        return Operations(mamba2_decode_reference, mamba2_prefill_reference, mamba2_gate_reference)
    from engine.kernels.mamba2_decode import mamba2_decode
    from engine.kernels.mamba2_gate import mamba2_gate
    from engine.kernels.mamba2_prefill import mamba2_prefill

    return Operations(mamba2_decode, mamba2_prefill, mamba2_gate)


class Mamba2(ConvolvedMixer):
    a_log_H: torch.Tensor
    step_bias_H: torch.Tensor
    skip_H: torch.Tensor
    norm_I: torch.Tensor

    def __init__(
        self,
        kind: Mamba2Spec,
        hidden: int,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__(kind, hidden, layer, dtype, device, parallel)
        if not kind.conv_bias:
            self.conv_bias_C = None
        self.kind = kind
        self.shape = Mamba2Shape(kind.heads, kind.head_dim, kind.groups, kind.state_size)
        self.parts = (kind.inner, kind.convolved, kind.heads)
        self.scale_I = None
        if kind.scales is not None:
            shared = kind.groups * kind.state_size
            widths = torch.tensor([kind.inner, kind.inner, shared, shared, kind.heads])
            self.scale_I = torch.tensor(kind.scales).repeat_interleave(widths).to(device)

    def operations(self, device: str) -> Operations:
        return operations(device)

    def split(self, inputs_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.scale_I is not None:
            inputs_TI = torch.mul(inputs_TI, self.scale_I, out=torch.empty_like(inputs_TI))
        gate_TE, xbc_TC, dt_TH = inputs_TI.split(self.parts, dim=1)
        return gate_TE, xbc_TC, dt_TH

    def heads(self) -> Mamba2Heads:
        return Mamba2Heads(self.a_log_H, self.step_bias_H, self.skip_H, self.kind.low, self.kind.high)

    def cuts(self, step: StateStep) -> dict[str, int]:
        return {"chunk": CHUNK}

    def gated(self, run: Operations, out_TO: torch.Tensor, gate_TX: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        norm = None if kind.norm == "none" else GroupNorm(self.norm_I, kind.groups, kind.eps, kind.norm == "behind")
        return run.gate(out_TO, gate_TX, norm)
