"""Bursts of decode steps from fused kernels, as replays of captured CUDA graphs.

Owns the tiers of batch sizes, capture on first use, and the host's part of a burst: slots, page
tables and shared prefixes in, replays, results out. Ignores what rows mean and when bursts run.

A step is one replay: gather, forward, draw, advance, all over a vector of slots. Lengths, stops
and sampling live on the device, so a captured graph serves any content of its tier. What a drafter
must be told of a burst takes one more, behind its steps. Without a GPU the same launches run one by
one, interpreted, for tests.

Shapes: B rows of a tier, P page-table columns, N query heads, H head size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.adapters import Adapters, slot_of
from engine.attention.decode_metadata import DecodeMetadata, worthwhile
from engine.attention.mla_triton import LatentSize, LatentStep, TritonLatent
from engine.attention.triton import TritonAttention
from engine.batch import SharedPrefix
from engine.dspark.speculation import Speculation
from engine.kernels.decode_step import advance_rows, gather_rows
from engine.kernels.sample_columns import SampleColumns, SampleOut, SampleWorkspace
from engine.kernels.sample_epilogue import sample_rows
from engine.kernels.sample_top import sample_top
from engine.memory.device_edits import DeviceEdits
from engine.memory.device_table import DeviceTable
from engine.memory.kv_pool import KVPool
from engine.memory.request_table import RequestTable
from engine.memory.transfer import staged
from engine.metrics import EngineCounters
from engine.models.fused import FusedForward
from engine.models.layerwise import LayerwiseForward
from engine.models.spec import ModelSpec
from engine.request import Sample
from engine.runner.burst_context import BurstContext
from engine.runner.graph_pool import GraphPool
from engine.runner.state_tracks import StateRows, StateTracks, TrackedResult
from engine.runner.step_plan import StepPlan
from engine.runner.stepper import BurstResult, HostCopy, StepModes
from engine.scheduler.batching import shared_prefixes
from lora.device_pool import BASE
from lora.kernel_step import KernelStep, Variant


def tiers_up_to(most: int) -> list[int]:
    """Batch sizes that graphs are captured for. Steps of an eighth keep padding low: under 8 % at
    the median of batch sizes above 16."""
    tiers = [1, 2, 4, 8, 12, 16]
    while tiers[-1] < most:
        step = max(4, 1 << (tiers[-1].bit_length() - 4))
        tiers.append(tiers[-1] + step)
    return [tier for tier in tiers if tier < most] + [most]


@dataclass(slots=True)
class Captured:
    """One tier's step, as a graph's replay where there are graphs (`graphed`), and every buffer it
    touches: a graph knows addresses only, so `scratch` must live as long as it does."""

    replay: Callable[[], None]
    graphed: bool
    slots_B: torch.Tensor
    metadata: DecodeMetadata | LatentStep
    adapters: KernelStep | None
    states: StateRows | None
    scratch: tuple[torch.Tensor, ...]


class GraphStepper:
    """Graphs read weights and keys where they lie: both keep their addresses for life. `burst` bounds the steps
    whose tokens a drafter waits for."""

    def __init__(
        self,
        spec: ModelSpec,
        table: DeviceTable,
        requests: RequestTable,
        forward: FusedForward | LayerwiseForward,
        backend: TritonAttention | TritonLatent,
        kv_pool: KVPool,
        max_rows: int,
        burst: int,
        counters: EngineCounters,
        deterministic: bool = False,
        speculation: Speculation | None = None,
        adapters: Adapters | None = None,
        states: StateTracks | None = None,
    ) -> None:
        self._adapters = adapters
        self._states = states
        self._deterministic = deterministic
        self._table = table
        self._requests = requests
        self._forward = forward
        self._backend = backend
        self._pool = kv_pool
        self._counters = counters
        self._tiers = tiers_up_to(max_rows)
        self._captured: dict[tuple[int, bool, StepModes, Variant | None], Captured] = {}
        table.edits = DeviceEdits(len(table.new_S), spec.vocab_size, spec.context_len, kv_pool.device)
        self._moves = 0
        self._graphs = GraphPool(kv_pool.device, counters)
        self._workspace = SampleWorkspace.empty(max_rows, spec.vocab_size, kv_pool.device)
        self._drawn = SampleOut.empty(max_rows, kv_pool.device, entropy=True)
        self._context: BurstContext | None = None
        if speculation is not None and speculation.captured_layers:
            place = spec.hidden, kv_pool.dtype, kv_pool.device
            self._context = BurstContext(speculation, self._graphs, counters, max_rows, burst, *place)
        # The largest buffers come first: those of smaller tiers then lie inside them.
        self._size = self._plan(max_rows, shared=True).size

    @property
    def graph_bytes(self) -> int:
        return self._graphs.num_bytes

    def forget(self) -> None:
        """Drop all graphs and give their memory up. They are captured anew when needed."""
        self._captured.clear()
        if self._context is not None:
            self._context.forget()
        self._graphs.forget()

    def run(self, samples: list[Sample], slots: list[int], steps: int) -> BurstResult:
        plan = self.plan(samples, slots, steps)
        if self._states is None:
            return HostCopy(self._table, self.launch(plan), samples, plan.modes)
        landing = self._states.launched(samples, slots)
        return TrackedResult(HostCopy(self._table, self.launch(plan), samples, plan.modes), landing)

    def plan(self, samples: list[Sample], slots: list[int], steps: int) -> StepPlan:
        longest = max(int(self._requests.num_pages_S[slot]) for slot in slots)
        page_tables_BP = self._requests.pages_SP[slots, :longest]
        prefixes = self._prefixes(samples, page_tables_BP)
        adapters = [slot_of(sample.group.lease) for sample in samples]
        modes, windows = StepModes.of(samples), self._requests.windows
        window_tables_BP = None if windows is None else windows.pages_SP[slots, :longest]
        adapters = adapters if any(adapters) else []
        states = ([], []) if self._states is None else self._states.slots(slots)
        return StepPlan(slots, steps, modes, page_tables_BP, prefixes, adapters, window_tables_BP, states)

    def launch(self, plan: StepPlan) -> torch.Tensor:
        """Enqueue the plan's steps; the slots on the device, one for each row."""
        rows, columns = plan.page_tables_BP.shape
        tier = self._tiers[bisect.bisect_left(self._tiers, rows)]
        shared = bool(plan.prefixes) and not self._deterministic  # whose steps are the same either way
        self._drop_moved()
        captured, context = self._step_for(tier, shared, plan), self._context
        together = plan.steps if context is None else context.begin(tier, plan.steps)
        device = self._pool.device
        padded = np.full(tier, -1, dtype=np.int64)
        padded[:rows] = plan.slots
        captured.slots_B.copy_(staged(padded, device), non_blocking=True)
        captured.metadata.page_tables_BP[:rows, :columns].copy_(staged(plan.page_tables_BP, device), non_blocking=True)
        windows = captured.metadata.window
        if windows is not None and plan.window_tables_BP is not None:
            windows.page_tables_BP[:rows, :columns].copy_(staged(plan.window_tables_BP, device), non_blocking=True)
        if captured.metadata.prefix is not None:
            captured.metadata.set_prefixes(plan.prefixes)
        if captured.states is not None:
            captured.states.fill(*plan.states)
        for first in range(0, plan.steps, together):
            for _ in range(min(together, plan.steps - first)):
                captured.replay()
            if context is not None:
                context.commit(tier)
        adapters = captured.adapters
        stacked = adapters is not None and adapters.stack is not None
        self._counters.replayed(plan.steps, rows, tier, captured.graphed, adapters is not None, stacked)
        return captured.slots_B[:rows]

    def _step_for(self, tier: int, shared: bool, plan: StepPlan) -> Captured:
        """The tier's step, with the plan's adapters in it."""
        if not plan.adapters or self._adapters is None:
            return self._captured.get((tier, shared, plan.modes, None)) or self._capture(tier, shared, plan.modes)
        adapters_B = np.full(tier, BASE, dtype=np.int64)
        adapters_B[: len(plan.adapters)] = plan.adapters
        variant = self._adapters.variant(adapters_B)
        captured = self._captured.get((tier, shared, plan.modes, variant))
        if captured is None:
            captured = self._capture(tier, shared, plan.modes, self._adapters.captured(tier, variant))
        assert captured.adapters is not None
        self._counters.stack_copies += captured.adapters.fill(adapters_B)
        return captured

    def _prefixes(self, samples: list[Sample], page_tables_BP: np.ndarray) -> list[SharedPrefix]:
        if len(samples) < 2 or isinstance(self._size, LatentSize):
            return []
        computed_B = np.array([sample.length - 1 for sample in samples])
        return worthwhile(shared_prefixes(page_tables_BP, computed_B, self._pool.page_size), self._size)

    def _plan(self, tier: int, shared: bool) -> DecodeMetadata | LatentStep:
        return self._backend.plan_decode_buffers(tier, self._requests.pages_SP.shape[1], self._pool, shared)

    def _drop_moved(self) -> None:
        """Forget the steps that know buffers of edits or columns which have grown since."""
        table = self._table
        if table.moves == self._moves:
            return
        self._moves = table.moves
        if self._graphs.exists:
            torch.cuda.synchronize(self._pool.device)
        for key in [key for key in self._captured if key[2].extra]:
            del self._captured[key]

    def _sampling(self, slots_B: torch.Tensor, modes: StepModes) -> SampleColumns:
        table = self._table
        return SampleColumns(
            table.temperature_S,
            table.top_k_S,
            table.top_p_S,
            table.min_p_S,
            table.seed_S,
            table.position_S,
            table.active_S,
            slots_B,
            table.edits.columns if modes.edits and table.edits is not None else None,
            definition_S=table.definition_S,
        )

    def _capture(self, tier: int, shared: bool, modes: StepModes, adapters: KernelStep | None = None) -> Captured:
        device = self._pool.device
        metadata = self._plan(tier, shared)
        slots_B = torch.full((tier,), -1, dtype=torch.int64, device=device)
        ids_B = torch.empty(tier, dtype=torch.int64, device=device)
        positions_B = torch.empty(tier, dtype=torch.int64, device=device)
        out_BNH = torch.empty(
            tier, metadata.size.num_heads, metadata.size.head_dim, dtype=self._pool.dtype, device=device
        )
        table = self._table
        columns = self._sampling(slots_B, modes)
        drawn = self._drawn.head(tier, entropy=modes.columns)
        every = modes.columns or modes.top
        windows = metadata.window
        window = None if windows is None else (windows.page_tables_BP, windows.write_slots_B)
        window_slots_B = None if window is None else window[1]
        layers = () if self._context is None else self._context.layers
        state_rows = None if self._states is None else self._states.rows(tier)

        def attend(q_BNH: torch.Tensor, layer: int, sink_N: torch.Tensor | None = None) -> torch.Tensor:
            assert isinstance(self._backend, TritonAttention) and isinstance(metadata, DecodeMetadata)
            self._backend.run_decode(q_BNH, self._pool.tokens(layer), metadata, out_BNH, layer, sink_N)
            return out_BNH

        def step() -> None:
            gather_rows(
                table,
                slots_B,
                metadata.page_tables_BP,
                self._pool.page_size,
                ids_B,
                positions_B,
                metadata.seq_lens_B,
                metadata.write_slots_B,
                window,
            )
            metadata.cut()
            states = dict.fromkeys(layers, ids_B)
            write_slots_B = metadata.write_slots_B
            inputs = ids_B, positions_B, write_slots_B
            if state_rows is not None and isinstance(self._forward, LayerwiseForward):
                state_rows.select(metadata.seq_lens_B)
                self._forward.live_B = state_rows.live_B
            hidden_BD = self._forward.hidden(*inputs, attend, states or None, adapters, window_slots_B)
            if state_rows is not None:
                state_rows.keep(metadata.seq_lens_B)
            if self._context is not None:
                self._context.keep(ids_B, positions_B, write_slots_B, states)
            logits_BV = self._forward.logits(hidden_BD, adapters=adapters)
            sample_rows(logits_BV, columns, drawn, self._workspace, truncated=modes.truncated, every=every)
            if modes.top:
                sample_top(logits_BV, table, columns, drawn, self._workspace)
            advance_rows(table, slots_B, drawn, count=modes.edits)

        replay = self._graphs.record(step, "decode steps")
        self._counters.graph_captures += 1
        scratch = (ids_B, positions_B, out_BNH)
        captured = Captured(replay or step, replay is not None, slots_B, metadata, adapters, state_rows, scratch)
        self._captured[tier, shared, modes, None if adapters is None else adapters.variant] = captured
        return captured
