"""Step times measured at the start.

Owns the few steps that are run for their time alone, in the scratch page, and the file that spares a
later start from running them. Ignores what is made of times (`engine.dspark.cost_model`).

Shapes: B rows, P page-table columns, T tokens.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.config import EngineConfig, number
from engine.dspark.acceptance import Round, verify_coupled
from engine.dspark.config import number_of_drafts
from engine.dspark.cost_file import CostFile
from engine.dspark.cost_model import CostKey, CostModel, StepShape, sweep_shapes
from engine.dspark.drafter import Committed, Drafter, DraftRows
from engine.dspark.picks import CoupledPick
from engine.runner.model_runner import FusedRunner, ModelRunner
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.scheduler.pages import PageManager
from engine.types import SamplingParams, Want

_CONTEXTS = (64, 1024)
_FIRST_KEY = -1000
"""Row keys from here down are no sequence's."""


def prepare_cost(
    config: EngineConfig, drafter: Drafter, pages: PageManager, runner: ModelRunner, sampler: Sampler
) -> CostModel:
    """A cost model from an earlier run of such an engine, else from a sweep; kept as it is refined."""
    dspark, spec = config.dspark, runner.model.spec
    rows, drafts = number(config.scheduler.max_running), number_of_drafts(dspark, drafter.traits)
    row_knots, tier_knots = _powers(rows), _powers(rows * (1 + drafts))
    file = CostFile(dspark.cost, cost_key(config, runner, drafter, row_knots, tier_knots), config.device != "cpu")
    kept = file.load()
    cost = CostModel(row_knots, tier_knots) if kept is None else kept
    cost.on_observed = file.keep
    if kept is not None:
        print(f"dspark: step times of {kept.observed} steps from {file.path}", file=sys.stderr)
    elif dspark.sweep_seconds > 0 and not _runs_ahead(config, runner):
        longest = min(spec.context_len, drafter.traits.context_len) - max(drafts, drafter.traits.block) - 2
        contexts = sorted({min(context, longest) for context in _CONTEXTS})
        shapes = sweep_shapes(row_knots, tier_knots, drafts, [context for context in contexts if context > 0])
        if config.loop == "overlapped":
            # Plain steps run in bursts there, whose times serving shows soon enough.
            shapes = [shape for shape in shapes if shape.drafting]
        shapes.sort(key=lambda shape: (shape.tier, shape.tokens_read))
        cost.seed(_Sweep(drafter, pages, runner, sampler).run(shapes, dspark.sweep_seconds))
        file.keep(cost)
    return cost


def _runs_ahead(config: EngineConfig, runner: ModelRunner) -> bool:
    """Whether rounds are graphs that the overlapped loop launches ahead: steps run one by one say nothing of
    their times. Those are measured when their graphs can be captured (`engine.runner.round_sweep`)."""
    return config.loop == "overlapped" and isinstance(runner, FusedRunner) and not config.deterministic


def cost_key(
    config: EngineConfig, runner: ModelRunner, drafter: Drafter, row_knots: list[int], tier_knots: list[int]
) -> CostKey:
    spec, traits = runner.model.spec, drafter.traits
    shape = f"{spec.architecture} {spec.num_layers}x{spec.hidden} {config.dtype}"
    device = torch.device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x{torch.get_num_threads()}"
    loop = f"{config.loop}, deterministic" if config.deterministic else config.loop
    # Blocks are whole or by request, which may have even windows too; rejection takes more than drawing, and so do
    # states that are kept.
    windows = "compact, even" if config.dspark.mode == "compact" else config.dspark.mode
    loop = f"{loop}, {windows}, {config.dspark.rule}{', states' * config.dspark.keep_states}"
    return CostKey(
        model=f"{shape} + {traits.name} of {traits.max_drafts} drafts",
        device=name,
        graphs=f"{config.attention}, {loop}, rows {_listed(row_knots)}, tiers {_listed(tier_knots)}",
    )


