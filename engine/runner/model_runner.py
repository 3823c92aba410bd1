"""Runs a model over batches.

Owns the forward call and what is read off the hidden states: logits, prompt log-probabilities.
Ignores sampling and scheduling.

Shapes: T tokens, D hidden, R rows of logits, V vocabulary.
"""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.models.decoder import CausalLM


class ModelRunner:
    def __init__(self, model: CausalLM, kv_pool: KVPool, backend: AttentionBackend) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.backend = backend

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, capture: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Final hidden states hidden_TD of every token; keys and values are written to the pool."""
        return self.model.forward(batch, self.backend, self.kv_pool, capture)

    @torch.inference_mode()
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """logits_RV, fp32."""
        return self.model.logits(hidden_RD)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """logits_RV, fp32, of the tokens `batch.logit_rows_R` asks for."""
        return self.logits(self.hidden(batch).index_select(0, batch.logit_rows_R))

    @torch.inference_mode()
    def prompt_logprobs(
        self, hidden_TD: torch.Tensor, targets_T: torch.Tensor, temperature: float = 1.0, chunk: int = 128
    ) -> torch.Tensor:
        """log p(targets) under softmax(logits / temperature), fp32 [T].

        Rows are taken `chunk` at a time, so at most [chunk, V] logits exist at once.
        """
        assert hidden_TD.shape[0] == targets_T.shape[0], "one target for each hidden state"
        parts = []
        for start in range(0, hidden_TD.shape[0], chunk):
            logits = self.model.logits(hidden_TD[start : start + chunk])
            if temperature not in (0.0, 1.0):
                logits.div_(temperature)
            picked = logits.gather(1, targets_T[start : start + chunk, None].long()).squeeze(1)
            parts.append(picked - torch.logsumexp(logits, dim=1))
        return torch.cat(parts) if parts else hidden_TD.new_zeros(0, dtype=torch.float32)
