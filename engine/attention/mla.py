"""Attention over latent rows as its definition says, and the choice of tokens by an index.

Owns correctness: every row of the batch gathers its context, scores and softmax are fp32, and of equal index
scores the lowest positions are chosen. It is the oracle and the CPU's path. Rows of queries are taken in slabs,
so that memory stays bounded. Ignores how rows and queries came about (`engine.layers.mla`).

Shapes: T tokens, N query heads, C numbers of a token's row, L of its latent, Q queries of a row, S its context,
K tokens chosen, I index heads, E index head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.attention.torch_ref import Row, rows_of
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


def slabs(row: Row, numbers: int) -> Iterator[slice]:
    """The row's queries, as many at once as memory allows for `numbers` numbers each."""
    step = max(1, SLAB // max(numbers, 1))
    for start in range(row.start, row.end, step):
        yield slice(start, min(row.end, start + step))


class LatentReference:
    name = "torch_ref"

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.latent is not None and spec.query_scale is not None, "the spec has latents"
        self._spec = spec
        self._latent, self._scale = spec.latent, spec.query_scale
        self._batch: ForwardBatch | None = None
        self._pool: LatentPool | None = None
        self._rows: list[Row] = []
        self._visible_T = torch.empty(0)
        self.chosen_TK: torch.Tensor | None = None
        """What layers that share a choice go by, -1 for rows that see all; None where every row does."""

    def plan(self, batch: ForwardBatch, kv_pool: KVPool) -> None:
        assert isinstance(kv_pool, LatentPool), "latents lie in a pool of their own kind"
        self._batch, self._pool, self.chosen_TK = batch, kv_pool, None
        self._rows, self._visible_T = rows_of(batch, kv_pool.page_size), batch.positions_T + 1

    def choose(self, q_TIE: torch.Tensor, weights_TI: torch.Tensor, key_TE: torch.Tensor, layer: int) -> None:
        batch, pool, index = self._batch, self._pool, self._latent.index
        assert batch is not None and pool is not None and index is not None, "plan comes before choose"
        pool.write_index(layer, batch.write_slots_T, key_TE)
        self.chosen_TK = None
        choosing = [row for row in self._rows if len(row.slots_C) > index.top_k]
        if not choosing:
            return
        self.chosen_TK = q_TIE.new_full((len(q_TIE), index.top_k), -1, dtype=torch.int32)
        for row in choosing:
            keys_SE = pool.index_keys(layer).index_select(0, row.slots_C)
            for part in slabs(row, index.heads * len(row.slots_C)):
                scores_QS = index_scores(q_TIE[part], weights_TI[part], keys_SE)
                self.chosen_TK[part] = choose_tokens(scores_QS, self._visible_T[part], index.top_k)

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
        batch, pool, index = self._batch, self._pool, self._latent.index
        assert batch is not None and pool is not None, "plan comes before run"
        assert sink_N is None and bias_TNE is None, "latent layers have neither"
        pool.write(layer, batch.write_slots_T, k_TKH[:, 0])
        out_TNL = q_TNH.new_empty(*q_TNH.shape[:2], self._latent.rank)
        chosen_TK = self.chosen_TK if self._spec.layers[layer].index != "none" else None
        for row in self._rows:
            rows_SC = pool.tokens(layer).index_select(0, row.slots_C)
            if chosen_TK is None or index is None or len(rows_SC) <= index.top_k:
                for part in slabs(row, q_TNH.shape[1] * len(rows_SC)):
                    out_TNL[part] = self._dense(q_TNH[part], rows_SC, self._visible_T[part])
            else:
                for part in slabs(row, index.top_k * rows_SC.shape[1]):
                    out_TNL[part] = self._sparse(q_TNH[part], rows_SC, chosen_TK[part])
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
