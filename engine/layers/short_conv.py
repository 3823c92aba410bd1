"""A gated causal convolution over a few tokens: what mixes tokens where there is no attention.

Owns the mixer's parameters and its reference computation; the state is the last inputs of the convolution,
exact copies. Every output is the same sum in the same order, whether its token came alone or in a chunk.

Shapes: T tokens, D hidden, K the convolution's width, S slots, L a chunk's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.batch import ForwardBatch
from engine.errors import Unsupported
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.memory.state_pool import StatePool
from engine.models.shape import ModelSpec
from engine.parallel import TensorParallel
from lora.step import AdapterStep


@dataclass(slots=True)
class StateStep:
    """Where a step's rows have their states: `slots_B` of the rows of one token each that come first, and
    (slot, start, end) of the others, in tokens of the batch."""

    pool: StatePool
    slots_B: torch.Tensor
    chunks: list[tuple[int, int, int]]

    @staticmethod
    def of(batch: ForwardBatch, pool: StatePool) -> StateStep:
        slots, singles = batch.state_slots, batch.num_decode
        assert slots is not None, "rows of a recurrent model have states"
        chunks, start = [], singles
        for slot, count in zip(slots[singles:], batch.query_lens[singles:], strict=True):
            chunks.append((slot, start, start + count))
            start += count
        return StateStep(pool, torch.tensor(slots[:singles], device=batch.input_ids_T.device), chunks)


class ShortConv(nn.Module):
    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device, parallel: TensorParallel
    ) -> None:
        super().__init__()
        if parallel.size > 1:
            raise Unsupported(field=f"layers[{layer}].kind", expected="one rank", actual=f"{parallel.size} ranks")
        self.layer = layer
        hidden, bias = spec.hidden, spec.conv_bias
        self.in_proj = ColumnParallelLinear(hidden, (3 * hidden,), bias, dtype, device, parallel)
        self.out_proj = RowParallelLinear(hidden, hidden, bias, dtype, device, parallel)
        weight = torch.empty(hidden, 1, spec.conv_width, dtype=dtype, device=device)
        self.weight_D1K = nn.Parameter(weight, requires_grad=False)
        self.bias_D = (
            nn.Parameter(torch.empty(hidden, dtype=dtype, device=device), requires_grad=False) if bias else None
        )

    def forward(self, x_TD: torch.Tensor, step: StateStep, adapters: AdapterStep | None = None) -> torch.Tensor:
        before_TD, after_TD, value_TD = self.in_proj(x_TD, adapters).chunk(3, dim=1)
        input_TD = before_TD * value_TD
        out_TD = torch.empty_like(input_TD)
        state_SKD, singles = step.pool.layer(self.layer), len(step.slots_B)
        if singles:
            window_BKD = torch.cat((state_SKD[step.slots_B], input_TD[:singles, None]), dim=1)
            out_TD[:singles] = self._sum([window_BKD[:, tap] for tap in range(window_BKD.shape[1])])
            state_SKD[step.slots_B] = window_BKD[:, 1:]
        for slot, start, end in step.chunks:
            known_LD = torch.cat((state_SKD[slot], input_TD[start:end]))
            taps = self.weight_D1K.shape[2]
            out_TD[start:end] = self._sum([known_LD[tap : tap + end - start] for tap in range(taps)])
            state_SKD[slot] = known_LD[end - start :]
        return self.out_proj(after_TD * out_TD, adapters)

    __call__ = forward  # no hooks, as elsewhere in a layer

    def _sum(self, taps_LD: list[torch.Tensor]) -> torch.Tensor:
        """Of inputs oldest first, in fp32."""
        weights_DK = self.weight_D1K[:, 0].float()
        total_LD = taps_LD[0] * weights_DK[:, 0]
        for tap, input_LD in enumerate(taps_LD[1:], 1):
            total_LD = torch.addcmul(total_LD, input_LD.float(), weights_DK[:, tap])
        return total_LD if self.bias_D is None else total_LD + self.bias_D
