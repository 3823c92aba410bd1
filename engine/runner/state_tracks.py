"""Recurrent states of rows that the device advances by itself.

Owns what a captured step needs of them (`StateRows`), and what the host may say of the states kept on the grid
meanwhile: a burst writes them without the host, so nobody knows of a row's until its last burst has landed.
Ignores who has which slot (`engine.scheduler.states`).

Shapes: B rows of a tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels.state_copy import StateAddresses, copy_on_grid
from engine.memory.request_table import RequestTable
from engine.memory.state_pool import UNKNOWN, StatePool
from engine.memory.transfer import staged
from engine.request import Sample
from engine.runner.stepper import BurstResult, HostResult, StepModes, Stepper


class StateRows:
    """A captured step's rows: `live_B` is scratch where a row is idle, once `select` has run."""

    def __init__(self, rows: int, pool: StatePool, states: StateAddresses) -> None:
        self._pool, self._states = pool, states
        device = states.words_L.device
        self._given_2B = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self.live_B = torch.zeros(rows, dtype=torch.int64, device=device)

    def fill(self, live: list[int], partners: list[int]) -> None:
        given_2B = np.zeros(self._given_2B.shape, dtype=np.int64)
        given_2B[:, : len(live)] = live, partners
        self._given_2B.copy_(staged(given_2B, self._given_2B.device), non_blocking=True)

    def select(self, lengths_B: torch.Tensor) -> None:
        torch.mul(self._given_2B[0], lengths_B > 0, out=self.live_B)

    def keep(self, lengths_B: torch.Tensor) -> None:
        copy_on_grid(self._states, lengths_B, self.live_B, self._given_2B[1], self._pool.grid)


@dataclass(slots=True)
class _Track:
    """Of a pairing of slots: tokens in the live state and in the kept one, as of the last burst that landed;
    `burst` is the last that has been launched."""

    pairing: int
    length: int
    kept: int
    burst: int = 0


class StateTracks:
    def __init__(self, pool: StatePool, requests: RequestTable) -> None:
        self.pool = pool
        self._requests = requests
        self._states = StateAddresses(pool.tensors)
        self._tracks: dict[int, _Track] = {}
        self._bursts = 0

    def rows(self, count: int) -> StateRows:
        return StateRows(count, self.pool, self._states)

    def slots(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """Live slots and partners of the requests in `slots`."""
        states_S = self._requests.states_S
        assert states_S is not None, "rows of a recurrent model have states"
        live = states_S[slots].tolist()
        return live, [self.pool.partner(slot) for slot in live]

    def launched(self, samples: list[Sample], slots: list[int]) -> Landing:
        self._bursts += 1
        live, _ = self.slots(slots)
        for slot, sample in zip(live, samples, strict=True):
            track, pairing = self._tracks.get(slot), self.pool.pairing(slot)
            if track is None or track.pairing != pairing:
                assert sample.sequence is not None
                track = _Track(pairing, sample.sequence.computed, self.pool.tracked(slot))
                self._tracks[slot] = track
            track.burst = self._bursts
            self.pool.note(slot, UNKNOWN)
        starts = [sample.length - len(sample.ids) - 1 for sample in samples]
        return Landing(self, self._bursts, live, [self._tracks[slot].pairing for slot in live], starts)

    def forget(self, slots: list[int]) -> None:
        """Somebody else advances these rows now, and says so to the pool."""
        for slot in self.slots(slots)[0]:
            self._tracks.pop(slot, None)

    def landed(self, burst: int, slot: int, pairing: int, length: int, over: bool) -> None:
        track = self._tracks.get(slot)
        if track is None or track.pairing != pairing:
            return
        on_grid = length // self.pool.grid * self.pool.grid
        if on_grid > track.length:
            track.kept = on_grid
        track.length = length
        if (over or track.burst == burst) and self.pool.pairing(slot) == pairing:
            self.pool.note(slot, track.kept)
        if over or track.burst == burst:
            del self._tracks[slot]


@dataclass(slots=True)
class Landing:
    """What a burst must be told apart by when it lands. `starts` are tokens in the live state, less those
    generated."""

    tracks: StateTracks
    burst: int
    live: list[int]
    pairings: list[int]
    starts: list[int]

    def land(self, result: HostResult) -> None:
        rows = zip(self.live, self.pairings, self.starts, result.new, result.finished, strict=True)
        for slot, pairing, start, new, finished in rows:
            self.tracks.landed(self.burst, slot, pairing, start + int(new), bool(finished))


class TrackedResult:
    """A burst's results, which tell of the states kept when they arrive."""

    def __init__(self, result: BurstResult, landing: Landing) -> None:
        self._result, self._landing = result, landing

    def wait(self) -> HostResult:
        result = self._result.wait()
        self._landing.land(result)
        return result


class WithoutAdapters:
    """Bursts of `captured` steps, which know no adapters; those with any are run by `eager`, which does not count
    tokens on the device: rows whose logits are edited stay with it from then on."""

    def __init__(self, captured: Stepper, eager: Stepper, tracks: StateTracks | None) -> None:
        self._captured, self._eager, self._tracks = captured, eager, tracks
        self._counts = True

    def run(self, samples: list[Sample], slots: list[int], steps: int) -> BurstResult:
        plain = all(sample.group.lease is None for sample in samples)
        self._counts = self._counts and plain
        if plain and (self._counts or not StepModes.of(samples).edits):
            return self._captured.run(samples, slots, steps)
        if self._tracks is not None:
            self._tracks.forget(slots)
        return self._eager.run(samples, slots, steps)
