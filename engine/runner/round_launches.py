"""One round of speculation as a fixed sequence of launches.

Owns the order: open rows, draft, spend the budget on what the drafter is sure of, pack verify rows, run
the target over them, give the drafter its context, draw, judge, take tokens in. Everything that changes
from round to round lies in tensors, so that a captured round serves any content of its tiers. Ignores
capture and the host.

Shapes: B rows, R verify rows, G drafts, V vocabulary, P page-table columns, F fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.adapters import Adapters
from engine.attention.triton import TritonAttention
from engine.batch import SharedPrefix
from engine.dspark.block_drafter import BlockDrafter
from engine.dspark.drafter import Committed
from engine.dspark.speculation import Speculation
from engine.kernels.block_rows import pack_blocks
from engine.kernels.round_adapters import tile_adapters
from engine.kernels.round_commit import Drafted, Judged, commit_rounds, record_width
from engine.kernels.round_judge import DraftDraw, JudgeBuffers, judge_rows, settle_rows
from engine.kernels.round_places import Places, find_places
from engine.kernels.round_rows import RoundLimits, VerifyRows, open_rows, pack_rows
from engine.kernels.round_spend import Calibration, spend_rows
from engine.kernels.row_columns import Prefixes, empty_columns, gather_columns
from engine.kernels.sample_columns import SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.sample_top import sample_top
from engine.memory.device_table import DeviceTable
from engine.memory.kv_pool import KVPool
from engine.models.fused import FusedForward
from engine.models.spec import ModelSpec
from engine.runner.block_launches import BlockLaunches
from engine.runner.round_inputs import RoundInputs
from engine.runner.round_plan import RoundModes
from lora.kernel_step import KernelStep


@dataclass(slots=True)
class RoundParts:
    """What all rounds of an engine share. `draft_attention` is there for a drafter that runs on the device,
    `adapters` where the target may have some."""

    spec: ModelSpec
    forward: FusedForward
    backend: TritonAttention
    pool: KVPool
    speculation: Speculation
    limits: RoundLimits
    draft_attention: TritonAttention | None = None
    adapters: Adapters | None = None

    @property
    def drafts(self) -> int:
        return self.speculation.max_drafts

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


@dataclass(slots=True)
class RoundScratch:
    """What rounds of all tiers take turns in: sized for the largest. `residual_BV` is there for rejection; `out_RNH`
    and `draft_out_TNH` are what target and drafter attend to."""

    sampling: SampleWorkspace
    residual_BV: torch.Tensor | None
    out_RNH: torch.Tensor
    draft_out_TNH: torch.Tensor | None

    @staticmethod
    def empty(parts: RoundParts, rows: int, verify: int, device: torch.device) -> RoundScratch:
        residual_BV = None
        if parts.speculation.config.rule == "rejection":
            residual_BV = torch.zeros(rows, parts.vocab_size, dtype=torch.float32, device=device)
        sampling, draft_out_TNH = SampleWorkspace.empty(max(rows, verify), parts.vocab_size, device), None
        out_RNH = torch.zeros(
            verify, parts.backend.num_heads, parts.spec.head_dim, dtype=parts.pool.dtype, device=device
        )
        if isinstance(drafter := parts.speculation.drafter, BlockDrafter):
            spec = drafter.model.spec
            size = (rows * spec.block, spec.backbone.num_heads, spec.backbone.head_dim)
            draft_out_TNH = torch.zeros(size, dtype=drafter.pool.dtype, device=device)
        return RoundScratch(sampling, residual_BV, out_RNH, draft_out_TNH)


class RoundLaunches:
    """Calling it enqueues one round; `record_BF` then tells of it. `draft_tokens` are those of packed blocks, 0
    where blocks are whole. With a `window` every row makes so many drafts and verifies them all, as far as it may:
    nothing has to be packed or spent. `adapters` add to the target's products alone: the drafter is everybody's. Where
    rows are `shared`, `share` says what they have in common."""

    def __init__(
        self,
        parts: RoundParts,
        table: DeviceTable,
        inputs: RoundInputs,
        verify: int,
        modes: RoundModes,
        scratch: RoundScratch,
        draft_tokens: int = 0,
        adapters: KernelStep | None = None,
        shared: bool = False,
        window: int = 0,
    ) -> None:
        device, rows = parts.pool.device, inputs.rows
        self._limits, self._mode, drafts = parts.limits, modes.mode, parts.drafts
        if window:
            self._limits = replace(parts.limits, block=parts.limits.lead + window, by_request=False)
            self._mode, drafts = "static", window

        def column(dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        self.inputs, self.adapters = inputs, adapters
        self.record_BF = torch.zeros(rows, record_width(drafts), dtype=torch.int32, device=device)
        self._parts, self._table, self._modes, self._workspace = parts, table, modes, scratch.sampling
        self._edits = table.edits.columns if modes.step.edits and table.edits is not None else None
        self._window_B, self._anchor_ids_B, self._anchors_B = (
            column(torch.int32, -1),
            column(torch.int64),
            column(torch.int64),
        )
        self._spent_B = column(torch.int32)
        self._survival_BG = torch.zeros(rows, drafts, dtype=torch.float32, device=device)
        self._drafter = None
        if parts.draft_attention is not None:
            drafter = parts.speculation.drafter
            assert isinstance(drafter, BlockDrafter)
            given = (drafter, parts.draft_attention, parts.forward, table, inputs.page_tables_BP, modes, drafts)
            block = self._limits.block if window else 0
            assert scratch.draft_out_TNH is not None
            given += (scratch.draft_out_TNH,)
            self._drafter = BlockLaunches(*given, tokens=draft_tokens, shared=shared, block=block)
            self._drafter.sample_with(scratch.sampling, self._edits)
            self._drafts_BG = self._drafter.notes.ids_BG
        else:
            self._drafts_BG = torch.zeros(rows, drafts, dtype=torch.int64, device=device)
        self._verify = VerifyRows.empty(verify, rows, device)
        self._columns = empty_columns(verify, device, self._edits, drafts)
        self._behind = Prefixes(self._verify.owner_R, self._verify.starts_B1, self._drafts_BG)
        self._drawn = SampleOut.empty(verify, device, entropy=modes.step.columns)
        self._places = Places.empty(verify, device) if modes.step.top else None
        self._judge: JudgeBuffers | None = None
        if modes.rule == "rejection":
            assert scratch.residual_BV is not None
            self._judge = JudgeBuffers.empty(rows, verify, empty_columns(rows, device), scratch.residual_BV)
        places = inputs.page_tables_BP, self._verify.seq_lens_B, self._verify.starts_B1
        ends_R = self._verify.ends_R if shared else None
        self._plan = parts.backend.plan_round_buffers(*places, 1 + drafts, parts.pool, ends_R=ends_R)
        self._out_RNH = scratch.out_RNH[:verify]

    def share(self, prefixes: list[SharedPrefix], queries: float) -> None:
        """What rows share from now on, of about `queries` verify rows each."""
        if self._plan.shared is not None:
            self._plan.shared.set(prefixes, queries)
        if self._drafter is not None:
            self._drafter.share(prefixes)

    def __call__(self) -> None:
        inputs, rows = self.inputs, self._verify
        drafter, limits = self._drafter, self._limits
        open_rows(
            self._table,
            inputs.slots_B,
            inputs.most_B,
            inputs.room_B,
            inputs.page_tables_BP,
            limits,
            self._window_B,
            self._anchor_ids_B,
            self._anchors_B,
            None if drafter is None or limits.by_request else drafter.block,
        )
        confidence_BG, draw = None, None
        if drafter is None:
            self._drafts_BG.copy_(inputs.drafts_BG)
        else:
            if limits.by_request:
                stand = (inputs.slots_B, self._window_B, self._anchor_ids_B, self._anchors_B, inputs.page_tables_BP)
                pack_blocks(*stand, limits, drafter.block)
            confidence_BG, draw = drafter.draft(inputs.slots_B, self._anchor_ids_B, self._anchors_B)
        survival_BG, lens_B, keep_B = self._lengths(confidence_BG)
        if self.adapters is not None:
            # Kernels look at these tables before they wait for the launch before them: two stand between.
            sorted_B = inputs.order_B, inputs.adapters_B
            tile_adapters(*sorted_B, self._window_B, lens_B, len(rows.ids_R), self.adapters.tiles)
        pack_rows(
            inputs.slots_B,
            self._window_B,
            lens_B,
            self._anchor_ids_B,
            self._anchors_B,
            self._drafts_BG,
            inputs.page_tables_BP,
            limits.page_size,
            rows,
        )
        if self._plan.shared is not None:
            self._plan.shared.list()
        logits_RV = self._forward()
        gather_columns(self._table, rows.slots_R, rows.ends_R, self._columns, self._behind)
        step = self._modes.step
        every = step.columns or step.top
        sample_rows(logits_RV, self._columns, self._drawn, self._workspace, truncated=step.truncated, every=every)
        drafted = Drafted(self._drafts_BG, self._window_B, keep_B, confidence_BG, survival_BG)
        drafted.log_q_BG = None if draw is None else draw.log_q_BG
        judged = self.judge(logits_RV, keep_B, draw)
        commit_rounds(self._table, rows, drafted, self._drawn, self.record_BF, judged, self._edits)

    def judge(self, logits_RV: torch.Tensor, keep_B: torch.Tensor, draw: DraftDraw | None) -> Judged | None:
        """Rejection's verdict, with the tokens to take in the place of the target's own; None where those are
        taken while drafts equal them."""
        out, rows, truncated = self._judge, self._verify, self._modes.step.truncated
        if out is None:
            self._alternatives(logits_RV, keep_B, None)
            return None
        given = (logits_RV, rows, self._columns, self._drawn, self._workspace)
        judge_rows(self._table, *given, self._anchors_B, self._drafts_BG, keep_B, draw, out, truncated)
        # The workspace of the draw is another's from here on.
        self._alternatives(logits_RV, keep_B, out.accepted_B)
        sample_rows(out.residual_BV, out.columns, out.emitted, self._workspace, truncated=False, every=False)
        settle_rows(*given, self._drafts_BG, keep_B, out)
        return Judged(out.accepted_B, out.chance_R)

    def _alternatives(self, logits_RV: torch.Tensor, keep_B: torch.Tensor, accepted_B: torch.Tensor | None) -> None:
        """Those of the tokens that will be taken, where rows want any."""
        if self._places is not None:
            find_places(self._verify, self._drafts_BG, self._drawn.ids_B, keep_B, self._places, accepted_B)
            given = (self._table, self._columns, self._drawn, self._workspace)
            sample_top(logits_RV, *given, places=self._places)

    def _lengths(self, confidence_BG: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Survivals [B, G], drafts of each row that are verified, and those that may be kept, int32 [B]. Of idle
        rows nobody asks."""
        inputs, window_B, mode = self.inputs, self._window_B, self._mode
        drafts = self._survival_BG.shape[1]
        if confidence_BG is None:
            survival_BG, calibration = inputs.survival_BG[:, :drafts].contiguous(), None
        else:
            survival_BG = self._survival_BG
            calibration = Calibration(confidence_BG, self._parts.speculation.scaling.scales_2G)
        if mode != "static" or calibration is not None:
            spent_B = None if mode == "static" else self._spent_B
            spend_rows(survival_BG, window_B, inputs.least_B, inputs.budget_1, spent_B, calibration)
        return (
            survival_BG,
            self._spent_B if mode == "compact" else window_B,
            window_B if mode == "static" else self._spent_B,
        )

    def _forward(self) -> torch.Tensor:
        """logits_RV of the verify rows; the drafter has their context then."""
        parts, rows = self._parts, self._verify

        def attend(q_RNH: torch.Tensor, layer: int) -> torch.Tensor:
            parts.backend.run_prefill(q_RNH, parts.pool.tokens(layer), self._plan, self._out_RNH, layer)
            return self._out_RNH

        states = dict.fromkeys(parts.speculation.captured_layers, rows.ids_R)
        places = rows.ids_R, rows.positions_R, rows.write_slots_R
        hidden_RD = parts.forward.hidden(*places, attend, states or None, self.adapters)
        if states:
            parts.speculation.drafter.commit(Committed((), (), *places, states))
        return parts.forward.logits(hidden_RD, adapters=self.adapters)
