"""A gated delta net: a convolution, a state per head that forgets and learns what a token's value has that it did
not know, and a normed, gated output.

Owns where the layer's product keeps each part; how parts come together is `engine.layers.convolved`'s. Each part is
an operation of `engine.kernels`, which runs as a kernel on a GPU and as its reference elsewhere. States are fp32,
and chunks of a prompt end on one grid of positions.

Shapes: T tokens, I the product's columns, C convolved channels, H value heads, V the value size, X = I, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.layers.convolved import ConvolvedMixer, Operations
from engine.layers.gated_delta_reference import (
    GatedDeltaHeads,
    GatedDeltaShape,
    HeadColumns,
    gdn_decode_reference,
    gdn_gate_reference,
    gdn_prefill_reference,
)
from engine.layers.mixer import StateStep
from engine.models.mixers import GatedDeltaSpec
from engine.parallel import TensorParallel


@cache
def operations(device: str) -> Operations:
    """As kernels on a GPU. Elsewhere Triton need not be installed."""
    if device != "cuda":

        def chunks(*given: Any, most: int, chunk: int) -> torch.Tensor:
            return gdn_prefill_reference(*given, chunk=chunk)

        return Operations(gdn_decode_reference, chunks, gdn_gate_reference)
    from engine.kernels.gdn_decode import gdn_decode
    from engine.kernels.gdn_gate import gdn_gate
    from engine.kernels.gdn_prefill import gdn_prefill

    return Operations(gdn_decode, gdn_prefill, gdn_gate)


class GatedDelta(ConvolvedMixer):
    rate_H: torch.Tensor
    bias_H: torch.Tensor
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
        self.kind, self.conv_bias_C = kind, None
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

    def operations(self, device: str) -> Operations:
        return operations(device)

    def split(self, inputs_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return inputs_TI, inputs_TI if self.kind.grouped else inputs_TI[:, : self.kind.convolved], inputs_TI

    def heads(self) -> GatedDeltaHeads:
        return GatedDeltaHeads(self.rate_H, self.bias_H, self.raw, self.strength)

    def cuts(self, step: StateStep) -> dict[str, int]:
        grid = self.kind.grid
        most = max(-(-(row.position % grid + row.end - row.start) // grid) for row in step.chunks)
        return {"most": most, "chunk": grid}

    def gated(self, run: Operations, out_TO: torch.Tensor, gate_TX: torch.Tensor) -> torch.Tensor:
        return run.gate(out_TO, gate_TX, self.gate, self.norm_V, self.kind.eps, self.shape)


def grouped_columns(shape: GatedDeltaShape) -> torch.Tensor:
    """int32 columns of all queries, all keys and all values, where each key head's lie side by side and gates
    behind them."""
    keys, values = shape.key_dim, shape.shared * shape.value_dim
    stride = 2 * (keys + values)
    firsts_N1 = stride * torch.arange(shape.key_heads)[:, None]
    parts = (0, keys), (keys, keys), (2 * keys, values)
    return torch.cat([(firsts_N1 + first + torch.arange(width)).flatten() for first, width in parts]).int()
