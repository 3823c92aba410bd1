"""A block drafter's part of a round, from fused kernels.

Owns the launches of the block's forward pass over pages, and of the choice of one draft after another.
Computes what `engine.dspark.block_model` computes, from the same parameters. Ignores what rows are
(`engine.kernels.round_rows`) and how drafts are judged.

Shapes: B rows, K block slots, G drafts, T = B * K tokens, D hidden, V vocabulary, L layers.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F

from engine.attention.triton import TritonAttention
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import DraftLayer
from engine.kernels.rms_norm import add_rms_norm, rms_norm
from engine.kernels.rope_kv_write import QKNorm, QKVShape, rope_kv_write
from engine.kernels.round_judge import DraftDraw, draft_seeds
from engine.kernels.round_rows import BlockRows
from engine.kernels.row_columns import drawn_at, empty_columns, gather_columns
from engine.kernels.sample_columns import EditColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.swiglu import silu_and_mul
from engine.memory.device_table import DeviceTable
from engine.models.fused import FusedForward
from engine.runner.round_plan import RoundModes


class BlockLaunches:
    """`block` are the inputs that `open_rows` fills; `drafts` of them are made."""

    def __init__(
        self,
        drafter: BlockDrafter,
        attention: TritonAttention,
        forward: FusedForward,
        table: DeviceTable,
        page_tables_BP: torch.Tensor,
        modes: RoundModes,
        drafts: int,
    ) -> None:
        model, device, rows = drafter.model, drafter.pool.device, page_tables_BP.shape[0]
        spec, shape = model.spec, model.spec.backbone
        self.block = BlockRows.empty(rows, spec.block, device)
        self._model, self._pool, self._attention, self._forward = model, drafter.pool, attention, forward
        self._table, self._modes, self._drafts = table, modes, drafts
        starts_B1 = torch.arange(rows + 1, dtype=torch.int32, device=device) * spec.block
        self._plan = attention.plan_round_buffers(
            page_tables_BP, self.block.seq_lens_B, starts_B1, spec.block, drafter.pool, at_end=True
        )
        self._qkv = QKVShape(shape.num_heads, shape.num_kv_heads, shape.head_dim)
        tokens = rows * spec.block
        self._out_TNH = torch.zeros(tokens, shape.num_heads, shape.head_dim, dtype=drafter.pool.dtype, device=device)
        self._ids_GB = torch.zeros(drafts, rows, dtype=torch.int64, device=device)
        self._log_q_GB = torch.zeros(drafts, rows, dtype=torch.float32, device=device)
        self._seeds_GB = torch.zeros(drafts, rows, dtype=torch.int64, device=device)
        self._cuts_GB2 = torch.zeros(drafts, rows, 2, dtype=torch.float64, device=device)

    def sample_with(self, workspace: SampleWorkspace, edits: EditColumns | None) -> None:
        """What drafts are drawn with: scratch, and the edits that rows ask for."""
        self._workspace = workspace
        rows, device = self._ids_GB.shape[1], self._ids_GB.device
        self._columns = empty_columns(rows, device, edits)
        self._drawn = []
        for ids_B, log_q_B in zip(self._ids_GB, self._log_q_GB, strict=True):
            drawn = SampleOut.empty(rows, device)
            drawn.ids_B, drawn.processed_B = ids_B, log_q_B
            self._drawn.append(drawn)

    def draft(
        self,
        slots_B: torch.Tensor,
        window_B: torch.Tensor,
        anchor_ids_B: torch.Tensor,
        anchors_B: torch.Tensor,
        out_BG: torch.Tensor,
    ) -> tuple[torch.Tensor | None, DraftDraw | None]:
        """Fill the drafts of every row that has a window; uncalibrated confidences [B, G], and for rejection
        what drafts were drawn from."""
        model, rows = self._model, len(slots_B)
        hidden_GBD = self._hidden().view(rows, model.spec.block, -1)[:, model.spec.first_slot :][:, : self._drafts]
        hidden_GBD = hidden_GBD.transpose(0, 1).contiguous()
        logits_GBV = self._forward.logits(hidden_GBD.flatten(0, 1)).view(self._drafts, rows, -1)
        if model.cut is not None:
            logits_GBV.index_fill_(-1, model.cut, float("-inf"))
        drafting_B = torch.where(window_B > 0, slots_B, -1)
        columns = gather_columns(self._table, drafting_B, anchors_B, self._columns)
        rejects = self._modes.rule == "rejection"
        if rejects:
            draft_seeds(self._table, slots_B, anchors_B, self._seeds_GB)
        head, state = model.markov_head, None
        previous_B = anchor_ids_B.clamp(min=0)
        embedded = []
        for slot, logits_BV in enumerate(logits_GBV):
            if head is not None:
                embedded.append(head.embed(previous_B))
                state = head.start(embedded[-1]) if state is None else state
                code_BR, state = head.step(embedded[-1], hidden_GBD[slot], state)
                logits_BV.addmm_(code_BR, head.w2.t())
            self._pick(slot, logits_BV, drawn_at(columns, anchors_B + (1 + slot), columns.seed_S))
            previous_B = self._ids_GB[slot]
        out_BG.copy_(self._ids_GB.t())
        confidence_BG = None
        if model.confidence_head is not None:
            reads = torch.stack(embedded) if model.spec.confidence_reads_markov else None
            confidence_BG = model.confidence_head(hidden_GBD, reads).t().contiguous()
        draw = None
        if rejects:
            cuts_GB2 = self._cuts_GB2 if self._modes.step.truncated else None
            draw = DraftDraw(logits_GBV.transpose(0, 1), self._log_q_GB.t().contiguous(), cuts_GB2)
        return confidence_BG, draw

    def _pick(self, slot: int, logits_BV: torch.Tensor, columns) -> None:
        truncated, rejects = self._modes.step.truncated, self._modes.rule == "rejection"
        if rejects:
            columns = drawn_at(columns, columns.position_S, self._seeds_GB[slot])
        sample_rows(logits_BV, columns, self._drawn[slot], self._workspace, truncated=truncated, every=False)
        if rejects and truncated:
            self._cuts_GB2[slot].copy_(self._workspace.record_BR[: logits_BV.shape[0], :2])

    def _hidden(self) -> torch.Tensor:
        """Normed states [T, D]; the block's keys and values are in the pool."""
        model, block = self._model, self.block
        shape, eps = model.spec.backbone, model.spec.backbone.rms_eps
        weights_LED = model.qkv_proj.view(shape.num_layers, -1, shape.hidden)
        layers = [cast(DraftLayer, layer) for layer in model.layers]
        norms = [layer.input_layernorm.weight for layer in layers[1:]] + [model.norm.weight]
        residual_TD = self._forward.embed(block.ids_T)
        x_TD = rms_norm(residual_TD, layers[0].input_layernorm.weight, eps)
        for index, layer in enumerate(layers):
            q_TNH = rope_kv_write(
                F.linear(x_TD, weights_LED[index]),
                self._qkv,
                None
                if layer.q_norm is None or layer.k_norm is None
                else QKNorm(layer.q_norm.weight, layer.k_norm.weight, eps),
                model.rotary.cos_CE,
                model.rotary.sin_CE,
                block.positions_T,
                block.write_slots_T,
                self._pool.tokens(index),
            )
            self._attention.run_prefill(q_TNH, self._pool.tokens(index), self._plan, self._out_TNH, index)
            x_TD = F.linear(self._out_TNH.flatten(1), layer.o_proj)
            x_TD, _ = add_rms_norm(x_TD, residual_TD, layer.post_attention_layernorm.weight, eps)
            x_TD = F.linear(silu_and_mul(F.linear(x_TD, layer.gate_up_proj)), layer.down_proj)
            x_TD, _ = add_rms_norm(x_TD, residual_TD, norms[index], eps)
        return x_TD