class _Sweep:
    def __init__(self, drafter: Drafter, pages: PageManager, runner: ModelRunner, sampler: Sampler) -> None:
        self._drafter = drafter
        self._pages = pages
        self._runner = runner
        self._sampler = sampler
        self._device = runner.kv_pool.device
        self._key = _FIRST_KEY

    def run(self, shapes: list[StepShape], seconds: float) -> list[tuple[StepShape, float]]:
        """Each shape once for its time, after once without; as many as fit the time."""
        began, times = time.perf_counter(), []
        for shape in shapes:
            if time.perf_counter() - began > seconds:
                print(f"dspark: {len(times)} of {len(shapes)} step times measured in {seconds:g} s", file=sys.stderr)
                break
            params = [RowSampling(SamplingParams(), Want(), row, np.array([1])) for row in range(shape.rows)]
            context = max(1, int(shape.tokens_read) // shape.rows)
            self._step(shape, params, context)
            started = time.perf_counter()
            self._step(shape, params, context + 1)
            times.append((shape, time.perf_counter() - started))
            self._key -= shape.rows
        return times

    def _step(self, shape: StepShape, params: list[RowSampling], context: int) -> None:
        """What a step of this shape does, over tokens that belong to nobody."""
        rows, traits = shape.rows, self._drafter.traits
        anchors, slots = [context - 1] * rows, list(range(rows))
        most = traits.max_drafts if shape.drafting else 0
        ids_BG = torch.ones(rows, max(1, most), dtype=torch.int64, device=self._device)
        if shape.drafting and traits.kv is not None:
            width = -(-(context + traits.block) // self._pages.page_size)
            tables_BP = torch.zeros(rows, width, dtype=torch.int32, device=self._device)
            anchors_B = torch.full((rows,), context - 1, device=self._device)
            pick = CoupledPick(params, anchors, self._sampler)
            ids_BG = self._drafter.propose(DraftRows(slots, ids_BG[:, 0], anchors_B, tables_BP, pick)).ids_BG
        extra = shape.tier - rows
        lens = [extra // rows + (row < extra % rows) for row in slots] if shape.drafting else [0] * rows
        batch = self._batch(lens, context)
        features = dict.fromkeys(traits.captured_layers, torch.empty(0))
        hidden_TD = self._runner.hidden(batch, features or None)
        verdict = verify_coupled(self._runner.logits(hidden_TD), Round(params, anchors, ids_BG, lens), self._sampler)
        verdict.emitted.ids.tolist()
        if traits.kv is not None:
            counts = [1 + length for length in lens]
            committed = Committed(slots, counts, batch.input_ids_T, batch.positions_T, batch.write_slots_T, features)
            self._drafter.commit(committed)

    def _batch(self, lens: list[int], context: int) -> ForwardBatch:
        counts = [1 + length for length in lens]
        positions_T = torch.cat([torch.arange(context - 1, context - 1 + n) for n in counts]).to(self._device)
        ends = [context - 1 + n for n in counts]
        width = -(-max(ends) // self._pages.page_size)
        plain = not any(lens)
        return ForwardBatch(
            input_ids_T=torch.ones_like(positions_T),
            positions_T=positions_T,
            write_slots_T=positions_T % self._pages.page_size,
            query_lens=counts,
            seq_lens=ends,
            page_tables_BP=torch.zeros(len(lens), width, dtype=torch.int32, device=self._device),
            row_keys=[self._key - row for row in range(len(lens))],
            num_decode=len(lens) if plain else 0,
            logit_rows_R=torch.arange(len(positions_T), device=self._device),
            state_slots=None if self._runner.states is None else [0] * len(lens),
            provisional=0 if plain or self._runner.states is None else len(lens),
        )


def _listed(knots: list[int]) -> str:
    return "/".join(map(str, knots))


def _powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`, which is the last."""
    return sorted({min(1 << power, most) for power in range((most - 1).bit_length() + 1)})
