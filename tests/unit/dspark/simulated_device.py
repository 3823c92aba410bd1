"""A device that is not there, under a whole adaptive engine.

Its time is counted, and whether drafts are accepted is drawn.

Owns the clock, what rounds, plain steps and captures take, and what kinds of requests accept. Everything that decides
is the engine's own: planner, cost model, what is learnt, the loop. Ignores tokens, which are all the same.

Shapes: B rows, G drafts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import Engine
from engine.dspark.cost_model import StepShape
from engine.dspark.graph_choice import slots_for
from engine.kernels.round_commit import HEAD, PARTS
from engine.request import Sample
from engine.runner.graph_stepper import GraphStepper
from engine.runner.round_launches import RoundLaunches
from engine.runner.round_plan import RoundPlan
from engine.runner.round_stepper import RoundStepper
from engine.runner.stepper import HostCopy, StepModes
from engine.sampling.columns import SampleResult
from engine.scheduler import overlapped
from engine.scheduler.rounds import DeviceRounds
from tests.support import make_engine, save_tiny
from tests.unit.dspark.served import dspark, save_random

DRAFTS = 7
_ID = 20


@dataclass
class SimulatedDevice:
    """`plain(rows)` and `round(rows, verify, slots)` are seconds; `kept[kind]` chances that all drafts up to each are
    accepted. Confidences are calibrated: they spread around those by `spread` in log-odds, of which a part stays
    with its request from round to round. Making a graph takes `capture` seconds, and is believed to take `believed`."""

    plain: Callable[[int], float]
    round: Callable[[int, int, int], float]
    kept: dict[str, list[float]]
    capture: float = 0.5
    believed: float = 0.014
    spread: float = 1.2
    host: float = 0.25e-3
    """What the host takes to plan a launch, and half of it for each result."""
    now: float = 0.0
    free: float = 0.0
    """When the host is, and when the device will have done all it was given."""
    ran: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(rows, verify rows or 0) -> rounds and steps."""

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self._kind_of_slot: dict[int, str] = {}
        self._mood_of_slot: dict[int, float] = defaultdict(float)
        self._odds = {kind: self._log_odds(kept) for kind, kept in self.kept.items()}

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(overlapped, "time", SimpleNamespace(perf_counter=lambda: self.now))
        patch.setattr(RoundLaunches, "__call__", lambda launches: self._round_of(launches))
        patch.setattr(RoundStepper, "capture_seconds", property(lambda stepper: self.believed))
        run, plan = RoundStepper.run, DeviceRounds.plan

        def run_rounds(stepper: RoundStepper, given: RoundPlan, samples: list[Sample]) -> _Landing:
            for sample, slot in zip(samples, given.slots, strict=True):
                self._kind_of_slot[int(slot)] = sample.group.request.domain
            graphs = stepper._counters.graph_captures
            result = run(stepper, given, samples)
            if stepper._counters.graph_captures != graphs:
                self.now = max(self.now, self.free) + self.capture
            slots = result.slots or result.padded * (result.window or DRAFTS)
            self.ran[given.rows, result.verify] += given.rounds
            return self._landing(result, given.rounds * self.round(result.padded, result.verify, slots))

        def run_steps(stepper: GraphStepper, samples: list[Sample], slots: list[int], steps: int) -> _Landing:
            table, places = stepper._table, np.array(slots)
            _say(table, places)
            for _ in range(steps):
                _advance(table, places[table.finished_S.numpy()[places] == 0], 1)
            self.ran[len(samples), 0] += steps
            result = HostCopy(table, torch.tensor(slots), samples, StepModes.of(samples))
            return self._landing(result, steps * self.plain(len(samples)))

        def plan_rounds(rounds: DeviceRounds, rows):
            self.now += self.host
            return plan(rounds, rows)

        patch.setattr(RoundStepper, "run", run_rounds)
        patch.setattr(GraphStepper, "run", run_steps)
        patch.setattr(DeviceRounds, "plan", plan_rounds)

    def _landing(self, result, seconds: float) -> _Landing:
        """The result once it is there, `seconds` behind what the device was given before."""
        began = max(self.free, self.now)
        self.free = ended = began + seconds * float(np.exp(0.02 * self._rng.standard_normal()))
        return _Landing(result, self, began, ended)

    def _round_of(self, launches: RoundLaunches) -> None:
        table, inputs = launches._table, launches.inputs
        drafts = (launches.record_BF.shape[1] - HEAD) // PARTS
        live = np.flatnonzero(inputs.slots_B.numpy() >= 0)
        slots = inputs.slots_B.numpy()[live]
        room_B = table.max_new_S.numpy()[slots] - table.new_S.numpy()[slots]
        going = table.finished_S.numpy()[slots] == 0
        window_B = np.clip(np.minimum(inputs.most_B.numpy()[live], room_B - 1), 0, drafts)
        chance_BG = self._chances(slots, drafts)
        survival_BG = np.cumprod(chance_BG, 1)
        keys = np.where(np.arange(drafts) < window_B[:, None], survival_BG, -1.0).T.ravel()
        order = np.argsort(-keys, kind="stable")[: int(inputs.budget_1[0])]
        lens_B = np.bincount(order[keys[order] >= 0] % len(slots), minlength=len(slots))
        hits_BG = self._rng.random((len(slots), drafts)) < chance_BG
        accepted_B = np.minimum(np.cumprod(hits_BG, 1).sum(1), lens_B)
        emitted_B = np.minimum(accepted_B + 1, room_B)
        record_BF = launches.record_BF.numpy()
        record_BF[:], record_BF[:, 0] = 0, -1
        told = np.stack((window_B, lens_B, lens_B, accepted_B, emitted_B), axis=1)
        record_BF[live[going], : told.shape[1]] = told[going]
        values_BPG = record_BF[:, HEAD + drafts :].view(np.float32).reshape(len(record_BF), -1, drafts)
        values_BPG[live, 0], values_BPG[live, 1], values_BPG[live, 2] = 0.5, survival_BG, np.nan
        _say(table, slots)
        _advance(table, slots[going], emitted_B[going])

    def _chances(self, slots: np.ndarray, drafts: int) -> np.ndarray:
        """float64 [B, G]: each draft's, given those before."""
        mood = self._mood_of_slot
        for slot in slots.tolist():
            mood[slot] = 0.7 * mood[slot] + 0.714 * float(self._rng.standard_normal())
        odds_BG = np.stack([self._odds[self._kind_of_slot[slot]] for slot in slots.tolist()])[:, :drafts]
        moods_B1 = np.array([[mood[slot]] for slot in slots.tolist()])
        return _logistic(odds_BG + self.spread * (0.6 * moods_B1 + 0.8 * self._rng.standard_normal(odds_BG.shape)))

    def _log_odds(self, kept: list[float]) -> np.ndarray:
        """Around which chances spread so that survivals are `kept` in the mean."""
        rng, odds = np.random.default_rng(1), np.zeros(len(kept))
        noise = self.spread * (0.6 * rng.standard_normal((4000, 1)) + 0.8 * rng.standard_normal((4000, len(kept))))
        for place, wanted in enumerate(kept):
            low, high = -12.0, 8.0
            for _ in range(40):
                odds[place] = (low + high) / 2
                mean = np.prod(_logistic(odds[: place + 1] + noise[:, : place + 1]), 1).mean()
                low, high = (odds[place], high) if mean < wanted else (low, odds[place])
        return odds


