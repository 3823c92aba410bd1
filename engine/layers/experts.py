"""Blocks of experts: a gate picks a few for each token, and their outputs are summed.

Owns the gates' parameters, the experts' and the reference computation, expert by expert. Ignores how
many ranks there are: experts are not split. Rows of an expert are padded to a multiple of four, so that
a token's bits do not depend on how many others chose its expert.

Shapes: T tokens, D hidden, X experts, K experts a token, I an expert's width, M rows of one expert, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.errors import Unsupported
from engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from engine.layers.matmul import linear
from engine.layers.pointwise import sigmoid
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
        if x_TD.is_cuda:
            return self._by_kernels(x_TD, chosen_TK, weights_TK)
        return sum_of_experts(x_TD, chosen_TK, weights_TK, len(self.gate_XD), self._expert)

    __call__ = forward  # no hooks, as elsewhere in a layer

    def _by_kernels(self, x_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        from engine.kernels.biased_experts import biased_experts
        from engine.kernels.expert_rows import ExpertRows

        rows = ExpertRows.of(chosen_TK, len(self.gate_XD))
        inner_PI = self._inner(biased_experts(x_TD, self.gate_up_XDI, self.gate_up_bias_XI, rows, gather=True))
        added_PD = biased_experts(inner_PI, self.down_XID, self.down_bias_XD, rows, gather=False)
        return torch.bmm(weights_TK[:, None], added_PD.unflatten(0, chosen_TK.shape))[:, 0]

    def _expert(self, x_MD: torch.Tensor, expert: int) -> torch.Tensor:
        inner_MI = self._inner(x_MD @ self.gate_up_XDI[expert] + self.gate_up_bias_XI[expert])
        return inner_MI @ self.down_XID[expert] + self.down_bias_XD[expert]

    def _inner(self, pairs_MI: torch.Tensor) -> torch.Tensor:
        gate_MI = pairs_MI[:, 0::2].clamp(max=self.limit)
        up_MI = pairs_MI[:, 1::2].clamp(-self.limit, self.limit)
        return (up_MI + 1) * (gate_MI * torch.sigmoid(gate_MI * self.alpha))


class RoutedExperts(nn.Module):
    """Silu-gated experts and a shared one, or squared relus where the spec's blocks have no gate. Scores are
    computed in fp32, ties go to the lowest expert. A gate's parameters stay fp32 whatever the model's dtype is:
    corrections are small differences."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, parallel: TensorParallel) -> None:
        super().__init__()
        experts = spec.experts
        assert experts is not None and experts.gate is not None, "the spec has a gate"
        if parallel.size > 1:
            raise Unsupported(field="experts", expected="one rank", actual=f"{parallel.size} ranks")

        def empty(*shape: int, dtype: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.per_token, self.gate = experts.per_token, experts.gate
        count, hidden, width, shared = experts.count, spec.hidden, self.gate.width, self.gate.shared
        self.gate_XD = empty(count, hidden, dtype=torch.float32)
        self.correction_X = None if self.gate.softmax else empty(count, dtype=torch.float32)
        self.shared_gate_1D = empty(1, hidden) if self.gate.weighed else None
        self.inputs = 2 if spec.gated else 1
        self.gate_up_RD = empty(count * self.inputs * width, hidden)
        """2 I rows an expert, gates first; I rows without them."""
        self.down_RI = empty(count * hidden, width)
        """D rows an expert."""
        self.gate_up_proj = ColumnParallelLinear(hidden, (shared,) * self.inputs, False, dtype, device, parallel)
        self.down_proj = RowParallelLinear(shared, hidden, False, dtype, device, parallel)
        self.width = width

    @property
    def grouped(self) -> bool:
        """Whether kernels compute it on a GPU, for all experts at once and without the host."""
        return self.inputs == 2

    def forward(self, x_TD: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        chosen_TK, weights_TK = self.choose(x_TD)
        weights_TK = weights_TK.to(x_TD.dtype)
        if x_TD.is_cuda and self.grouped:
            out_TD = self._by_kernels(x_TD, chosen_TK, weights_TK)
        else:
            out_TD = sum_of_experts(x_TD, chosen_TK, weights_TK, len(self.gate_XD), self._expert)
        shared_TD = self.down_proj(self._inner(self.gate_up_proj(x_TD, adapters)), adapters)
        if self.shared_gate_1D is not None:
            # A product with one row would be summed in an order that follows from the number of tokens.
            shared_TD *= sigmoid((x_TD.float() * self.shared_gate_1D).sum(-1, keepdim=True)).to(x_TD.dtype)
        return out_TD.add_(shared_TD)

    __call__ = forward

    def choose(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """chosen_TK and their weights_TK, fp32."""
        gate, count = self.gate, len(self.gate_XD)
        logits_TX = F.linear(x_TD.float(), self.gate_XD)
        if x_TD.is_cuda and gate.softmax and gate.groups == 1:
            from engine.kernels.expert_gate import expert_gate

            return expert_gate(logits_TX, self.per_token, gate.normed, gate.scale)
        scores_TX = torch.softmax(logits_TX, -1) if gate.softmax else torch.sigmoid(logits_TX)
        ranks_TX = scores_TX if self.correction_X is None else scores_TX + self.correction_X
        if gate.groups > 1:
            by_group_TGX = ranks_TX.unflatten(1, (gate.groups, count // gate.groups))
            best_TG = by_group_TGX.topk(min(2, count // gate.groups), dim=-1).values.sum(-1)
            allowed_TG = torch.zeros_like(best_TG, dtype=torch.bool)
            allowed_TG.scatter_(1, _best(best_TG, gate.top_groups), True)
            ranks_TX = by_group_TGX.masked_fill(~allowed_TG[..., None], float("-inf")).flatten(1)
        chosen_TK = _best(ranks_TX, self.per_token)
        weights_TK = scores_TX.gather(1, chosen_TK)
        if gate.normed:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return chosen_TK, weights_TK * gate.scale

    def _by_kernels(self, x_TD: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        from engine.kernels.expert_rows import ExpertRows, expert_down, expert_gate_up

        rows = ExpertRows.of(chosen_TK, len(self.gate_XD))
        inner_PI = expert_gate_up(x_TD, self.gate_up_RD, rows)
        added_TKD = expert_down(inner_PI, self.down_RI, rows).unflatten(0, chosen_TK.shape)
        return torch.bmm(weights_TK[:, None], added_TKD)[:, 0]

    def _expert(self, x_MD: torch.Tensor, expert: int) -> torch.Tensor:
        width, hidden = self.width, x_MD.shape[1]
        gate_up_ID = self.gate_up_RD[self.inputs * width * expert : self.inputs * width * (expert + 1)]
        inner_MI = self._inner(linear(x_MD, gate_up_ID, None))
        return linear(inner_MI, self.down_RI[hidden * expert : hidden * (expert + 1)], None)

    def _inner(self, inputs_MI: torch.Tensor) -> torch.Tensor:
        if self.inputs == 1:
            return F.relu(inputs_MI).square_()
        gate_MI, up_MI = inputs_MI.chunk(2, dim=1)
        return F.silu(gate_MI).mul_(up_MI)


def sum_of_experts(
    x_TD: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    count: int,
    expert_of: Callable[[torch.Tensor, int], torch.Tensor],
) -> torch.Tensor:
    """out_TD: the weighed outputs of each token's experts, summed in the order of experts."""
    out_TD, per_token = torch.zeros_like(x_TD), chosen_TK.shape[1]
    chosen_P, weights_P = chosen_TK.flatten(), weights_TK.flatten()  # topk may lay its results out either way
    order = chosen_P.argsort(stable=True)
    counts = torch.bincount(chosen_P, minlength=count).tolist()
    for expert, places_M in enumerate(order.split(counts)):
        if counts[expert]:
            rows_M = torch.div(places_M, per_token, rounding_mode="floor")
            x_MD = F.pad(x_TD.index_select(0, rows_M), (0, 0, 0, -counts[expert] % ROW_MULTIPLE))
            added_MD = expert_of(x_MD, expert)[: counts[expert]]
            added_MD *= weights_P.index_select(0, places_M).unsqueeze(1)
            out_TD.index_add_(0, rows_M, added_MD)
    return out_TD


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The largest by the last dimension, of equal ones the first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()
