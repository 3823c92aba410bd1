"""A block of experts: a gate picks a few for each token, and their outputs are summed.

Owns the gate's parameters, the experts' and the reference computation, expert by expert. Ignores how
many ranks there are: experts are not split. Rows of an expert are padded to a multiple of four, so that
a token's bits do not depend on how many others chose its expert.

Shapes: T tokens, D hidden, X experts, K experts a token, I an expert's width, M rows of one expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.errors import Unsupported
from engine.models.shape import ModelSpec
from engine.parallel import TensorParallel
from lora.step import AdapterStep

ROW_MULTIPLE = 4


class ClampedExperts(nn.Module):
    """Biased experts over (gate, up) pairs that lie side by side: clamp(gate) * sigmoid(alpha * gate) times
    clamp(up) + 1. The K largest gate logits choose, and a softmax over them alone weighs."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> None:
        super().__init__()
        experts = spec.experts
        assert experts is not None, "the spec has experts"
        if parallel.size > 1:
            raise Unsupported(field="experts", expected="one rank", actual=f"{parallel.size} ranks")

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.per_token, self.alpha, self.limit = experts.per_token, experts.alpha, experts.limit
        count, hidden, width = experts.count, spec.hidden, spec.intermediate
        self.gate_XD, self.gate_bias_X = empty(count, hidden), empty(count)
        self.gate_up_XDI, self.gate_up_bias_XI = empty(count, hidden, 2 * width), empty(count, 2 * width)
        self.down_XID, self.down_bias_XD = empty(count, width, hidden), empty(count, hidden)

    def forward(self, x_TD: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        logits_TX = F.linear(x_TD, self.gate_XD, self.gate_bias_X)
        top_TK, chosen_TK = logits_TX.topk(self.per_token, dim=-1)
        weights_TK = torch.softmax(top_TK, dim=-1)
        out_TD = torch.zeros_like(x_TD)
        order = chosen_TK.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen_TK.view(-1), minlength=len(self.gate_XD)).tolist()
        for expert, places_M in enumerate(order.split(counts)):
            if counts[expert]:
                rows_M = places_M // self.per_token
                added_MD = self._expert(x_TD.index_select(0, rows_M), expert)
                added_MD *= weights_TK.view(-1).index_select(0, places_M).unsqueeze(1)
                out_TD.index_add_(0, rows_M, added_MD)
        return out_TD

    __call__ = forward  # no hooks, as elsewhere in a layer

    def _expert(self, x_MD: torch.Tensor, expert: int) -> torch.Tensor:
        rows = len(x_MD)
        x_MD = F.pad(x_MD, (0, 0, 0, -rows % ROW_MULTIPLE))
        pairs_MI2 = (x_MD @ self.gate_up_XDI[expert] + self.gate_up_bias_XI[expert]).unflatten(-1, (-1, 2))
        gate_MI = pairs_MI2[..., 0].clamp(max=self.limit)
        up_MI = pairs_MI2[..., 1].clamp(-self.limit, self.limit)
        inner_MI = (up_MI + 1) * (gate_MI * torch.sigmoid(gate_MI * self.alpha))
        return (inner_MI @ self.down_XID[expert] + self.down_bias_XD[expert])[:rows]