class _Landing:
    """A result that is there at `ended`; waiting for it takes the host that long."""

    def __init__(self, result, device: SimulatedDevice, began: float, ended: float) -> None:
        self._result, self._device, self._span = result, device, (began, ended)

    def __getattr__(self, name: str):
        return getattr(self._result, name)

    def wait(self):
        self._device.now = max(self._device.now, self._span[1]) + self._device.host / 2
        return self._result.wait()

    def seconds_behind(self, before) -> tuple[float, float]:
        began, ended = self._span
        return (0.0 if before is None else max(0.0, began - before._span[1])), ended - began


def simulated_engine(device: SimulatedDevice, folder: Path, most: int) -> Engine:
    """An engine whose rounds and steps `device` runs, seeded as one that has measured some batch sizes."""
    target = save_tiny(folder / "t", max_position_embeddings=2048)
    drafter = save_random(folder / "d", block_size=DRAFTS, max_position_embeddings=2048)
    fields = dict(page_size=16, kv_tokens=most * 800, max_running=most, burst=8, prefill_tokens=8192)
    settings = dspark(drafter, mode="compact", probe_every=64)
    engine = make_engine(target, attention="triton", loop="overlapped", dspark=settings, **fields)
    parts, stepper = engine._parts, engine._loop._rounds._stepper
    width, vocab = parts.model.spec.hidden, parts.model.spec.vocab_size

    def hidden(batch, features=None):
        for layer in features or ():
            features[layer] = torch.zeros(batch.num_tokens, width)
        return torch.zeros(batch.num_tokens, width)

    parts.runner.hidden, parts.runner.logits = hidden, lambda states, adapters=None: torch.zeros(len(states), vocab)
    parts.speculation.drafter.commit = lambda committed: None
    parts.sampler.sample = lambda logits, rows, positions: SampleResult(
        torch.full((len(rows),), _ID), torch.full((len(rows),), -1.0), torch.zeros(len(rows), dtype=torch.bool)
    )
    parts.speculation.cost.seed(list(_seen(device, stepper, most)))
    return engine


def _seen(device: SimulatedDevice, stepper: RoundStepper, most: int):
    for rows in (most, 1, most // 4):
        for context in (768.0, 64.0):
            read = rows * context
            yield StepShape(rows, rows, False, read, read), device.plain(rows)
            for budget in (rows, 3 * rows, DRAFTS * rows):
                verify = stepper.tier(min(rows + budget, stepper.verify_tiers[-1]))
                slots = slots_for(verify - rows, DRAFTS * rows)
                shape = StepShape(rows, verify, True, read, verify * context, slots / (rows * DRAFTS))
                yield shape, device.round(rows, verify, slots)


def _say(table, slots: np.ndarray) -> None:
    table.ring_ids_SW.numpy()[slots], table.ring_logprobs_SW.numpy()[slots] = _ID, -1.0


def _advance(table, slots: np.ndarray, tokens) -> None:
    new_S, most_S, finished_S = table.new_S.numpy(), table.max_new_S.numpy(), table.finished_S.numpy()
    new_S[slots] += np.asarray(tokens).astype(new_S.dtype)
    table.computed_S.numpy()[slots] += tokens
    finished_S[slots] = (new_S[slots] >= most_S[slots]).astype(finished_S.dtype)


def _logistic(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))
