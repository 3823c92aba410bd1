"""Rounds of speculation from fused kernels, as replays of captured CUDA graphs.

Owns the tiers of rows, of verify rows and of draft tokens, capture on first use, and the host's part of a burst
of rounds: one message and the page tables in, replays, records out. Ignores what rounds are worth and what
becomes of their tokens. A round is one replay (`engine.runner.round_launches`), and how many drafts each row
verifies is decided within it, so that the host launches the next round while this one runs.

Shapes: B rows of a tier, P page-table columns, G drafts, F fields of a record.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.decode_metadata import saved_bytes, worthwhile
from engine.batch import SharedPrefix
from engine.memory.device_table import DeviceTable
from engine.memory.request_table import RequestTable
from engine.memory.transfer import staged
from engine.metrics import EngineCounters
from engine.request import Sample
from engine.runner.graph_pool import GraphPool
from engine.runner.round_inputs import RoundInputs
from engine.runner.round_launches import RoundLaunches, RoundParts, RoundScratch
from engine.runner.round_plan import RoundModes, RoundPlan, tiers_of_draft_tokens, tiers_of_rows, tiers_of_verify_rows
from engine.runner.stepper import HostCopy, HostResult
from engine.scheduler.batching import shared_prefixes
from engine.scheduler.rows import Rows
from lora.kernel_step import Variant


@dataclass(slots=True)
class CapturedRound:
    """A graph knows addresses only: what it touches lives as long as it does, in `launches`."""

    replay: Callable[[], None]
    graphed: bool
    launches: RoundLaunches


class _Key(NamedTuple):
    """Tiers of rows, of verify rows and of block slots (0: whole blocks), the window of all rows (0: each has its own),
    what is computed, for which adapters, and whether rows share prefixes."""

    rows: int
    verify: int
    slots: int
    window: int
    modes: RoundModes
    variant: Variant | None
    shares: bool

    @property
    def kind(self) -> tuple[RoundModes, Variant | None]:
        return self.modes, self.variant


_EVEN_WINDOWS = (1, 3)
"""Beside whole ones: such as short drafts are worth."""
_READ_A_SECOND = 3e12
"""Bytes, of a large GPU: what sharing prefixes saves is weighed against the time of making a graph by it."""


class RoundResult:
    """A burst's results on their way to the host: those of a burst of steps, and each round's records. `verify` rows
    and `slots` of blocks, 0 where those are whole, are what the graph computed, over `padded` rows, and `window` the
    drafts of every row where those are the same."""

    def __init__(
        self, rows: HostCopy, record_RBF: torch.Tensor, padded: int, verify: int, slots: int, window: int
    ) -> None:
        self._rows, self._records = rows, record_RBF
        self.padded, self.verify, self.slots, self.window = padded, verify, slots, window
        self.edges: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """The device's time before the first round and behind the last one."""

    def share(self, drafts: int) -> float:
        """Of blocks of `drafts` slots a row, what was drafted."""
        if self.window:
            return self.window / drafts
        return self.slots / (self.padded * drafts) if self.slots else 1.0

    def wait(self) -> tuple[HostResult, list[np.ndarray]]:
        """Tokens, and int32 [B, F] of every round."""
        result = self._rows.wait()
        return result, list(self._records.numpy())

    def seconds_behind(self, before: RoundResult | None) -> tuple[float, float] | None:
        """How long the device had nothing to do between the rounds `before` and these (nothing if there were none),
        and how long these took; of results that are there. None where the device has no clock."""
        if self.edges is None:
            return None
        began, ended = self.edges
        # It stands behind the copies that `wait` waits for.
        ended.synchronize()
        idle = 0.0 if before is None or before.edges is None else before.edges[1].elapsed_time(began)
        return max(0.0, idle) / 1e3, began.elapsed_time(ended) / 1e3


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The device's time, where it has one of its own, when it gets here."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class RoundStepper:
    def __init__(
        self,
        parts: RoundParts,
        table: DeviceTable,
        requests: RequestTable,
        max_rows: int,
        counters: EngineCounters,
    ) -> None:
        device = parts.pool.device
        self._parts = parts
        self._table = table
        self._requests = requests
        self._counters = counters
        self.row_tiers = tiers_of_rows(max_rows)
        whole = parts.speculation.config.mode != "compact"
        self.verify_tiers = tiers_of_verify_rows(max_rows, parts.drafts, whole)
        self.draft_tiers: list[int] | None = None
        """Draft tokens of graphs, None where blocks are whole."""
        self.windows: tuple[int, ...] = ()
        """Those that graphs may give to every row instead."""
        if parts.limits.by_request:
            self.draft_tiers = tiers_of_draft_tokens(max_rows, parts.limits.block)
            if not parts.limits.lead:
                self.windows = tuple(sorted({w for w in _EVEN_WINDOWS if w < parts.drafts} | {parts.drafts}))
        self._captured: dict[_Key, CapturedRound] = {}
        self._kind: tuple[RoundModes, Variant | None] | None = None
        """Of the round that ran last, beside its tiers and what its rows shared."""
        self.changes = 0
        """Grows with every graph that comes or goes and every change of kind: `ready` may say something else."""
        self._sharing_B = np.empty(0, dtype=np.int64)
        """Keys of the rows that were last looked at for what they share, which was `_found`."""
        self._found: list[SharedPrefix] = []
        self._forgone = 0.0
        """Seconds that rounds took longer for want of graphs that read shared prefixes once."""
        self._inputs: dict[int, RoundInputs] = {}
        self._moves = 0
        self._graphs = GraphPool(device, counters)
        self._scratch: RoundScratch | None = None

    def tier(self, verify: int) -> int:
        """Verify rows of the graph that holds these."""
        return self.verify_tiers[bisect.bisect_left(self.verify_tiers, verify)]

    @property
    def graph_bytes(self) -> int:
        return self._graphs.num_bytes

    @property
    def capture_seconds(self) -> float:
        """What one more graph takes, at best; nothing where there are none."""
        return self._graphs.seconds if self._graphs.exists else 0.0

    def ready(self, rows: int) -> list[tuple[int, int, int, int]]:
        """(rows, verify rows, block slots, window) of the graphs there are for so many rows, of the kind that ran last.
        Blocks by request cost by their slots, so that rows to spare cost little."""
        least = self.row_tier(rows)
        fitting = (
            key[:4]
            for key in self._captured
            if key.kind == self._kind and (key.rows == least or (key.slots and key.rows > least))
        )
        return list(dict.fromkeys(fitting))

    def forget(self) -> None:
        """Drop all graphs and give their memory up. They are captured anew when needed."""
        self._captured.clear()
        self.changes += 1
        self._inputs.clear()
        self._scratch = None
        self._graphs.forget()

    def prefixes(self, rows: Rows, page_tables_BP: np.ndarray, verify: int) -> list[SharedPrefix]:
        """What is worth reading once for `verify` rows of these, of what they are known to share. Pages that are
        shared are full and stay: what was found holds for these rows in this order."""
        if len(rows) < 2:
            return []
        pool = self._parts.pool
        if not np.array_equal(rows.keys_B, self._sharing_B):
            self._sharing_B = rows.keys_B
            self._found = shared_prefixes(page_tables_BP, rows.length_B - 1, pool.page_size)
        return worthwhile(self._found, self._parts.backend.size(pool), verify / len(rows)) if self._found else []

    def run(self, plan: RoundPlan, samples: list[Sample]) -> RoundResult:
        """Enqueue the plan's rounds. Pages are reserved."""
        captured, key = self._ready(plan)
        tier, verify, prefixes = key.rows, key.verify, plan.prefixes if key.shares else []
        inputs, device, (rows, columns) = captured.launches.inputs, self._table.device, plan.page_tables_BP.shape
        began = mark(self._table.device)
        adapters = captured.launches.adapters
        if adapters is not None:
            self._counters.stack_copies += adapters.prepare(np.array(plan.adapters))
        inputs.message.copy_(staged(plan.message(tier), device), non_blocking=True)
        inputs.page_tables_BP[:rows, :columns].copy_(staged(plan.page_tables_BP, device), non_blocking=True)
        captured.launches.share(prefixes, verify / plan.rows)
        record_BF = captured.launches.record_BF[:rows]
        record_RBF = torch.empty((plan.rounds, *record_BF.shape), dtype=torch.int32, pin_memory=record_BF.is_cuda)
        for taken_BF in record_RBF:
            captured.replay()
            # A copy to the host is in order: the next round overwrites this one's record behind it.
            taken_BF.copy_(record_BF, non_blocking=True)
        stacked = adapters is not None and adapters.stack is not None
        self._counters.replayed(plan.rounds, rows, tier, captured.graphed, adapters is not None, stacked)
        self._counters.shared_rounds += plan.rounds if prefixes else 0
        copy = HostCopy(self._table, inputs.slots_B[:rows].long(), samples, plan.modes.step)
        result = RoundResult(copy, record_RBF, tier, verify, key.slots, key.window)
        ended = mark(self._table.device)
        if began is not None and ended is not None:
            result.edges = began, ended
        return result

    def _ready(self, plan: RoundPlan) -> tuple[CapturedRound, _Key]:
        rows, verify, slots = self.row_tier(plan.rows), self.tier(plan.verify), 0
        if plan.window:
            verify = rows * (1 + plan.window)
        elif self.draft_tiers is not None:
            drafted = self._parts.limits.lead * np.count_nonzero(plan.most) + int(np.sum(plan.most))
            slots = self.draft_tiers[bisect.bisect_left(self.draft_tiers, drafted)]
        self._drop_moved()
        variant = None
        if plan.adapters and self._parts.adapters is not None:
            variant = self._parts.adapters.uneven_variant(np.array(plan.adapters), verify)
        kind = (plan.modes, variant)
        if kind != self._kind:
            self._kind = kind
            self.changes += 1
        key = self._chosen(_Key(rows, verify, slots, plan.window, *kind, bool(plan.prefixes)), plan)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(key)
            self.changes += 1
        return captured, key

    def _chosen(self, key: _Key, plan: RoundPlan) -> _Key:
        """The graph to run as, which may have to be made: `key`, one that is there with room for it, or one that does
        not share while that is cheaper than making one that does."""

        def there(wanted: _Key) -> _Key | None:
            for exact in (wanted, wanted._replace(shares=True)):
                if exact in self._captured:
                    return exact
            return None if plan.capture else self._roomy(wanted)

        found = there(key)
        if found is None and plan.prefixes:
            apart = there(key._replace(shares=False))
            if apart is not None and not self._pays(plan, key.verify):
                return apart
        return found or key

    def _pays(self, plan: RoundPlan, verify: int) -> bool:
        """Whether rounds that do not share prefixes have lost as much by now as one more graph takes."""
        pool = self._parts.pool
        saved = sum(saved_bytes(plan.prefixes, self._parts.backend.size(pool), verify / plan.rows))
        self._forgone += plan.rounds * pool.num_layers * saved / _READ_A_SECOND
        if self._forgone < self.capture_seconds:
            return False
        self._forgone = 0.0
        return True

    def _roomy(self, key: _Key) -> _Key | None:
        """The least of the graphs there are that has room for what `key` has room for. One that can share need not."""
        fitting = [
            other
            for other in self._captured
            if (other.kind, other.window) == (key.kind, key.window)
            and all(have >= need for have, need in zip(other[:3], key[:3], strict=True))
            if (other.slots or other.rows == key.rows) and other.shares >= key.shares
        ]
        return min(fitting, key=lambda other: (other.verify, other.slots, other.rows, other.shares), default=None)

    def row_tier(self, rows: int) -> int:
        """Rows of the graph that is made for these."""
        return self.row_tiers[bisect.bisect_left(self.row_tiers, rows)]

    def _drop_moved(self) -> None:
        """Forget the rounds that know buffers of edits or columns which have grown since."""
        table = self._table
        if table.moves == self._moves:
            return
        self._moves = table.moves
        if self._graphs.exists:
            torch.cuda.synchronize(self._table.device)
        for key in [key for key in self._captured if key.modes.step.extra]:
            del self._captured[key]
            self.changes += 1

    def _capture(self, key: _Key) -> CapturedRound:
        tier, verify, variant, device = key.rows, key.verify, key.variant, self._table.device
        if self._scratch is None:
            self._scratch = RoundScratch.empty(self._parts, self.row_tiers[-1], self.verify_tiers[-1], device)
        inputs = self._inputs.get(tier)
        if inputs is None:
            columns = self._requests.pages_SP.shape[1]
            inputs = self._inputs[tier] = RoundInputs.empty(tier, self._parts.drafts, columns, device)
        inputs.message[:tier] = -1
        step = None
        if variant is not None and self._parts.adapters is not None:
            step = self._parts.adapters.captured(verify, variant)
        given = (self._parts, self._table, inputs, verify, key.modes, self._scratch, key.slots, step)
        launches = RoundLaunches(*given, key.shares, key.window)
        drafts = f"windows of {key.window}" if key.window else f"{key.slots or 'all'} block slots"
        replay = self._graphs.record(launches, f"rounds of {tier} rows, {verify} verify rows and {drafts}")
        self._counters.graph_captures += 1
        return CapturedRound(replay or launches, replay is not None, launches)
