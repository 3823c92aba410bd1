"""A block drafter's part of a round, from fused kernels.

Owns the launches of the block's forward pass over pages, and of the choice of one draft after another.
Computes what `engine.dspark.block_model` computes, from the same parameters. Blocks are whole, or packed
(`engine.kernels.block_rows`); then the head and the choice of draft k leave out rows that make fewer. Ignores
what rows are (`engine.kernels.round_rows`) and how drafts are judged.

Shapes: B rows, K block slots, G drafts, T tokens of all blocks (B * K of whole ones), D hidden, V vocabulary, L layers,
R rank.
"""

from __future__ import annotations

from typing import cast

import torch

from engine.attention.triton import TritonAttention
from engine.batch import SharedPrefix
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import DraftLayer
from engine.dspark.heads import MarkovHead
from engine.kernels.draft_notes import ConfidenceWeights, DraftNotes, note_drafts
from engine.kernels.gemv import InputNorm
from engine.kernels.markov_bias import markov_bias
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.round_judge import DraftDraw, draft_seeds
from engine.kernels.round_rows import BlockRows
from engine.kernels.row_columns import drawn_at, empty_columns, gather_columns
from engine.kernels.sample_columns import EditColumns, SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.skinny_matmul import UnscaledRows, skinny_matmul, skinny_matmul_then_norm
from engine.memory.device_table import DeviceTable
from engine.models.fused import FusedForward, Rows
from engine.runner.round_plan import RoundModes


