"""Log-probabilities of given tokens, from the hidden states of a prefill.

Owns which hidden rows score which tokens. Ignores how log-probabilities are computed
(`engine.sampling.logprobs`).
"""

from __future__ import annotations

import numpy as np
import torch

from engine.runner.model_runner import ModelRunner
from engine.sampling.logprobs import token_logprobs, top_logprobs
from engine.scheduler.prefill import Prefill

ROWS = 64
"""Tokens scored at once: bounds the float32 logits to [ROWS, vocabulary]."""


def score_chunk(runner: ModelRunner, prefill: Prefill, hidden_CD: torch.Tensor, start: int) -> None:
    """Take the hidden states of tokens [start, start + C) into the prefill's scorer."""
    scorer = prefill.scorer
    assert scorer is not None
    count = hidden_CD.shape[0]
    # The state at position p predicts the token at p + 1; the last scored token's state predicts
    # one that nobody asked about.
    first = max(scorer.start - 1, start, 0)
    last = min(start + count, scorer.end - 1)
    for lo in range(first, last, ROWS):
        hi = min(lo + ROWS, last)
        logits_RV = runner.logits(hidden_CD[lo - start : hi - start])
        targets_R = torch.from_numpy(prefill.tokens[lo + 1 : hi + 1].astype(np.int64)).to(logits_RV.device)
        scorer.logprobs.append(token_logprobs(logits_RV, targets_R, scorer.temperature).cpu().numpy())
        if scorer.top_logprobs:
            ids_RK, values_RK = top_logprobs(logits_RV, scorer.top_logprobs, scorer.temperature)
            scorer.top_ids.append(ids_RK.cpu().numpy().astype(np.uint32))
            scorer.top_values.append(values_RK.cpu().numpy().astype(np.float32))
