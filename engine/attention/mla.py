"""Attention over latent rows as its definition says, and the choice of tokens by an index.

Owns correctness: every row of the batch gathers its context, scores and softmax are fp32, and of equal index
scores the lowest positions are chosen. It is the oracle and the CPU's path. Rows of queries are taken in slabs,
so that memory stays bounded. Ignores how rows and queries came about (`engine.layers.mla`).

Shapes: T tokens, N query heads, C numbers of a token's row, L of its latent, Q queries of a row, S its context,
K tokens chosen, I index heads, E index head size.
"""

from __future__ import annotations

import torch

from engine.attention.torch_ref import context_slots
from engine.batch import ForwardBatch
from engine.memory.kv_pool import KVPool
from engine.memory.latent_pool import LatentPool
from engine.models.shape import ModelSpec

SLAB = 1 << 24
"""Numbers that the queries computed at once may gather or score."""


def choose_tokens(scores_QS: torch.Tensor, visible_Q: torch.Tensor, top_k: int) -> torch.Tensor:
    """positions_QK, int32: the `top_k` best of each query's first `visible` scores, in order of position,
    -1 behind the last. Of equal scores the lowest positions; 0.0 equals -0.0."""
    position_S = torch.arange(scores_QS.shape[1], device=scores_QS.device)
    seen_QS = torch.where(position_S < visible_Q[:, None], scores_QS, float("-inf"))
    order_QS = seen_QS.sort(dim=-1, descending=True, stable=True).indices
    chosen_QK = order_QS[:, :top_k]
    beyond = scores_QS.shape[1]
    chosen_QK = torch.where(chosen_QK < visible_Q[:, None], chosen_QK, beyond).sort(dim=-1).values
    return torch.where(chosen_QK < beyond, chosen_QK, -1).int()


def index_scores(q_QIE: torch.Tensor, weights_QI: torch.Tensor, keys_SE: torch.Tensor) -> torch.Tensor:
    """scores_QS, fp32: sums over heads of weight * relu(query . key)."""
    products_QIS = torch.relu(q_QIE.float() @ keys_SE.float().t())
    return (weights_QI.float().unsqueeze(1) @ products_QIS).squeeze(1)


class LatentReference:
    name = "torch_ref"

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.latent is not None and spec.query_scale is not None, "the spec has latents"
        self._spec = spec
        self._latent, self._scale = spec.latent, spec.query_scale
        self._batch: ForwardBatch | None = None
        self._pool: LatentPool | None = None
        self._slots: list[torch.Tensor] = []
        self._visible: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor | None] = []

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        assert isinstance(kv_pool, LatentPool), "latents lie in a pool of their own kind"
        self._batch, self._pool = batch, kv_pool
        self._slots = [context_slots(batch, row, kv_pool.page_size) for row in range(batch.num_rows)]
        self._visible = list((batch.positions_T + 1).split(batch.query_lens))

    @property
    def chosen_TK(self) -> torch.Tensor | None:
        """What layers that share a choice go by, -1 for rows that see all; None where every row does."""
        if all(part is None for part in self._chosen) or self._latent.index is None:
            return None
        rows = zip(self._chosen, self._visible, strict=True)
        all_QK = [
            part if part is not None else seen.new_full((len(seen), self._latent.index.top_k), -1).int()
            for part, seen in rows
        ]
        return torch.cat(all_QK)

    @chosen_TK.setter
    def chosen_TK(self, chosen_TK: torch.Tensor | None) -> None:
        self._chosen = [None] * len(self._visible)
        if chosen_TK is not None and self._latent.index is not None:
            parts = zip(chosen_TK.split([len(seen) for seen in self._visible]), self._slots, strict=True)
            self._chosen = [part if len(slots) > self._latent.index.top_k else None for part, slots in parts]

    def choose(self, q_TIE: torch.Tensor, weights_TI: torch.Tensor, key_TE: torch.Tensor, layer: int) -> None:
        batch, pool, index = self._batch, self._pool, self._latent.index
        assert batch is not None and pool is not None and index is not None, "plan comes before choose"
        pool.write_index(layer, batch.write_slots_T, key_TE)
        self._chosen, start = [], 0
        for slots_S, visible_Q in zip(self._slots, self._visible, strict=True):
            end = start + len(visible_Q)
            if len(slots_S) <= index.top_k:
                self._chosen.append(None)
            else:
                keys_SE = pool.index_keys(layer).index_select(0, slots_S)
                step = max(1, SLAB // (index.heads * len(slots_S)))
                parts = []
                for at in range(start, end, step):
                    to = min(end, at + step)
                    scores_QS = index_scores(q_TIE[at:to], weights_TI[at:to], keys_SE)
                    parts.append(choose_tokens(scores_QS, visible_Q[at - start : to - start], index.top_k))
                self._chosen.append(torch.cat(parts))
            start = end

    def run(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        layer: int,
        sink_N: torch.Tensor | None = None,
        bias_TNE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """out_TNL. The one key head is the token's row, and the values are its first numbers."""
        batch, pool = self._batch, self._pool
        assert batch is not None and pool is not None, "plan comes before run"
        assert sink_N is None and bias_TNE is None, "latent layers have neither"
        pool.write(layer, batch.write_slots_T, k_TKH[:, 0])
        out_TNL = q_TNH.new_empty(*q_TNH.shape[:2], self._latent.rank)
        indexed, start = self._spec.layers[layer].index != "none", 0
        for row, (slots_S, visible_Q) in enumerate(zip(self._slots, self._visible, strict=True)):
            end = start + len(visible_Q)
            rows_SC = pool.tokens(layer).index_select(0, slots_S)
            chosen_QK = self._chosen[row] if indexed else None
            width = len(slots_S) if chosen_QK is None else chosen_QK.shape[1] * rows_SC.shape[1]
            step = max(1, SLAB // (max(width, 1) * (q_TNH.shape[1] if chosen_QK is None else 1)))
            for at in range(start, end, step):
                to, part = min(end, at + step), slice(at - start, min(end, at + step) - start)
                if chosen_QK is None:
                    out_TNL[at:to] = self._dense(q_TNH[at:to], rows_SC, visible_Q[part])
                else:
                    out_TNL[at:to] = self._sparse(q_TNH[at:to], rows_SC, chosen_QK[part])
            start = end
        return out_TNL

    def _dense(self, q_QNC: torch.Tensor, rows_SC: torch.Tensor, visible_Q: torch.Tensor) -> torch.Tensor:
        rows_SC = rows_SC.float()
        scores_QNS = q_QNC.float() @ rows_SC.t() * self._scale
        position_S = torch.arange(len(rows_SC), device=rows_SC.device)
        hidden_Q1S = (position_S >= visible_Q[:, None]).unsqueeze(1)
        weights_QNS = scores_QNS.masked_fill_(hidden_Q1S, float("-inf")).softmax(dim=-1)
        return weights_QNS @ rows_SC[:, : self._latent.rank]

    def _sparse(self, q_QNC: torch.Tensor, rows_SC: torch.Tensor, chosen_QK: torch.Tensor) -> torch.Tensor:
        rows_QKC = rows_SC[chosen_QK.clamp(min=0).long()].float()
        scores_QNK = q_QNC.float() @ rows_QKC.transpose(1, 2) * self._scale
        weights_QNK = scores_QNK.masked_fill_((chosen_QK < 0).unsqueeze(1), float("-inf")).softmax(dim=-1)
        return weights_QNK @ rows_QKC[..., : self._latent.rank]