class BlockLaunches:
    """Its `block` has the inputs that `open_rows` fills, or `pack_blocks` for `tokens` tokens of packed blocks; at
    most `drafts` drafts of a row are made. Whole blocks have the drafter's slots, or as many as are asked for. Where
    rows are `shared`, `share` says what they have in common. `out_TNH` is scratch for all blocks' tokens at least."""

    def __init__(
        self,
        drafter: BlockDrafter,
        attention: TritonAttention,
        forward: FusedForward,
        table: DeviceTable,
        page_tables_BP: torch.Tensor,
        modes: RoundModes,
        drafts: int,
        out_TNH: torch.Tensor,
        tokens: int = 0,
        shared: bool = False,
        block: int = 0,
    ) -> None:
        model, device, rows = drafter.model, drafter.pool.device, page_tables_BP.shape[0]
        spec, shape = model.spec, model.spec.backbone
        self._size = block or spec.block
        if tokens:
            self.block = BlockRows.packed(rows, tokens, drafts, device)
        else:
            tokens = rows * self._size
            self.block = BlockRows.empty(rows, self._size, device)
        self._model, self._pool, self._attention, self._forward = model, drafter.pool, attention, forward
        self._table, self._modes, self._drafts = table, modes, drafts
        own = self.block
        # Where a block stands matters to windows alone.
        ends_T = own.positions_T if shared and not any(layer.window for layer in shape.layers) else None
        places = page_tables_BP, own.seq_lens_B, own.starts_B1
        self._plan = attention.plan_round_buffers(*places, self._size, drafter.pool, at_end=True, ends_R=ends_T)
        self._qkv = QKVShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        self._out_TNH = out_TNH[:tokens]

        def numbers(*dims: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(dims, dtype=dtype, device=device)

        self._ids_GB = numbers(drafts, rows, dtype=torch.int64)
        self._log_q_GB = numbers(drafts, rows, dtype=torch.float32)
        self._seeds_GB = numbers(drafts, rows, dtype=torch.int64)
        self._cuts_GB2 = numbers(drafts, rows, 2, dtype=torch.float64)
        self._confidence, head = None, model.confidence_head
        if head is not None:
            w1_VR = None if model.markov_head is None else model.markov_head.w1
            reads = spec.confidence_reads_markov
            self._confidence = ConfidenceWeights(head.weight, head.bias, w1_VR if reads else None)
        self.notes = DraftNotes(
            numbers(rows, drafts, dtype=torch.int64),
            None if head is None else numbers(rows, drafts, dtype=torch.float32),
            numbers(rows, drafts, dtype=torch.float32) if modes.rule == "rejection" else None,
        )

    def share(self, prefixes: list[SharedPrefix]) -> None:
        """What rows share from now on."""
        if self._plan.shared is not None:
            self._plan.shared.set(prefixes, len(self.block.ids_T) / len(self.block.slots_B))

    def sample_with(self, workspace: SampleWorkspace, edits: EditColumns | None) -> None:
        """What drafts are drawn with: scratch, and the edits that rows ask for."""
        self._workspace = workspace
        rows, device = self._ids_GB.shape[1], self._ids_GB.device
        self._columns = empty_columns(rows, device, edits, self._drafts)
        self._drawn = []
        for ids_B, log_q_B in zip(self._ids_GB, self._log_q_GB, strict=True):
            drawn = SampleOut.empty(rows, device)
            drawn.ids_B, drawn.processed_B = ids_B, log_q_B
            self._drawn.append(drawn)

    def draft(
        self, slots_B: torch.Tensor, anchor_ids_B: torch.Tensor, anchors_B: torch.Tensor
    ) -> tuple[torch.Tensor | None, DraftDraw | None]:
        """Fill `notes.ids_BG` for every row that has a window; uncalibrated confidences [B, G], and for rejection
        what drafts were drawn from. Drafts that are not made are left as they are."""
        block, notes, rejects = self.block, self.notes, self._modes.rule == "rejection"
        hidden, logits = self._states()
        columns = gather_columns(self._table, block.slots_B, block.drawn_KB[0], self._columns)
        if rejects:
            draft_seeds(self._table, slots_B, anchors_B, self._seeds_GB)
        chosen = logits
        if block.at_GB is not None:
            # Rejection asks for all of them later.
            chosen = logits.new_empty(len(slots_B), self._drafts if rejects else 1, logits.shape[-1])
        previous_B, state = anchor_ids_B, None
        for slot in range(self._drafts):
            if block.at_GB is None:
                logits_BV = logits[:, slot]
                state = self._lean(logits_BV, previous_B, hidden[:, slot], state)
            else:
                logits_BV = chosen[:, slot if rejects else 0]
                state = self._lean_packed(logits, block.at_GB[slot], previous_B, hidden, state, logits_BV)
            seeds_B = self._seeds_GB[slot] if rejects else columns.seed_S
            drawn = drawn_at(columns, block.drawn_KB[slot], seeds_B)
            if block.active_GB is not None:
                drawn.active_S = block.active_GB[slot]
            self._pick(slot, logits_BV, drawn)
            previous_B = self._ids_GB[slot]
            if columns.edits is not None and columns.edits.ahead_SG is not None and slot + 1 < self._drafts:
                columns.edits.ahead_SG[:, slot].copy_(previous_B)
        note_drafts(hidden, anchor_ids_B, self._ids_GB, self._log_q_GB, self._confidence, notes, block.at_GB)
        if notes.log_q_BG is None:
            return notes.confidence_BG, None
        cuts_GB2 = self._cuts_GB2 if self._modes.step.truncated else None
        return notes.confidence_BG, DraftDraw(chosen, notes.log_q_BG, cuts_GB2)

    def _states(self) -> tuple[torch.Tensor, torch.Tensor]:
        """States that drafts are made from and their logits before the Markov head: [B, G, D] and [B, G, V] of
        whole blocks, [T, D] and [T, V] of packed ones."""
        model, hidden = self._model, self._hidden()
        if self.block.at_GB is None:
            first, rows = model.spec.first_slot, len(self.block.slots_B)
            hidden = hidden.view(rows, self._size, -1)[:, first : first + self._drafts].contiguous()
        flat_TD = hidden.flatten(0, -2)
        logits = self._forward.logits(flat_TD).view(*hidden.shape[:-1], -1)
        if model.cut is not None:
            logits.index_fill_(-1, model.cut, float("-inf"))
        return hidden, logits

    def _lean(
        self, logits_BV: torch.Tensor, previous_B: torch.Tensor, hidden_BD: torch.Tensor, state: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Add what the tokens before say; the Markov head's next state where it has one."""
        head = self._model.markov_head
        if head is None:
            return None
        if type(head) is MarkovHead:
            markov_bias(logits_BV, previous_B, head.w1, head.w2)
            return None
        embedded_BR = head.embed(previous_B.clamp(min=0))
        code_BR, state = head.step(embedded_BR, hidden_BD, head.start(embedded_BR) if state is None else state)
        logits_BV.addmm_(code_BR, head.w2.t())
        return state

    def _lean_packed(
        self,
        logits_TV: torch.Tensor,
        at_B: torch.Tensor,
        previous_B: torch.Tensor,
        hidden_TD: torch.Tensor,
        state: torch.Tensor | None,
        out_BV: torch.Tensor,
    ) -> torch.Tensor | None:
        """The same of the rows that `at_B` names, into `out_BV`; of others nobody asks."""
        head = self._model.markov_head
        if type(head) is MarkovHead:
            markov_bias(logits_TV, previous_B, head.w1, head.w2, at_B, out_BV)
            return None
        places_B = at_B.clamp(min=0).long()
        out_BV.copy_(logits_TV[places_B])
        return self._lean(out_BV, previous_B, hidden_TD[places_B], state)

    def _pick(self, slot: int, logits_BV: torch.Tensor, columns: SampleColumns) -> None:
        truncated = self._modes.step.truncated
        sample_rows(logits_BV, columns, self._drawn[slot], self._workspace, truncated=truncated, every=False)
        if self._modes.rule == "rejection" and truncated:
            self._cuts_GB2[slot].copy_(self._workspace.record_BR[: logits_BV.shape[0], :2])

    def _hidden(self) -> torch.Tensor:
        """Normed states [T, D]; the block's keys and values are in the pool."""
        model, forward = self._model, self._forward
        eps = model.spec.backbone.rms_eps
        layers = [cast(DraftLayer, layer) for layer in model.layers]
        norms = [layer.input_layernorm.weight for layer in layers[1:]] + [model.norm.weight]
        if self._plan.shared is not None:
            self._plan.shared.list()
        residual_TD, x = forward.embed(self.block.ids_T, InputNorm(layers[0].input_layernorm.weight, eps))
        few = forward.kind(residual_TD) is Rows.FEW
        for index, layer in enumerate(layers):
            if few:
                x = self._few_rows(index, layer, x, residual_TD, InputNorm(norms[index], eps))
            else:
                assert isinstance(x, torch.Tensor)
                x = self._many_rows(index, layer, x, residual_TD, InputNorm(norms[index], eps))
        return x if isinstance(x, torch.Tensor) else rms_norm(residual_TD, model.norm.weight, eps)

    def _few_rows(
        self,
        index: int,
        layer: DraftLayer,
        x: torch.Tensor | UnscaledRows,
        residual_TD: torch.Tensor,
        following: InputNorm,
    ) -> UnscaledRows:
        """A layer whose norms, gate and sums ride along with its products, as `FusedForward` has them."""
        out_TE = self._attend(index, layer, skinny_matmul(x, self._projection(index)))
        between = InputNorm(layer.post_attention_layernorm.weight, following.eps)
        x = skinny_matmul_then_norm(out_TE, layer.o_proj, None, residual_TD, between)
        inner_TI = skinny_matmul(x, layer.gate_up_proj, gated=True)
        return skinny_matmul_then_norm(inner_TI, layer.down_proj, None, residual_TD, following)

    def _many_rows(
        self, index: int, layer: DraftLayer, x_TD: torch.Tensor, residual_TD: torch.Tensor, following: InputNorm
    ) -> torch.Tensor:
        forward = self._forward
        out_TE = self._attend(index, layer, forward.product(x_TD, self._projection(index)))
        x_TD = forward.product(out_TE, layer.o_proj)
        x_TD, _ = add_rms_norm(x_TD, residual_TD, layer.post_attention_layernorm.weight, following.eps)
        x_TD = forward.product(forward.gated_product(x_TD, layer.gate_up_proj), layer.down_proj)
        return add_rms_norm(x_TD, residual_TD, following.weight_K, following.eps)[0]

    def _projection(self, index: int) -> torch.Tensor:
        """Weights [E, D] of a layer's queries, keys and values."""
        shape = self._model.spec.backbone
        return self._model.qkv_proj.view(shape.num_layers, -1, shape.hidden)[index]

    def _attend(self, index: int, layer: DraftLayer, qkv_TE: torch.Tensor) -> torch.Tensor:
        """[T, N * H], with keys and values in the pool."""
        norm, rotary, pool = None, self._model.rotary, self._pool.tokens(index)
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = QKNorm(layer.q_norm.weight, layer.k_norm.weight, self._model.spec.backbone.rms_eps)
        places = (self.block.positions_T, self.block.write_slots_T)
        q_TNH = rope_kv_write(qkv_TE, self._qkv, norm, rotary.cos_CE, rotary.sin_CE, *places, pool)
        self._attention.run_prefill(q_TNH, pool, self._plan, self._out_TNH, index)
        return self._out_TNH.flatten(1)
