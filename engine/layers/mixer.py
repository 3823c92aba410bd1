"""What mixes tokens by a state of fixed size: the seam that all recurrent layers share.

Owns a mixer's products and other parameters, as its spec names them, and how a step's tokens are handed to
`decode` (rows of one token, all of them at once) and `prefill` (rows of several). Ignores what a state means
and who has which slot.

A new kind is a `MixerSpec` (`engine.models.mixers`) and a subclass with these two methods, listed in
`engine.models.decoder.MIXERS`. Both change the states of their slots in place. Slot 0 is scratch: rows that
are padding or have finished are sent there, several at once, and what they compute is read by nobody.

Shapes: T tokens, B rows of one token, C rows of several, D hidden, I inputs, O outputs, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from engine.batch import ForwardBatch
from engine.errors import Unsupported
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.replay import StepRows, VerifyStep, steps_of_decode, verify
from engine.memory.state_pool import StatePool
from engine.memory.transfer import send
from engine.models.mixers import MixerSpec
from engine.parallel import TensorParallel
from lora.step import AdapterStep

States = tuple[torch.Tensor, ...]
"""A layer's state tensors [S, ...], in the spec's order."""


class Chunk(NamedTuple):
    """A row of several tokens: its slot, its tokens [start, end) among those of `prefill`, and the position
    in its sequence of the first."""

    slot: int
    start: int
    end: int
    position: int


class ChunkRows(NamedTuple):
    """The chunks as int64 tensors: tokens [ends_R1[r], ends_R1[r + 1]) belong to `slots_R[r]`, the first of them
    is at `positions_R[r]`, and token t is row `rows_T[t]`'s."""

    slots_R: torch.Tensor
    ends_R1: torch.Tensor
    positions_R: torch.Tensor
    rows_T: torch.Tensor


@dataclass(slots=True)
class StateStep:
    """Where a step's rows have their states: those of `verify` come first, then `slots_B` int64 of rows of one
    token each, then the others. With `sequential` nothing may depend on where a sequence was cut: not its bits
    either."""

    pool: StatePool
    slots_B: torch.Tensor
    chunks: Sequence[Chunk] = ()
    sequential: bool = False
    verify: VerifyStep | None = None
    _rows: ChunkRows | None = field(default=None, init=False)

    @property
    def rows(self) -> ChunkRows:
        """Of `chunks`, sent to the device once a step."""
        if self._rows is None:
            slots_R, starts_R, ends_R, positions_R = np.array(self.chunks, dtype=np.int64).T
            rows_T = np.repeat(np.arange(len(slots_R)), ends_R - starts_R)
            parts = slots_R, np.append(0, ends_R), positions_R, rows_T
            self._rows = ChunkRows(*(send(part, self.slots_B.device) for part in parts))
        return self._rows

    @staticmethod
    def of(batch: ForwardBatch, pool: StatePool, sequential: bool = False) -> StateStep:
        slots, first, singles = batch.state_slots, batch.provisional, max(batch.provisional, batch.num_decode)
        assert slots is not None, "rows of a recurrent model have states"
        chunks, start = [], 0
        rows = zip(slots[singles:], batch.query_lens[singles:], batch.seq_lens[singles:], strict=True)
        for slot, count, length in rows:
            chunks.append(Chunk(slot, start, start + count, length - count))
            start += count
        slots_B = torch.tensor(slots[first:singles], dtype=torch.int64, device=batch.input_ids_T.device)
        verify = None if pool.rings is None else VerifyStep.of(batch, pool.rings)
        return StateStep(pool, slots_B, chunks, sequential, verify)


class Mixer(nn.Module):
    def __init__(
        self,
        kind: MixerSpec,
        hidden: int,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        if parallel.size > 1:
            raise Unsupported(field=f"layers[{layer}].mixer", expected="one rank", actual=f"{parallel.size} ranks")
        self.layer = layer
        widths = tuple(kind.inputs(hidden).values())
        self.in_proj = ColumnParallelLinear(hidden, widths, kind.bias, dtype, device, parallel)
        self.out_proj = RowParallelLinear(kind.output(hidden)[1], hidden, kind.bias, dtype, device, parallel)
        for whole in kind.wholes(hidden).values():
            value = torch.empty(whole.shape, dtype=whole.dtype or dtype, device=device)
            self.register_parameter(whole.param, nn.Parameter(value, requires_grad=False))

    def forward(self, x_TD: torch.Tensor, step: StateStep, adapters: AdapterStep | None = None) -> torch.Tensor:
        inputs_TI, states, parts = self.in_proj(x_TD, adapters), step.pool.layer(self.layer), []
        verified = 0 if step.verify is None else step.verify.num_tokens
        if step.verify is not None:
            parts.append(verify(self, inputs_TI[:verified], states, step.verify))
        singles = verified + len(step.slots_B)
        if singles > verified:
            parts.append(self.decode(inputs_TI[verified:singles], states, step.slots_B))
        if step.chunks:
            parts.append(self.prefill(inputs_TI[singles:], states, step))
        return self.out_proj(parts[0] if len(parts) == 1 else torch.cat(parts), adapters)

    __call__ = forward  # no hooks, as elsewhere in a layer

    def decode(self, inputs_BI: torch.Tensor, states: States, slots_B: torch.Tensor) -> torch.Tensor:
        """out_BO of rows of one token; no two have a slot in common but scratch. May be captured: it reads no
        tensor on the host."""
        raise NotImplementedError

    def prefill(self, inputs_TI: torch.Tensor, states: States, step: StateStep) -> torch.Tensor:
        """out_TO of `step.chunks`, whose tokens `inputs_TI` are."""
        raise NotImplementedError

    def steps(self, inputs_TI: torch.Tensor, states: States, rows: StepRows, keep: bool) -> torch.Tensor:
        """out_TO of rows of several tokens, with the bits that `decode` gives one after the other. Without `keep`
        states stay as they were."""
        return steps_of_decode(self, inputs_TI, states, rows, keep)
