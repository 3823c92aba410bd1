"""The block drafter in the engine: its context under the target's page ids.

Owns the draft key/value pool, what is written to it and when, and a round's attention over pages. As
pages are the target's, a cached prefix, a fork or a resumed sample brings the drafter's context along,
provided every token the target computes is committed here too. Ignores who drafts and how many.

A round's block writes its own keys and values at the positions it stands for; `commit` overwrites
those of accepted tokens, and the rest lie beyond the end of the request until the next round.
Every block slot attends like a single query whose sequence ends with the block, so that backends need
nothing but decode rows.

Shapes: B rows, G block slots, T tokens, P page-table columns, M captured layers, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.attention.base import AttentionBackend
from engine.batch import ForwardBatch
from engine.dspark.block_model import BlockDrafterModel, SharedEnds
from engine.dspark.drafter import Committed, DrafterTraits, DraftRows, Proposal
from engine.dspark.states import StateStore
from engine.memory.kv_pool import KVPool, pack

if TYPE_CHECKING:
    from engine.dspark.fused_context import FusedContext

_ANONYMOUS = -2
"""Row key of block slots: their keys and values are overwritten, so no backend may keep them."""


class BlockDrafter:
    """`pool` has as many pages as the target's and the drafter's own layers; `backend` is one made for
    `model.spec.backbone` that reads its context from the pool in every step. With `states` whatever is
    committed is kept there too."""

    def __init__(
        self,
        model: BlockDrafterModel,
        ends: SharedEnds,
        pool: KVPool,
        backend: AttentionBackend,
        states: StateStore | None = None,
    ) -> None:
        spec = model.spec
        self.model = model
        self.pool = pool
        self.states = states
        self.ends = ends
        self._backend = backend
        self._fused: FusedContext | None = None
        if pool.device.type == "cuda":
            self.use_kernels()
        self.traits = DrafterTraits(
            name="block",
            max_drafts=spec.num_drafts,
            captured_layers=spec.target_layers if states is None else states.layers,
            kv=spec.backbone,
            block=spec.block,
            context_len=spec.backbone.context_len,
            has_probabilities=True,
            has_confidence=spec.confidence,
        )

    def use_kernels(self) -> None:
        """From now on context is written by fused kernels. They skip tokens whose slot is -1."""
        from engine.dspark.fused_context import FusedContext

        self._fused = FusedContext(self.model, self.pool)

    def admit(self, slot: int, ids: np.ndarray) -> None:
        """Nothing: whoever computed a cached prefix committed it too."""

    def release(self, slot: int) -> None:
        """Nothing is kept by slot."""

    @torch.no_grad()
    def commit(self, committed: Committed) -> None:
        if not committed.ids_T.numel():
            return
        write_slots_T, model = committed.write_slots_T, self.model
        if self.states is not None:
            self.states.write(write_slots_T.clamp(min=0), committed.features)
        features = [committed.features[layer] for layer in model.spec.target_layers]
        if self._fused is not None:
            self._fused.write(features, committed.positions_T, write_slots_T)
            return
        context_TD = model.context_features(torch.stack(features, dim=1))
        # Beyond its own context the drafter is never asked; its rotary table ends there too.
        positions_T = committed.positions_T.clamp(0, self.traits.context_len - 1)
        k_LTKH, v_LTKH = model.context_kv(context_TD, positions_T)
        # What has no slot goes to the scratch page.
        write_slots_T = write_slots_T.clamp(min=0)
        for layer in range(len(k_LTKH)):
            self.pool.write(layer, write_slots_T, pack(k_LTKH[layer], v_LTKH[layer]))

    @torch.no_grad()
    def propose(self, rows: DraftRows) -> Proposal:
        self._backend.plan(self._batch(rows), self.pool)
        hidden_BGD = self.model.hidden(rows.anchor_ids_B, rows.positions_B, self.ends, self._backend.run)
        ids_BG, logits_BGV, confidence_BG = self.model.draw(hidden_BGD, rows.anchor_ids_B, self.ends, rows.pick)
        return Proposal(ids_BG, [ids_BG.shape[1]] * len(ids_BG), logits_BGV, confidence_BG)

    def _batch(self, rows: DraftRows) -> ForwardBatch:
        """Every slot of every block as a row of one query, ending where its block ends."""
        block, page = self.model.spec.block, self.pool.page_size
        positions_BG = self.model.block_positions(rows.positions_B)
        pages_BG = rows.page_tables_BP.gather(1, positions_BG // page).long()
        ends = (rows.positions_B + block).repeat_interleave(block).tolist()
        longest = max(ends)
        assert longest <= self.traits.context_len, f"a block ends at {longest}, context is {self.traits.context_len}"
        ids_T = self.model.block_ids(rows.anchor_ids_B).flatten()
        return ForwardBatch(
            input_ids_T=ids_T,
            positions_T=positions_BG.flatten(),
            write_slots_T=(pages_BG * page + positions_BG % page).flatten(),
            query_lens=[1] * len(ends),
            seq_lens=ends,
            page_tables_BP=rows.page_tables_BP.repeat_interleave(block, dim=0),
            row_keys=[_ANONYMOUS] * len(ends),
            num_decode=0,
            logit_rows_R=torch.empty(0, dtype=torch.int64, device=ids_T.device),
        )
