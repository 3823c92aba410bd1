"""Attention of every rank's tokens where the rows are: queries travel, pages stay.

Owns one layer's exchange: its owner is given all ranks' queries and rows, attends, and each rank gets what its tokens
made of it; a choice of tokens is made by the owner of the keys and told to all. For steps of few tokens with long
contexts. Ignores how attention is computed: the backend within plans the whole batch over the rank's part of the
pool (`engine.memory.layer_split`).

Shapes: T tokens of the step, M of this rank, N query heads, C numbers of a token's row, L of its latent, I index
heads, E index head size, K tokens chosen.
"""

from __future__ import annotations

import torch

from engine.attention.base import AttentionBackend
from engine.attention.mla import LatentReference
from engine.attention.mla_triton import TritonLatent
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.memory.layer_split import SplitLatents
from engine.models.shape import ModelSpec


class OwnersAttention:
    """A backend for one rank's share of a batch, whose whole it is told before each step."""

    name = "owners"

    def __init__(self, spec: ModelSpec, within: AttentionBackend, pool: SplitLatents) -> None:
        assert isinstance(within, (LatentReference, TritonLatent)), f"{within.name} attends to no latents"
        assert spec.latent is not None, "the spec has latents"
        self._latent, self._within = spec.latent, within
        self._pool, self._ranks = pool, pool.ranks
        self.whole: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        assert self.whole is not None, "the whole batch comes before its share"
        self._within.plan(self.whole, self._pool)

    def choose(self, q_TIE: torch.Tensor, weights_TI: torch.Tensor, key_TE: torch.Tensor, layer: int) -> None:
        """The arguments are this rank's."""
        whole, index, owner = self.whole, self._latent.index, self._pool.index_owner(layer)
        assert whole is not None and index is not None, "plan comes before choose"
        parts = [self._to_owner(part, owner) for part in (q_TIE, weights_TI, key_TE)]
        if owner == self._ranks.rank:
            q, weights, key = (part for part in parts if part is not None)
            self._within.choose(q, weights, key, layer)
        if max(whole.seq_lens) <= index.top_k:
            self._within.chosen_TK = None
            return
        chosen_TK = self._within.chosen_TK if owner == self._ranks.rank else None
        if chosen_TK is None:
            chosen_TK = torch.empty(whole.num_tokens, index.top_k, dtype=torch.int32, device=self._pool.device)
        work = self._ranks.send(chosen_TK, owner)
        if work is not None:
            work.wait()
        self._pool.step.sent.queries += chosen_TK.nbytes
        self._within.chosen_TK = chosen_TK

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The arguments are this rank's, and so is what comes out."""
        owner, rank = self._pool.owner(layer), self._latent.rank
        q, rows, out_TNL = self._to_owner(q_TNH, owner), self._to_owner(k_TKH, owner), None
        if q is not None and rows is not None:
            out_TNL = self._within.run(q, rows, rows[..., :rank], layer, sink_N, bias_TNE)
        out_MNL = q_TNH.new_empty(*q_TNH.shape[:2], rank)
        self._ranks.scatter(out_TNL, out_MNL, owner)
        self._pool.step.sent.queries += out_MNL.nbytes * self._ranks.size
        return out_MNL

    def _to_owner(self, rows_MX: torch.Tensor, owner: int) -> torch.Tensor | None:
        self._pool.step.sent.queries += rows_MX.nbytes * self._ranks.size
        return self._ranks.gather_to(rows_MX, owner)
