"""Step times of rounds and of plain steps, measured at the start as they will be run.

Owns the rows that belong to nobody and what is run over them. Ignores what is made of times
(`engine.dspark.cost_model`).

Nothing has been served yet: every page is free, so that rows stand in the device table and read pages as
requests would. What they leave behind is read by nobody. Graphs captured for it serve requests later.

Shapes: B rows, P page-table columns, G drafts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np

from engine.dspark.config import DSparkConfig
from engine.dspark.cost_model import StepShape
from engine.dspark.graph_choice import slots_for
from engine.memory.device_table import STOPPED, DeviceTable, RowState
from engine.metrics import EngineCounters
from engine.runner.graph_stepper import GraphStepper
from engine.runner.round_plan import RoundModes, RoundPlan
from engine.runner.round_stepper import RoundStepper, mark
from engine.runner.step_plan import StepPlan
from engine.runner.stepper import StepModes
from engine.sampling.params import RowSampling
from engine.scheduler.pages import PageManager
from engine.types import SamplingParams, Want

logger = logging.getLogger(__name__)
_CONTEXT = 768
_SHORTER = 12
"""Of two contexts, how many times the shorter fits the other."""
_PLAIN_STEPS, _ROUNDS = 8, 2
"""What is launched at once."""


class RoundSweep:
    """Runs rounds of up to `rows` rows by `stepper` and steps by `plain`; `block` tokens follow a row's last
    one in the drafter's pages."""

    def __init__(
        self,
        stepper: RoundStepper,
        plain: GraphStepper,
        table: DeviceTable,
        pages: PageManager,
        config: DSparkConfig,
        drafts: int,
        block: int,
        longest: int,
        counters: EngineCounters,
    ) -> None:
        self._stepper, self._plain, self._table, self._pages = stepper, plain, table, pages
        self._counters = counters
        self._config, self._drafts = config, drafts
        self._ahead = 2 * max(block, (1 + drafts) * _ROUNDS, _PLAIN_STEPS) + 1
        self._context = min(_CONTEXT, longest - self._ahead)

    def run(self, rows: int, seconds: float) -> list[tuple[StepShape, float]]:
        """Times of the most telling shapes first, as many as fit so many seconds; captures take their own. Every
        size of batch has graphs of few, some and all drafts then, timed or not: what is made while it serves stands in
        the way, and batches that shrink as their requests end stay with none for long enough to be worth a graph of
        theirs."""
        began, captured, times = time.perf_counter(), self._counters.graph_capture_seconds, []
        counts = _counts(rows)
        others = [tier for tier in reversed(self._stepper.row_tiers) if tier < rows and tier not in counts]
        # One draft a row is the cheapest round there is, and where kernels change with their sizes others say little
        # of it: what is not measured, and seems too long, is never tried.
        shapes = (*self._shapes(counts), *self._shapes(others, whole=False), *self._shapes(others))
        made: set[tuple[int, int, float, bool]] = set()
        for shape in dict.fromkeys(shapes):
            graph = shape.rows, shape.tier, shape.share, shape.even
            spent = time.perf_counter() - began - (self._counters.graph_capture_seconds - captured)
            if spent < seconds:
                times.append(self._time(shape))
            elif shape.drafting and graph not in made:
                self._time(shape, launches=1)
            made |= {graph} if shape.drafting else set()
        logger.info("step times of %d shapes measured in %g s", len(times), seconds)
        return times

    def _shapes(self, counts: list[int], whole: bool = True) -> list[StepShape]:
        """Without drafts, with one a row, with three, with `whole` and shorter windows of all rows, and the first two
        of them (without it no others) and the last behind short contexts too, which tells rows and tokens apart. Where
        blocks are drafted by request, what planners ask for is made of each (`engine.dspark.planner`), else all."""
        if self._context < 1:
            return []
        for pool in (self._pages.pool, self._pages.draft_pool):
            if pool is not None:
                pool.fill(0.0)
        shapes = []
        for count in counts:
            most, short = count * self._drafts, max(1, self._context // _SHORTER)
            own = [StepShape(count, count, False)]
            largest, budgets = self._stepper.verify_tiers[-1], {most}
            evens = [w for w in self._stepper.windows if self._stepper.row_tier(count) * (1 + w) <= largest]
            if self._config.mode == "compact":
                budgets |= {count, min(3 * count, most)}
                if self._drafts in evens:
                    budgets -= {most} - {count}
            for verify in sorted({self._stepper.tier(min(count + budget, largest)) for budget in budgets}):
                budget = min(verify - count, most)
                slots = slots_for(budget, most) if self._stepper.draft_tiers is not None else most
                own.append(StepShape(count, verify, True, share=slots / most))
            for window in evens:
                own.append(StepShape(count, count * (1 + window), True, share=window / self._drafts, even=True))
            # What a row's queries read together costs less than as much that each reads alone.
            both = [*own[:2], own[-1]] if whole else own[:2]
            shapes += [_behind(shape, self._context) for shape in (own if whole else both)]
            shapes += [_behind(shape, short) for shape in both]
        return shapes

    def _time(self, shape: StepShape, launches: int = 2) -> tuple[StepShape, float]:
        """The shape that ran, and its seconds: the device's own, where it has some. A host that is slower than the
        device shows when it serves, while what takes too long here would never be tried. The first of two launches
        captures, and keeps the device busy while the host is at the second."""
        slots, device, ran = list(range(shape.rows)), self._table.device, None
        tables_BP, context = self._tables(shape.rows), round(shape.tokens_read) // shape.rows
        self._table.admit([self._row(slot, context) for slot in slots])
        for _ in range(launches):
            began, started = time.perf_counter(), mark(device)
            if shape.drafting:
                ran = self._stepper.run(self._round(shape, slots, tables_BP), [])
            else:
                self._plain.launch(StepPlan(slots, _PLAIN_STEPS, StepModes(), tables_BP, []))
            ended = mark(device)
        if started is not None and ended is not None:
            ended.synchronize()
            seconds = started.elapsed_time(ended) / 1e3
        else:
            seconds = time.perf_counter() - began
        self._table.finished_S[: len(slots)] = STOPPED
        self._table.release(slots)
        if ran is None:
            return shape, seconds / _PLAIN_STEPS
        share = ran.share(self._drafts)
        return replace(shape, rows=ran.padded, tier=ran.verify, share=share), seconds / _ROUNDS

    def _round(self, shape: StepShape, slots: list[int], tables_BP: np.ndarray) -> RoundPlan:
        rows, config = shape.rows, self._config
        none_BG, made = np.zeros((rows, self._drafts)), round(shape.share * rows * self._drafts)
        return RoundPlan(
            slots=slots,
            rounds=_ROUNDS,
            verify=shape.tier,
            budget=min(shape.tier - rows, made),
            most=[made // rows + (row < made % rows) for row in range(rows)],
            least=[0] * rows,
            room=[tables_BP.shape[1] * self._pages.page_size] * rows,
            modes=RoundModes(StepModes(), config.rule, config.mode),
            page_tables_BP=tables_BP,
            survival_BG=none_BG + 0.5,
            drafts_BG=none_BG.astype(np.int64),
            window=made // rows if shape.even else 0,
        )

    def _tables(self, rows: int) -> np.ndarray:
        """Pages of each row's own as far as there are so many, int32 [B, P]; page 0 is nobody's."""
        width = -(-(self._context + self._ahead) // self._pages.page_size)
        return (np.arange(rows * width, dtype=np.int32) % (self._pages.pool.num_pages - 1) + 1).reshape(rows, width)

    def _row(self, slot: int, context: int) -> RowState:
        sampling = RowSampling(SamplingParams(), Want(), slot, np.array([1]))
        return RowState(
            slot=slot,
            last_token=1,
            computed=context - 1,
            new=1,
            max_new=1 << 30,
            seed=slot,
            temperature=1.0,
            top_k=sampling.params.top_k,
            top_p=1.0,
            min_p=0.0,
            definition=0,
            stop_ids=(),
            row=sampling,
        )


def _behind(shape: StepShape, context: int) -> StepShape:
    """The shape with contexts of so many tokens."""
    read, queries = float(shape.rows * context), float(shape.tier * context)
    return replace(shape, tokens_read=read, context_queries=queries)


def _counts(rows: int) -> list[int]:
    """The largest batch, the smallest, half the largest, then what lies two octaves apart."""
    between = [rows >> shift for shift in (1, *range(2, rows.bit_length(), 2))]
    return list(dict.fromkeys((rows, 1, *(count for count in between if count))))
