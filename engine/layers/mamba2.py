"""Mamba2: a convolution, a state per head that decays and gains by what the input says, and a gate.

Owns how the parts of a layer come together; each is an operation of `engine.kernels`, which runs as a kernel on
a GPU and as its reference elsewhere. States are fp32, and chunks of a prompt end on one grid of positions.

Shapes: T tokens, B rows of one token, I the product's columns, E inner width, C convolved channels, H heads, S
slots, K the convolution's width, P head size, N state size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from engine.layers.causal_conv_reference import causal_conv_reference
from engine.layers.mamba2_reference import (
    GroupNorm,
    Mamba2Heads,
    Mamba2Shape,
    mamba2_decode_reference,
    mamba2_gate_reference,
    mamba2_prefill_reference,
)
from engine.layers.mixer import Mixer, States, StateStep
from engine.layers.replay import StepRows
from engine.models.mamba2 import Mamba2Spec
from engine.parallel import TensorParallel

CHUNK = 64
"""Tokens that are computed side by side. Chunks end at multiples of it, counted from a sequence's first token: who
goes on from a state that was kept there computes the same bits."""

Operation = Callable[..., torch.Tensor]


class Operations(NamedTuple):
    conv_step: Operation
    conv: Operation
    step: Operation
    chunks: Operation
    gate: Operation


@cache
def operations(kind: str) -> Operations:
    """As kernels where the device is a GPU. Elsewhere Triton need not be installed."""
    if kind != "cuda":

        def conv(*given: torch.Tensor) -> torch.Tensor:
            return causal_conv_reference(*given[:-1])

        return Operations(
            causal_conv_reference,
            conv,
            mamba2_decode_reference,
            mamba2_prefill_reference,
            mamba2_gate_reference,
        )
    from engine.kernels.causal_conv import causal_conv, causal_conv_step
    from engine.kernels.mamba2_decode import mamba2_decode
    from engine.kernels.mamba2_gate import mamba2_gate
    from engine.kernels.mamba2_prefill import mamba2_prefill

    return Operations(causal_conv_step, causal_conv, mamba2_decode, mamba2_prefill, mamba2_gate)


class Mamba2(Mixer):
    a_log_H: torch.Tensor
    step_bias_H: torch.Tensor
    skip_H: torch.Tensor
    conv_C1K: torch.Tensor
    conv_bias_C: torch.Tensor | None
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

    def decode(self, inputs_BI: torch.Tensor, states: States, slots_B: torch.Tensor) -> torch.Tensor:
        inputs_SKC, state_SHPN = states
        run = operations(inputs_BI.device.type)
        gate_BE, xbc_BC, dt_BH = self._split(inputs_BI)
        xbc_BC = run.conv_step(xbc_BC, None, self.conv_C1K[:, 0], self.conv_bias_C, inputs_SKC, slots_B)
        out_BE = run.step(xbc_BC, dt_BH, self._heads(), self.shape, state_SHPN, slots_B)
        return run.gate(out_BE, gate_BE, self._norm())

    def prefill(self, inputs_TI: torch.Tensor, states: States, step: StateStep) -> torch.Tensor:
        inputs_SKC, state_SHPN = states
        run, rows = operations(inputs_TI.device.type), step.rows
        gate_TE, xbc_TC, dt_TH = self._split(inputs_TI)
        where = rows.slots_R, rows.ends_R1
        xbc_TC = run.conv(xbc_TC, None, self.conv_C1K[:, 0], self.conv_bias_C, inputs_SKC, *where, rows.rows_T)
        given = xbc_TC, dt_TH, self._heads(), self.shape, state_SHPN, *where
        if step.sequential:
            out_TE = run.step(*given)
        else:
            out_TE = run.chunks(*given, rows.positions_R, CHUNK)
        return run.gate(out_TE, gate_TE, self._norm())

    def steps(self, inputs_TI: torch.Tensor, states: States, rows: StepRows, keep: bool) -> torch.Tensor:
        if inputs_TI.device.type != "cuda":
            return super().steps(inputs_TI, states, rows, keep)
        inputs_SKC, state_SHPN = states
        run, where = operations("cuda"), (rows.slots_R, rows.ends_R1)
        gate_TE, xbc_TC, dt_TH = self._split(inputs_TI)
        given = xbc_TC, None, self.conv_C1K[:, 0], self.conv_bias_C, inputs_SKC, *where, rows.rows_T
        xbc_TC = run.conv(*given, keep=keep)
        out_TE = run.step(xbc_TC, dt_TH, self._heads(), self.shape, state_SHPN, *where, keep=keep)
        return run.gate(out_TE, gate_TE, self._norm())

    def _split(self, inputs_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.scale_I is not None:
            inputs_TI = torch.mul(inputs_TI, self.scale_I, out=torch.empty_like(inputs_TI))
        gate_TE, xbc_TC, dt_TH = inputs_TI.split(self.parts, dim=1)
        return gate_TE, xbc_TC, dt_TH

    def _heads(self) -> Mamba2Heads:
        return Mamba2Heads(self.a_log_H, self.step_bias_H, self.skip_H, self.kind.low, self.kind.high)

    def _norm(self) -> GroupNorm | None:
        if self.kind.norm == "none":
            return None
        return GroupNorm(self.norm_I, self.kind.groups, self.kind.eps, self.kind.norm == "behind")
