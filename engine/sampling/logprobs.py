"""Log-probabilities of given logits.

Owns the shared arithmetic of sampling and scoring: log-softmax at chosen ids, the highest
alternatives, entropy. Ignores where logits come from and which definition a caller wants.

Logits are float32 and everything runs where its arguments are. Shapes: N rows, V vocabulary, K
alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.sampling.params import GREEDY_BELOW


def score_parts(
    parts: Iterable[torch.Tensor], targets_N: torch.Tensor, temperature: float = 1.0, k: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """log softmax(logits / T) of each row's target id (int64 [N]) and of its k highest ids, from logits
    [N, width] of consecutive parts of the vocabulary: float32 [N], int64 [N, K], float32 [N, K].

    Raw where T is 1 or 0. No part is needed once the next one is asked for.
    """
    rows, device = len(targets_N), targets_N.device
    lse_N = torch.full((rows,), float("-inf"), dtype=torch.float64, device=device)
    chosen_N = lse_N.float()
    ids_NK = torch.zeros(rows, 0, dtype=torch.int64, device=device)
    values_NK = torch.zeros(rows, 0, dtype=torch.float32, device=device)
    start = 0
    for logits_NP in parts:
        values_NP = _scaled(logits_NP.float(), temperature)
        end = start + values_NP.shape[1]
        lse_N = torch.logaddexp(lse_N, torch.logsumexp(values_NP, dim=-1).double())
        places_N1 = (targets_N - start).clamp(0, end - start - 1)[:, None]
        inside_N = (targets_N >= start) & (targets_N < end)
        chosen_N = torch.where(inside_N, values_NP.gather(-1, places_N1)[:, 0], chosen_N)
        if k:
            part_NK, part_values_NK = highest(values_NP, min(k, end - start))
            # Those before come first, so that a tie goes to the lower id.
            values_NK = torch.cat((values_NK, part_values_NK), -1)
            order_NK, values_NK = highest(values_NK, min(k, values_NK.shape[-1]))
            ids_NK = torch.cat((ids_NK, part_NK + start), -1).gather(-1, order_NK)
        start = end
    return (chosen_N - lse_N).float(), ids_NK, (values_NK - lse_N[:, None]).float()


def _scaled(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / T; the logits themselves at T = 1 and at T = 0, where `temperature` means `raw`."""
    if temperature == 1.0 or temperature < GREEDY_BELOW:
        return logits_NV
    return logits_NV / temperature


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
