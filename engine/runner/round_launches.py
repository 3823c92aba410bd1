"""One round of speculation as a fixed sequence of launches.

Owns the order: open rows, draft, spend the budget on what the drafter is sure of, pack verify rows, run
the target over them, give the drafter its context, draw, judge, take tokens in. Everything that changes
from round to round lies in tensors, so that a captured round serves any content of its tiers. Ignores
capture and the host.

Shapes: B rows, R verify rows, G drafts, K block slots, V vocabulary, P page-table columns, F fields.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.triton import TritonAttention
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.block_model import SharedEnds
from engine.dspark.planner import spend
from engine.dspark.speculation import Speculation
from engine.kernels.round_commit import Drafted, Judged, commit_rounds, record_width
from engine.kernels.round_judge import DraftDraw, JudgeBuffers, draft_seeds, judge_rows, settle_rows
from engine.kernels.round_rows import BlockRows, RoundLimits, VerifyRows, open_rows, pack_rows
from engine.kernels.row_columns import drawn_at, empty_columns, gather_columns
from engine.kernels.sample_columns import EditColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.memory.device_table import DeviceTable
from engine.memory.kv_pool import KVPool, pack
from engine.models.fused import FusedForward
from engine.models.spec import ModelSpec
from engine.runner.round_plan import RoundModes, message_size


@dataclass(slots=True)
class RoundParts:
    """What all rounds of an engine share. `draft_attention` is there for a drafter that runs on the device."""

    spec: ModelSpec
    forward: FusedForward
    backend: TritonAttention
    pool: KVPool
    speculation: Speculation
    limits: RoundLimits
    draft_attention: TritonAttention | None = None

    @property
    def drafts(self) -> int:
        return self.speculation.max_drafts

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


@dataclass(slots=True)
class RoundInputs:
    """What the host sends: views of one message (`RoundPlan.message`), and the page tables."""

    message: torch.Tensor
    page_tables_BP: torch.Tensor
    drafts: int

    @staticmethod
    def empty(rows: int, drafts: int, columns: int, device: torch.device) -> RoundInputs:
        message = torch.zeros(message_size(rows, drafts), dtype=torch.int32, device=device)
        return RoundInputs(message, torch.zeros(rows, columns, dtype=torch.int32, device=device), drafts)

    @property
    def rows(self) -> int:
        return self.page_tables_BP.shape[0]

    def _part(self, place: int) -> torch.Tensor:
        return self.message[place * self.rows : (place + 1) * self.rows]

    @property
    def slots_B(self) -> torch.Tensor:
        return self._part(0)

    @property
    def most_B(self) -> torch.Tensor:
        return self._part(1)

    @property
    def least_B(self) -> torch.Tensor:
        return self._part(2)

    @property
    def room_B(self) -> torch.Tensor:
        return self._part(3)

    @property
    def budget_1(self) -> torch.Tensor:
        return self.message[4 * self.rows : 4 * self.rows + 1]

    @property
    def survival_BG(self) -> torch.Tensor:
        start = 4 * self.rows + 1
        return self.message[start : start + self.rows * self.drafts].view(torch.float32).view(self.rows, -1)

    @property
    def drafts_BG(self) -> torch.Tensor:
        return self.message[4 * self.rows + 1 + self.rows * self.drafts :].view(self.rows, -1)


@dataclass(slots=True)
class RoundScratch:
    """What rounds of all tiers take turns in: sized for the largest. `residual_BV` is there for rejection."""

    sampling: SampleWorkspace
    residual_BV: torch.Tensor | None

    @staticmethod
    def empty(parts: RoundParts, rows: int, verify: int, device: torch.device) -> RoundScratch:
        residual_BV = None
        if parts.speculation.config.rule == "rejection":
            residual_BV = torch.zeros(rows, parts.vocab_size, dtype=torch.float32, device=device)
        return RoundScratch(SampleWorkspace.empty(max(rows, verify), parts.vocab_size, device), residual_BV)


class RoundLaunches:
    """Calling it enqueues one round; `record_BF` then tells of it."""

    def __init__(
        self,
        parts: RoundParts,
        table: DeviceTable,
        inputs: RoundInputs,
        verify: int,
        modes: RoundModes,
        scratch: RoundScratch,
    ) -> None:
        device, rows = parts.pool.device, inputs.rows

        def column(dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        self.inputs = inputs
        self.record_BF = torch.zeros(rows, record_width(parts.drafts), dtype=torch.int32, device=device)
        self._parts, self._table, self._modes, self._workspace = parts, table, modes, scratch.sampling
        self._edits = table.edits.columns if modes.step.edits and table.edits is not None else None
        self._window_B, self._anchor_ids_B, self._anchors_B = (
            column(torch.int32, -1),
            column(torch.int64),
            column(torch.int64),
        )
        self._drafts_BG = torch.zeros(rows, parts.drafts, dtype=torch.int64, device=device)
        self._drafter = None
        if parts.draft_attention is not None:
            self._drafter = _BlockRound(parts, table, inputs, modes, scratch.sampling, self._edits)
        self._verify = VerifyRows.empty(verify, rows, device)
        self._columns = empty_columns(verify, device, self._edits)
        self._drawn = SampleOut.empty(verify, device, entropy=modes.step.columns)
        self._judge: JudgeBuffers | None = None
        if modes.rule == "rejection":
            assert scratch.residual_BV is not None
            self._judge = JudgeBuffers.empty(rows, verify, empty_columns(rows, device), scratch.residual_BV)
        self._plan = parts.backend.plan_round_buffers(
            inputs.page_tables_BP, self._verify.seq_lens_B, self._verify.starts_B1, 1 + parts.drafts, parts.pool
        )
        self._out_RNH = torch.zeros(
            verify, parts.backend.num_heads, parts.spec.head_dim, dtype=parts.pool.dtype, device=device
        )

    def __call__(self) -> None:
        inputs, parts, rows = self.inputs, self._parts, self._verify
        drafter = self._drafter
        open_rows(
            self._table,
            inputs.slots_B,
            inputs.most_B,
            inputs.room_B,
            inputs.page_tables_BP,
            parts.limits,
            self._window_B,
            self._anchor_ids_B,
            self._anchors_B,
            None if drafter is None else drafter.block,
        )
        confidence_BG, survival_BG = None, inputs.survival_BG
        if drafter is None:
            self._drafts_BG.copy_(inputs.drafts_BG)
        else:
            confidence_BG = drafter.draft(self._window_B, self._anchor_ids_B, self._anchors_B, self._drafts_BG)
            if confidence_BG is not None:
                survival_BG = parts.speculation.scaling.survival(confidence_BG)
        survival_BG = survival_BG.contiguous()
        lens_B, keep_B = self._lengths(survival_BG)
        pack_rows(
            inputs.slots_B,
            self._window_B,
            lens_B,
            self._anchor_ids_B,
            self._anchors_B,
            self._drafts_BG,
            inputs.page_tables_BP,
            parts.limits.page_size,
            rows,
        )
        logits_RV = self._forward()
        gather_columns(self._table, rows.slots_R, rows.ends_R, self._columns)
        step = self._modes.step
        every = step.columns
        sample_rows(logits_RV, self._columns, self._drawn, self._workspace, truncated=step.truncated, every=every)
        draw = None if drafter is None else drafter.draw
        drafted = Drafted(self._drafts_BG, self._window_B, keep_B, confidence_BG, survival_BG)
        drafted.log_q_BG = None if draw is None else draw.log_q_BG
        judged = self.judge(logits_RV, keep_B, draw)
        commit_rounds(self._table, rows, drafted, self._drawn, self.record_BF, judged)

    def judge(self, logits_RV: torch.Tensor, keep_B: torch.Tensor, draw: DraftDraw | None) -> Judged | None:
        """Rejection's verdict, with the tokens to take in the place of the target's own; None where those are
        taken while drafts equal them."""
        out, rows, truncated = self._judge, self._verify, self._modes.step.truncated
        if out is None:
            return None
        given = (logits_RV, rows, self._columns, self._drawn, self._workspace)
        judge_rows(self._table, *given, self._anchors_B, self._drafts_BG, keep_B, draw, out, truncated)
        sample_rows(out.residual_BV, out.columns, out.emitted, self._workspace, truncated=False, every=False)
        settle_rows(*given, self._drafts_BG, keep_B, out)
        return Judged(out.accepted_B, out.chance_R)

    def _lengths(self, survival_BG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts of each row that are verified, and those that may be kept, int32 [B]."""
        inputs, most_B = self.inputs, self._window_B.clamp(min=0)
        if self._modes.mode == "static":
            return most_B, most_B
        least_B = torch.minimum(inputs.least_B, most_B)
        spent_B = spend(survival_BG, least_B, most_B, inputs.budget_1).to(torch.int32)
        return (most_B if self._modes.mode == "cap_accept" else spent_B), spent_B

    def _forward(self) -> torch.Tensor:
        """logits_RV of the verify rows; the drafter has their context then."""
        parts, rows = self._parts, self._verify

        def attend(q_RNH: torch.Tensor, layer: int) -> torch.Tensor:
            parts.backend.run_prefill(q_RNH, parts.pool.tokens(layer), self._plan, self._out_RNH, layer)
            return self._out_RNH

        states = dict.fromkeys(parts.speculation.captured_layers, rows.ids_R)
        hidden_RD = parts.forward.hidden(rows.ids_R, rows.positions_R, rows.write_slots_R, attend, states or None)
        if states:
            parts.speculation.absorb(rows.ids_R, rows.positions_R, rows.write_slots_R, states)
        return parts.forward.logits(hidden_RD)


