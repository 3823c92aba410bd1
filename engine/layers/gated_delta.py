"""A gated delta net: a convolution, a state per head that forgets and learns what a token's value has that it did
not know, and a normed, gated output.

Owns how the parts of a layer come together and where its product keeps them; each part is an operation of
`engine.kernels`, which runs as a kernel on a GPU and as its reference elsewhere. States are fp32, and chunks of
a prompt end on one grid of positions.

Shapes: T tokens, B rows of one token, I the product's columns, C convolved channels, H value heads, S slots, K
the convolution's width and the key size, V the value size, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from engine.layers.causal_conv_reference import causal_conv_reference
from engine.layers.gated_delta_reference import (
    GatedDeltaHeads,
    GatedDeltaShape,
    HeadColumns,
    gdn_decode_reference,
    gdn_gate_reference,
    gdn_prefill_reference,
)
from engine.layers.mixer import Mixer, States, StateStep
from engine.layers.replay import StepRows
from engine.models.mixers import GatedDeltaSpec
from engine.parallel import TensorParallel

Operation = Callable[..., torch.Tensor]


class Operations(NamedTuple):
    conv_step: Operation
    conv: Operation
    step: Operation
    chunks: Operation
    gate: Operation


@cache
def operations(device: str) -> Operations:
    """As kernels on a GPU. Elsewhere Triton need not be installed."""
    if device != "cuda":

        def conv(*given: Any) -> torch.Tensor:
            return causal_conv_reference(*given[:-1])

        def chunks(*given: Any, most: int, chunk: int) -> torch.Tensor:
            return gdn_prefill_reference(*given, chunk=chunk)

        return Operations(causal_conv_reference, conv, gdn_decode_reference, chunks, gdn_gate_reference)
    from engine.kernels.causal_conv import causal_conv, causal_conv_step
    from engine.kernels.gdn_decode import gdn_decode
    from engine.kernels.gdn_gate import gdn_gate
    from engine.kernels.gdn_prefill import gdn_prefill

    return Operations(causal_conv_step, causal_conv, gdn_decode, gdn_prefill, gdn_gate)


class GatedDelta(Mixer):
    rate_H: torch.Tensor
    bias_H: torch.Tensor
    conv_C1K: torch.Tensor
    norm_V: torch.Tensor

    def __init__(
        self,
        kind: GatedDeltaSpec,
        hidden: int,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__(kind, hidden, layer, dtype, device, parallel)
        self.kind = kind
        self.shape = GatedDeltaShape(kind.key_heads, kind.value_heads, kind.key_dim, kind.value_dim)
        shared, outputs, end = self.shape.shared, kind.outputs, kind.convolved + kind.outputs
        if kind.grouped:
            group = 2 * kind.key_dim + 2 * shared * kind.value_dim
            self.strength, self.raw = HeadColumns(end, 2 * shared), HeadColumns(end + shared, 2 * shared)
            self.gate = HeadColumns(group - shared * kind.value_dim, group)
        else:
            self.strength, self.raw = HeadColumns(end, shared), HeadColumns(end + kind.value_heads, shared)
            self.gate = HeadColumns(kind.convolved, shared * kind.value_dim)
        assert outputs % kind.key_heads == 0, f"{kind.value_heads} value heads for {kind.key_heads} key heads"
        self.columns_C = grouped_columns(self.shape).to(device) if kind.grouped else None

    def decode(self, inputs_BI: torch.Tensor, states: States, slots_B: torch.Tensor) -> torch.Tensor:
        inputs_SKC, state_SHVK = states
        run, weight_CK = operations(inputs_BI.device.type), self.conv_C1K[:, 0]
        qkv_BC = run.conv_step(self._convolved(inputs_BI), self.columns_C, weight_CK, None, inputs_SKC, slots_B)
        out_BO = run.step(qkv_BC, inputs_BI, self._heads(), self.shape, state_SHVK, slots_B)
        return run.gate(out_BO, inputs_BI, self.gate, self.norm_V, self.kind.eps, self.shape)

    def prefill(self, inputs_TI: torch.Tensor, states: States, step: StateStep) -> torch.Tensor:
        inputs_SKC, state_SHVK = states
        run, rows, weight_CK = operations(inputs_TI.device.type), step.rows, self.conv_C1K[:, 0]
        where, grid = (rows.slots_R, rows.ends_R1), self.kind.grid
        given = self._convolved(inputs_TI), self.columns_C, weight_CK, None, inputs_SKC, *where, rows.rows_T
        given = run.conv(*given), inputs_TI, self._heads(), self.shape, state_SHVK, *where
        if step.sequential:
            out_TO = run.step(*given)
        else:
            most = max(-(-(row.position % grid + row.end - row.start) // grid) for row in step.chunks)
            out_TO = run.chunks(*given, rows.positions_R, most=most, chunk=grid)
        return run.gate(out_TO, inputs_TI, self.gate, self.norm_V, self.kind.eps, self.shape)

    def steps(self, inputs_TI: torch.Tensor, states: States, rows: StepRows, keep: bool) -> torch.Tensor:
        if inputs_TI.device.type != "cuda":
            return super().steps(inputs_TI, states, rows, keep)
        inputs_SKC, state_SHVK = states
        run, where = operations("cuda"), (rows.slots_R, rows.ends_R1)
        given = self._convolved(inputs_TI), self.columns_C, self.conv_C1K[:, 0], None, inputs_SKC, *where, rows.rows_T
        qkv_TC = run.conv(*given, keep=keep)
        out_TO = run.step(qkv_TC, inputs_TI, self._heads(), self.shape, state_SHVK, *where, keep=keep)
        return run.gate(out_TO, inputs_TI, self.gate, self.norm_V, self.kind.eps, self.shape)

    def _convolved(self, inputs_TI: torch.Tensor) -> torch.Tensor:
        return inputs_TI if self.kind.grouped else inputs_TI[:, : self.kind.convolved]

    def _heads(self) -> GatedDeltaHeads:
        return GatedDeltaHeads(self.rate_H, self.bias_H, self.raw, self.strength)


def grouped_columns(shape: GatedDeltaShape) -> torch.Tensor:
    """int32 columns of all queries, all keys and all values, where each key head's lie side by side and gates
    behind them."""
    keys, values = shape.key_dim, shape.shared * shape.value_dim
    stride = 2 * (keys + values)
    firsts_N1 = stride * torch.arange(shape.key_heads)[:, None]
    parts = (0, keys), (keys, keys), (2 * keys, values)
    return torch.cat([(firsts_N1 + first + torch.arange(width)).flatten() for first, width in parts]).int()
