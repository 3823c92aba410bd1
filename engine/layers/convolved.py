"""Mixers of one build: a convolution, a state per head behind it, and a gate over what is read from that.

Owns the order of the three for rows of one token, chunks of prompts and rows whose states may stay, and where each
finds its inputs and its slots. What a head does, and which columns of the product mean what, is the subclass's
(`engine.layers.mamba2`, `engine.layers.gated_delta`).

Shapes: T tokens, B rows of one token, I the product's columns, C convolved channels, X what the gate reads, Y what
a head reads of its own, O outputs, S slots, K the convolution's width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from engine.layers.causal_conv_reference import causal_conv_reference
from engine.layers.mixer import ChunkRows, Mixer, States, StateStep
from engine.layers.replay import StepRows

Operation = Callable[..., torch.Tensor]


class Operations(NamedTuple):
    """`step` and `chunks` take what is convolved, what heads read of their own, heads, shape, states, slots and
    the ends of rows; `chunks` the rows' positions too."""

    step: Operation
    chunks: Operation
    gate: Operation


@cache
def convolutions(device: str) -> tuple[Operation, Operation]:
    """Of rows of one token, and of several. As kernels on a GPU. Elsewhere Triton need not be installed."""
    if device != "cuda":

        def conv(*given: Any) -> torch.Tensor:
            return causal_conv_reference(*given[:-1])

        return causal_conv_reference, conv
    from engine.kernels.causal_conv import causal_conv, causal_conv_step

    return causal_conv_step, causal_conv


class ConvolvedMixer(Mixer):
    conv_C1K: torch.Tensor
    conv_bias_C: torch.Tensor | None
    columns_C: torch.Tensor | None = None
    """Of the channels among what `split` gives to the convolution, where they are not in order."""
    shape: Any

    def operations(self, device: str) -> Operations:
        raise NotImplementedError

    def split(self, inputs_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the gate reads (TX), what is convolved (TC), and what heads read of their own (TY)."""
        raise NotImplementedError

    def heads(self) -> Any:
        """Parameters that each head has of its own."""
        raise NotImplementedError

    def cuts(self, step: StateStep) -> dict[str, int]:
        """What `chunks` is told of where chunks end."""
        raise NotImplementedError

    def gated(self, run: Operations, out_TO: torch.Tensor, gate_TX: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def decode(self, inputs_BI: torch.Tensor, states: States, slots_B: torch.Tensor) -> torch.Tensor:
        kept_SKC, state = states
        device = inputs_BI.device.type
        run, (conv, _) = self.operations(device), convolutions(device)
        gate_BX, mixed_BC, own_BY = self.split(inputs_BI)
        mixed_BC = conv(mixed_BC, self.columns_C, self.conv_C1K[:, 0], self.conv_bias_C, kept_SKC, slots_B)
        out_BO = run.step(mixed_BC, own_BY, self.heads(), self.shape, state, slots_B)
        return self.gated(run, out_BO, gate_BX)

    def prefill(self, inputs_TI: torch.Tensor, states: States, step: StateStep) -> torch.Tensor:
        run = self.operations(inputs_TI.device.type)
        gate_TX, given = self._convolve(inputs_TI, states, step.rows)
        if step.sequential:
            out_TO = run.step(*given)
        else:
            out_TO = run.chunks(*given, step.rows.positions_R, **self.cuts(step))
        return self.gated(run, out_TO, gate_TX)

    def steps(self, inputs_TI: torch.Tensor, states: States, rows: StepRows, keep: bool) -> torch.Tensor:
        if inputs_TI.device.type != "cuda":
            return super().steps(inputs_TI, states, rows, keep)
        run = self.operations("cuda")
        gate_TX, given = self._convolve(inputs_TI, states, rows, keep=keep)
        return self.gated(run, run.step(*given, keep=keep), gate_TX)

    def _convolve(
        self, inputs_TI: torch.Tensor, states: States, rows: ChunkRows | StepRows, **options: bool
    ) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """What the gate reads, and what `step` and `chunks` begin with."""
        kept_SKC, state = states
        where, (_, conv) = (rows.slots_R, rows.ends_R1), convolutions(inputs_TI.device.type)
        gate_TX, mixed_TC, own_TY = self.split(inputs_TI)
        taps = self.columns_C, self.conv_C1K[:, 0], self.conv_bias_C
        mixed_TC = conv(mixed_TC, *taps, kept_SKC, *where, rows.rows_T, **options)
        return gate_TX, (mixed_TC, own_TY, self.heads(), self.shape, state, *where)
