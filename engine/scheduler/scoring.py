"""Log-probabilities of given tokens, from the hidden states of a prefill.

Owns which hidden rows score which tokens, and how many logits exist at once. Ignores how
log-probabilities are computed (`engine.sampling.logprobs`).
"""

from __future__ import annotations

import numpy as np
import torch

from engine.adapters import Adapters, slot_of
from engine.runner.model_runner import ModelRunner
from engine.sampling.logprobs import score_parts
from engine.scheduler.prefill import Prefill

ROWS, WIDTH = 512, 16384
"""Tokens scored at once and ids of the vocabulary at a time: no more than 32 MiB of logits, while
the head's weights are read once for that many tokens."""


def score_chunk(
    runner: ModelRunner, prefill: Prefill, hidden_CD: torch.Tensor, start: int, adapters: Adapters | None = None
) -> None:
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
        targets_R = torch.from_numpy(prefill.tokens[lo + 1 : hi + 1].astype(np.int64)).to(hidden_CD.device)
        step = None if adapters is None else adapters.step(np.full(hi - lo, slot_of(prefill.lease)))
        parts = runner.logits_by_part(hidden_CD[lo - start : hi - start], WIDTH, step)
        logprobs_R, ids_RK, values_RK = score_parts(parts, targets_R, scorer.temperature, scorer.top_logprobs)
        scorer.logprobs.append(logprobs_R.cpu().numpy())
        if scorer.top_logprobs:
            scorer.top_ids.append(ids_RK.cpu().numpy().astype(np.uint32))
            scorer.top_values.append(values_RK.cpu().numpy().astype(np.float32))
