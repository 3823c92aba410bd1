"""The small heads of a block drafter: what the token before adds, and how sure the drafter is.

Owns the Markov heads (vanilla, gated, recurrent) and the confidence head. Ignores the backbone.
Formulas are those of DSpark (arXiv 2607.05147). The drafts of a block are chosen one after another,
and only these heads see the choice.

Shapes: B rows, V vocabulary, R rank, D hidden, ... any leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.dspark.block_spec import BlockDrafterSpec


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class MarkovHead(nn.Module):
    """The vanilla head: a rank-R table from the token before to a bias on all logits.

    `step` yields a code z of R values; the bias is `bias(z)`, W2 z. Kinds differ in the code.
    """

    def __init__(self, spec: BlockDrafterSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        vocab, rank = spec.backbone.vocab_size, spec.markov_rank
        self.rank = rank
        self.w1 = parameter(vocab, rank, dtype=dtype, device=device)
        self.w2 = parameter(vocab, rank, dtype=dtype, device=device)

    def embed(self, previous: torch.Tensor) -> torch.Tensor:
        """W1 of the tokens before: [..., R]."""
        return F.embedding(previous, self.w1)

    def start(self, embedded: torch.Tensor) -> torch.Tensor:
        """The state before the first draft, [..., R]."""
        return torch.zeros_like(embedded)

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(code [..., R], next state) of one draft, from [..., R] and hidden [..., D]."""
        return embedded, state

    def codes(self, embedded_BGR: torch.Tensor, hidden_BGD: torch.Tensor) -> torch.Tensor:
        """Codes of a whole block whose tokens are known: as many `step`s in order."""
        return self.step(embedded_BGR, hidden_BGD, embedded_BGR)[0]

    def bias(self, code: torch.Tensor) -> torch.Tensor:
        """[..., V] in the weights' dtype."""
        return F.linear(code, self.w2)

    def biased(self, logits_BV: torch.Tensor, code_BR: torch.Tensor) -> torch.Tensor:
        """Logits and bias, summed in fp32 and rounded once, in place where both have one dtype."""
        if logits_BV.dtype != self.w2.dtype:
            return logits_BV + self.bias(code_BR)
        return logits_BV.addmm_(code_BR, self.w2.t())


class GatedMarkovHead(MarkovHead):
    """The code is damped, value by value, by a gate that sees the slot: σ(Wg [h; e] + b) ⊙ e."""

    def __init__(self, spec: BlockDrafterSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.gate_weight = parameter(self.rank, spec.backbone.hidden + self.rank, dtype=dtype, device=device)
        self.gate_bias = parameter(self.rank, dtype=dtype, device=device)

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gate = F.linear(torch.cat((hidden, embedded), dim=-1), self.gate_weight, self.gate_bias)
        return torch.sigmoid(gate) * embedded, state


class RecurrentMarkovHead(MarkovHead):
    """A small gated recurrence over the block: one product of [s; e; h] gives gate, candidate and output."""

    def __init__(self, spec: BlockDrafterSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        width = 2 * self.rank + spec.backbone.hidden
        self.joint_weight = parameter(3 * self.rank, width, dtype=dtype, device=device)
        self.joint_bias = parameter(3 * self.rank, dtype=dtype, device=device)

    def step(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint = F.linear(torch.cat((state, embedded, hidden), dim=-1), self.joint_weight, self.joint_bias)
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def codes(self, embedded_BGR: torch.Tensor, hidden_BGD: torch.Tensor) -> torch.Tensor:
        state = self.start(embedded_BGR[:, 0])
        codes = []
        for slot in range(embedded_BGR.shape[1]):
            code, state = self.step(embedded_BGR[:, slot], hidden_BGD[:, slot], state)
            codes.append(code)
        return torch.stack(codes, dim=1)


class ConfidenceHead(nn.Module):
    """Logit of "this draft is accepted, given that those before were", before the draft is chosen."""

    def __init__(self, spec: BlockDrafterSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        width = spec.backbone.hidden + (spec.markov_rank if spec.confidence_reads_markov else 0)
        self.weight = parameter(1, width, dtype=dtype, device=device)
        self.bias = parameter(1, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """float32 [...], summed in float32."""
        seen = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        return F.linear(seen.float(), self.weight.float(), self.bias.float())[..., 0]


def make_markov_head(spec: BlockDrafterSpec, dtype: torch.dtype, device: torch.device) -> MarkovHead | None:
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return None if spec.markov == "none" else kinds[spec.markov](spec, dtype, device)
