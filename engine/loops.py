"""The loop that runs an engine's parts.

Owns the choice between stepping host and device in turns and letting the device run ahead, and what of
a GPU's work is captured. Ignores what a step is (`engine.scheduler`) and how parts are made
(`engine.build`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.registry import KERNEL_BACKENDS
from engine.build import Parts
from engine.config import number
from engine.memory.device_table import DeviceTable
from engine.runner.model_runner import FusedRunner
from engine.runner.round_plan import MOST_AT_ONCE
from engine.runner.stepper import EagerStepper, Stepper
from engine.scheduler.batching import BatchBuilder
from engine.scheduler.commit import Committer
from engine.scheduler.loop import SerialLoop
from engine.scheduler.overlapped import OverlappedLoop
from engine.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.dspark.speculation import Speculation
    from engine.runner.round_stepper import RoundStepper
    from engine.scheduler.rounds import DeviceRounds


def make_loop(parts: Parts, scheduler: Scheduler, committer: Committer) -> SerialLoop | OverlappedLoop:
    """The loop that the configuration names."""
    pages, speculation = parts.pages, parts.speculation
    builder = BatchBuilder(
        pages.table,
        pages.page_size,
        parts.device,
        verify_as_decode=parts.config.deterministic,
        adapters=parts.adapters,
    )
    serial = SerialLoop(scheduler, builder, parts.runner, parts.sampler, committer, parts.counters, speculation)
    if parts.config.loop == "serial":
        if speculation is not None:
            capture_chunks(parts)
        return serial
    burst, prefill_burst = parts.config.scheduler.burst, parts.config.scheduler.prefill_burst
    # Tokens of two launches: bursts of steps, or a few rounds of whole windows.
    most = burst if speculation is None else max(burst, MOST_AT_ONCE * (1 + speculation.max_drafts))
    table = DeviceTable(pages.table.num_slots, 2 * most, parts.device)
    stepper = make_stepper(parts, table, builder)
    rounds = make_rounds(parts, table, committer, stepper)
    return OverlappedLoop(
        scheduler, serial, table, stepper, committer, parts.counters, burst, prefill_burst, speculation, rounds
    )


def make_stepper(parts: Parts, table: DeviceTable, builder: BatchBuilder) -> Stepper:
    """Captured graphs where the fused path runs on a GPU, one operation after another elsewhere."""
    if isinstance(parts.runner, FusedRunner):
        from engine.runner.graph_stepper import GraphStepper

        stepper = GraphStepper(
            parts.model.spec,
            table,
            parts.pages.table,
            parts.runner.fused,
            parts.runner.attention,
            parts.pages.pool,
            number(parts.config.scheduler.max_running),
            parts.config.scheduler.burst,
            parts.counters,
            parts.config.deterministic,
            parts.speculation,
            parts.adapters,
        )
        parts.memory.graphs.append(stepper)
        capture_chunks(parts)
        return stepper
    eager = EagerStepper(table, builder, parts.runner, parts.sampler, parts.speculation)
    return layerwise_stepper(parts, table, eager) or eager


def layerwise_stepper(parts: Parts, table: DeviceTable, eager: EagerStepper) -> Stepper | None:
    """Captured steps of a model's own layers, where nothing in them waits for the host. Their products pad rows to
    tiers, which a deterministic engine's may not."""
    if parts.config.deterministic or parts.runner.backend.name not in KERNEL_BACKENDS:
        return None
    from engine.attention.mla_triton import TritonLatent
    from engine.attention.triton import TritonAttention
    from engine.models.layerwise import LayerwiseForward
    from engine.runner.graph_stepper import GraphStepper
    from engine.runner.state_tracks import StateTracks, WithoutAdapters

    model, pool, backend, states = parts.model, parts.pages.pool, parts.runner.backend, parts.runner.states
    if not isinstance(backend, (TritonAttention, TritonLatent)) or not LayerwiseForward.serves(model, pool):
        return None
    tracks = None if states is None else StateTracks(states, parts.pages.table)
    stepper = GraphStepper(
        model.spec.attending,
        table,
        parts.pages.table,
        LayerwiseForward(model, pool, states, backend if isinstance(backend, TritonLatent) else None),
        backend,
        pool,
        number(parts.config.scheduler.max_running),
        parts.config.scheduler.burst,
        parts.counters,
        parts.config.deterministic,
        parts.speculation,
        states=tracks,
    )
    parts.memory.graphs.append(stepper)
    return WithoutAdapters(stepper, eager, tracks)


def make_rounds(parts: Parts, table: DeviceTable, committer: Committer, plain: Stepper) -> DeviceRounds | None:
    """Rounds of speculation that the device runs by itself, where it can: a deterministic engine's verify rows
    keep their bits in the serial loop."""
    speculation, runner = parts.speculation, parts.runner
    if speculation is None or not isinstance(runner, FusedRunner) or parts.config.deterministic:
        return None
    if parts.pages.windows is not None:
        return None  # rounds know one page table
    from engine.runner.round_parts import round_parts
    from engine.runner.round_stepper import RoundStepper
    from engine.scheduler.rounds import DeviceRounds

    shared = round_parts(parts, speculation, runner)
    if shared is None:
        return None
    most_rows, context_len = number(parts.config.scheduler.max_running), parts.model.spec.context_len
    stepper = RoundStepper(shared, table, parts.pages.table, most_rows, parts.counters)
    parts.memory.graphs.append(stepper)
    speculation.plan_for(stepper.verify_tiers, stepper.draft_tiers, stepper)
    if parts.device.type == "cuda" and not parts.config.cache.canary:
        seed_step_times(parts, speculation, table, stepper, plain, most_rows)
    return DeviceRounds(speculation, stepper, parts.pages, committer, parts.counters, context_len, table.ring)


def seed_step_times(
    parts: Parts, speculation: Speculation, table: DeviceTable, stepper: RoundStepper, plain: Stepper, most_rows: int
) -> None:
    """Make the graphs of rounds of all sizes and measure them, for the planner has to know them before the first
    request. Where an earlier run has told it, that need not be done again."""
    from engine.runner.graph_stepper import GraphStepper
    from engine.runner.round_sweep import RoundSweep

    config, cost, traits = speculation.config, speculation.cost, speculation.drafter.traits
    if config.sweep_seconds == 0 or not isinstance(plain, GraphStepper):
        return
    longest = min(parts.model.spec.context_len, traits.context_len)
    sweep = RoundSweep(
        stepper,
        plain,
        table,
        parts.pages,
        config,
        speculation.max_drafts,
        max(1, traits.block),
        longest,
        parts.counters,
    )
    times = sweep.run(most_rows, 0.0 if cost.observed else config.sweep_seconds)
    if not times:
        return
    cost.seed(times)
    if cost.on_observed is not None:
        cost.on_observed(cost)


def capture_chunks(parts: Parts) -> None:
    """Run chunks of prompts, and rows that verify drafts, as replays of graphs where the device is one."""
    if not isinstance(parts.runner, FusedRunner) or parts.device.type != "cuda":
        return
    from engine.runner.prefill_graphs import PrefillGraphs

    parts.runner.prefill_graphs = PrefillGraphs(
        parts.model.spec,
        parts.runner.fused,
        parts.runner.attention,
        parts.pages.pool,
        number(parts.config.scheduler.prefill_tokens),
        parts.pages.table.pages_SP.shape[1],
        parts.counters,
        () if parts.speculation is None else parts.speculation.captured_layers,
    )
    parts.memory.graphs.append(parts.runner.prefill_graphs)