class _BlockRound:
    """A block drafter's part of a round."""

    def __init__(
        self,
        parts: RoundParts,
        table: DeviceTable,
        inputs: RoundInputs,
        modes: RoundModes,
        workspace: SampleWorkspace,
        edits: EditColumns | None,
    ) -> None:
        drafter = parts.speculation.drafter
        assert isinstance(drafter, BlockDrafter) and parts.draft_attention is not None
        device, rows, size = parts.pool.device, inputs.rows, parts.limits.block
        self.block = BlockRows.empty(rows, size, device)
        self._parts, self._table, self._inputs, self._drafter = parts, table, inputs, drafter
        self._modes, self._workspace = modes, workspace
        self.draw: DraftDraw | None = None
        """What the drafts of rejection were drawn from; it lives as long as the graph's pool leaves it."""
        self._columns = empty_columns(rows, device, edits)
        slots = drafter.traits.max_drafts
        self._drawn = [SampleOut.empty(rows, device) for _ in range(slots)]
        self._seeds_GB = torch.zeros(slots, rows, dtype=torch.int64, device=device)
        self._cuts_GB2 = torch.zeros(slots, rows, 2, dtype=torch.float64, device=device)
        self._starts_B1 = torch.arange(rows + 1, dtype=torch.int32, device=device) * size
        self._plan = parts.draft_attention.plan_round_buffers(
            inputs.page_tables_BP, self.block.seq_lens_B, self._starts_B1, size, drafter.pool, at_end=True
        )
        shape = drafter.model.spec.backbone
        self._out_TNH = torch.zeros(
            rows * size, shape.num_heads, shape.head_dim, dtype=drafter.pool.dtype, device=device
        )
        self._ends = SharedEnds(drafter.ends.embed, parts.forward.logits)

    def draft(
        self, window_B: torch.Tensor, anchor_ids_B: torch.Tensor, anchors_B: torch.Tensor, out_BG: torch.Tensor
    ) -> torch.Tensor | None:
        """Fill the drafts of every row that has a window; uncalibrated confidences [B, G]."""
        drafter, block, attention = self._drafter, self.block, self._parts.draft_attention
        assert attention is not None
        writes_T = block.write_slots_T.clamp(min=0)

        def attend(q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, layer: int) -> torch.Tensor:
            drafter.pool.write(layer, writes_T, pack(k_TKH, v_TKH))
            attention.run_prefill(q_TNH.contiguous(), drafter.pool.tokens(layer), self._plan, self._out_TNH, layer)
            return self._out_TNH

        positions_B = torch.where(window_B > 0, anchors_B, 0)
        anchor_ids_B = anchor_ids_B.clamp(min=0)
        hidden_BGD = drafter.model.hidden(anchor_ids_B, positions_B, self._ends, attend)
        slots_B = torch.where(window_B > 0, self._inputs.slots_B, -1)
        columns = gather_columns(self._table, slots_B, anchors_B, self._columns)
        truncated, rejects = self._modes.step.truncated, self._modes.rule == "rejection"
        if rejects:
            draft_seeds(self._table, slots_B, anchors_B, self._seeds_GB)

        def pick(slot: int, logits_BV: torch.Tensor) -> torch.Tensor:
            seeds_B = self._seeds_GB[slot] if rejects else columns.seed_S
            at, drawn = drawn_at(columns, anchors_B + (1 + slot), seeds_B), self._drawn[slot]
            sample_rows(logits_BV, at, drawn, self._workspace, truncated=truncated, every=False)
            if rejects and truncated:
                self._cuts_GB2[slot].copy_(self._workspace.record_BR[: len(slots_B), :2])
            return drawn.ids_B

        count = out_BG.shape[1]
        ids_BG, logits_BGV, confidence_BG = drafter.model.draw(hidden_BGD, anchor_ids_B, self._ends, pick)
        out_BG.copy_(ids_BG[:, :count])
        if rejects:
            log_q_BG = torch.stack([drawn.processed_B for drawn in self._drawn[:count]], dim=1)
            self.draw = DraftDraw(logits_BGV, log_q_BG, self._cuts_GB2 if truncated else None)
        return None if confidence_BG is None else confidence_BG[:, :count].contiguous()
