"""Log-probabilities of given logits.

Owns the shared arithmetic of sampling and scoring: log-softmax at chosen ids, the highest
alternatives, entropy. Ignores where logits come from and which definition a caller wants.

Everything is float32 and runs where its arguments are. Shapes: N rows, V vocabulary, K
alternatives.
"""

from __future__ import annotations

import torch

from engine.sampling.params import GREEDY_BELOW

_CHUNK_ELEMENTS = 1 << 24
"""Bounds the temporaries over logits to 64 MiB."""


def scaled(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / T; the logits themselves at T = 1 and at T = 0, where `temperature` means `raw`."""
    if temperature == 1.0 or temperature < GREEDY_BELOW:
        return logits_NV
    return logits_NV / temperature


def token_logprobs(logits_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float32 [N]: log softmax(logits / T) at each row's target id (int64 [N])."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, logits_NV.shape[-1]))
    out_N = torch.empty(len(targets_N), dtype=torch.float32, device=logits_NV.device)
    for start in range(0, len(targets_N), rows):
        part = slice(start, start + rows)
        values_NV = scaled(logits_NV[part].float(), temperature)
        chosen_N = values_NV.gather(-1, targets_N[part, None]).squeeze(-1)
        out_N[part] = chosen_N - torch.logsumexp(values_NV, dim=-1)
    return out_N


def top_logprobs(logits_NV: torch.Tensor, k: int, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest of log softmax(logits / T) per row: ids int64 [N, K] and values float32 [N, K]."""
    values_NV = scaled(logits_NV.float(), temperature)
    ids_NK, values_NK = highest(values_NV, k)
    return ids_NK, values_NK - torch.logsumexp(values_NV, dim=-1, keepdim=True)


def highest(values_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest per row: ids int64 [N, K] and values [N, K], descending, ties by lower id."""
    sought = min(k + 1, values_NV.shape[-1])
    values_NK, ids_NK = torch.topk(values_NV, sought, dim=-1)
    if sought > k:
        tied_N = values_NK[:, k - 1] == values_NK[:, k]
        values_NK, ids_NK = values_NK[:, :k], ids_NK[:, :k].clone()
        for n in tied_N.nonzero()[:, 0].tolist():
            lowest = values_NK[n, -1]
            above_M = (values_NV[n] > lowest).nonzero()[:, 0]
            equal_M = (values_NV[n] == lowest).nonzero()[:, 0]
            ids_NK[n] = torch.cat((above_M, equal_M[: k - len(above_M)]))
    ids_NK = ids_NK.sort(dim=-1).values
    values_NK, order_NK = values_NV.gather(-1, ids_NK).sort(dim=-1, descending=True, stable=True)
    return ids_NK.gather(-1, order_NK), values_NK


def entropy(logprobs_NV: torch.Tensor) -> torch.Tensor:
    """float32 [N] in nats; an id of probability 0 contributes nothing."""
    terms_NV = logprobs_NV.clamp(min=torch.finfo(torch.float32).min)
    return -terms_NV.mul_(logprobs_NV.exp()).sum(-1)
