"""Which experts a token uses and what they weigh, by softmax scores.

Owns the choice from logits: the largest scores, of equal ones the first, weighed by themselves or by their shares.
Everything is fp32.

Shapes: T tokens, X experts, K experts a token.
"""

# Launch options and constants are invisible to the type checker in Triton kernels.
# pyright: reportCallIssue=false, reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl


def expert_gate_reference(
    logits_TX: torch.Tensor, per_token: int, normed: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `expert_gate`."""
    scores_TX = torch.softmax(logits_TX, -1)
    chosen_TK = scores_TX.sort(dim=-1, descending=True, stable=True).indices[:, :per_token]
    weights_TK = scores_TX.gather(1, chosen_TK)
    if normed:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return chosen_TK, weights_TK * scale


@triton.jit
def expert_gate_kernel(
    logits_ptr, chosen_ptr, weights_ptr, scale,
    X: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, k = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_K)
    logits = tl.load(logits_ptr + token * X + at, mask=at < X, other=float("-inf"))
    grown = tl.exp(logits - tl.max(logits, 0))
    left = tl.where(at < X, tl.fdiv(grown, tl.zeros_like(grown) + tl.sum(grown, 0)), -1.0)
    chosen = tl.zeros((BLOCK_K,), dtype=tl.int64)
    weights = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for place in range(K):
        best = tl.max(left, 0)
        index = tl.min(tl.where(left == best, at, BLOCK_X), 0)
        chosen = tl.where(k == place, index.to(tl.int64), chosen)
        weights = tl.where(k == place, best, weights)
        left = tl.where(at == index, -1.0, left)
    if NORMED:
        weights = tl.fdiv(weights, tl.zeros_like(weights) + tl.sum(weights, 0) + 1e-20)
    tl.store(chosen_ptr + token * K + k, chosen, mask=k < K)
    tl.store(weights_ptr + token * K + k, weights * scale, mask=k < K)


def expert_gate(
    logits_TX: torch.Tensor, per_token: int, normed: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """chosen_TK int64 and weights_TK fp32 of contiguous fp32 logits."""
    tokens, count = logits_TX.shape
    assert logits_TX.is_contiguous() and logits_TX.dtype == torch.float32, "rows of fp32 logits"
    chosen_TK = torch.empty(tokens, per_token, dtype=torch.int64, device=logits_TX.device)
    weights_TK = torch.empty(tokens, per_token, dtype=torch.float32, device=logits_TX.device)
    if tokens:
        expert_gate_kernel[(tokens,)](
            logits_TX, chosen_TK, weights_TK, scale, X=count, K=per_token, NORMED=normed,
            BLOCK_X=triton.next_power_of_2(count), BLOCK_K=triton.next_power_of_2(per_token), num_warps=1,
        )  # fmt: skip
    return chosen_TK, weights_TK
