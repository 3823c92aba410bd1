"""A gated causal convolution over a few tokens: what mixes tokens where there is no attention.

Owns the reference computation; the state is the last inputs of the convolution, exact copies. Every output is
the same sum in the same order, whether its token came alone or in a chunk.

Shapes: T tokens, B rows, D hidden, K the convolution's width, S slots, L a chunk's tokens.
"""

from __future__ import annotations

import torch

from engine.layers.mixer import Mixer, States, StateStep
from engine.models.mixers import ShortConvSpec
from engine.parallel import TensorParallel


class ShortConv(Mixer):
    weight_D1K: torch.Tensor
    bias_D: torch.Tensor | None

    def __init__(
        self,
        kind: ShortConvSpec,
        hidden: int,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel,
    ) -> None:
        super().__init__(kind, hidden, layer, dtype, device, parallel)
        if not kind.bias:
            self.bias_D = None

    def decode(self, inputs_BI: torch.Tensor, states: States, slots_B: torch.Tensor) -> torch.Tensor:
        (state_SKD,) = states
        before_BD, after_BD, value_BD = inputs_BI.chunk(3, dim=1)
        window_BKD = torch.cat((state_SKD[slots_B], (before_BD * value_BD)[:, None]), dim=1)
        state_SKD[slots_B] = window_BKD[:, 1:]
        return after_BD * self._sum(list(window_BKD.unbind(1))).to(after_BD.dtype)

    def prefill(self, inputs_TI: torch.Tensor, states: States, step: StateStep) -> torch.Tensor:
        (state_SKD,) = states
        before_TD, after_TD, value_TD = inputs_TI.chunk(3, dim=1)
        input_TD = before_TD * value_TD
        out_TD, taps = torch.empty_like(input_TD), self.weight_D1K.shape[2]
        for slot, start, end, _ in step.chunks:
            known_LD = torch.cat((state_SKD[slot], input_TD[start:end]))
            out_TD[start:end] = self._sum([known_LD[tap : tap + end - start] for tap in range(taps)])
            state_SKD[slot] = known_LD[end - start :]
        return out_TD.mul_(after_TD)

    def _sum(self, taps_LD: list[torch.Tensor]) -> torch.Tensor:
        """Of inputs oldest first, in fp32."""
        weights_DK = self.weight_D1K[:, 0].float()
        total_LD = taps_LD[0] * weights_DK[:, 0]
        for tap, input_LD in enumerate(taps_LD[1:], 1):
            total_LD = torch.addcmul(total_LD, input_LD.float(), weights_DK[:, tap])
        return total_LD if self.bias_D is None else total_LD + self.bias_D
