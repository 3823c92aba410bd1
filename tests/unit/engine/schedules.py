"""Random schedules, and the judge of what came out of them.

Owns `Schedule`, one engine under arrivals, aborts, pauses, flushes, weight updates and a pool that is
always too small; and `Judge`, which computes every finished sample again in an undisturbed serial
loop without a cache: span by span, under the weights each span names. Ignores what a step costs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from engine import GroupRequest
from engine.errors import SparkrollError
from engine.sampling.params import RowSampling
from engine.sampling.sampler import Sampler
from engine.sampling.seeds import derive_seed
from engine.types import GroupOutput, SampleOutput, SampleResume
from tests.support import VOCAB, ask, assert_whole, make_engine, prompt, reference_logits, update
from tests.unit.engine.test_updates import Sink

KV_POLICIES = ["invalidate", "namespace", "keep"]
NUDGE = 1e-4
"""Logits of two correct forward passes differ by less; a draw that such a difference turns is a tie."""
Done = list[tuple[GroupRequest, GroupOutput]]


class Schedule:
    """One engine under fire. `folders[v % 2]` are the weights of policy version v."""

    def __init__(self, folders: list[Path], seed: int, loop: str, **engine) -> None:
        self.random = random.Random(seed)
        self.folders = folders
        self.engine = make_engine(
            folders[0],
            page_size=self.random.choice([1, 2, 4]),
            kv_tokens=self.random.choice([64, 96, 160]),
            max_running=self.random.choice([2, 5, 12]),
            prefill_tokens=self.random.choice([3, 16, 64]),
            lookahead=self.random.choice([0, 3, 8]),
            burst=self.random.choice([1, 2, 3]),
            loop=loop,
            canary=seed % 2,
            **engine,
        )
        # Whole schedules without edits, since a batch with one edited row takes another way.
        self.edits = self.random.random() < 0.3
        self.live: dict[str, tuple[GroupRequest, Sink]] = {}
        self.done: Done = []
        self.count = 0

    def run(self, operations: int) -> None:
        actions = [self.add] * 4 + [self.step] * 12 + [self.abort, self.update, self.pause, self.resume, self.flush]
        for _ in range(operations):
            self.random.choice(actions)()
            self.collect()
            if self.random.random() < 0.2:
                self.engine.check()
        self.engine.resume()
        self.collect()  # checking and resuming commit what was in flight
        while self.live:
            assert self.engine.step(), f"stuck with {list(self.live)}"
            self.collect()
        self.engine.check()
        assert self.engine.flush("all") >= 0
        gauges = self.engine.gauges()
        assert gauges.pages_free == gauges.pages_total, "a page was lost"

    def add(self) -> None:
        self.count += 1
        start = self.random.choice([10, 10, 10, 40, 70])
        sampling: dict = dict(
            temperature=self.random.choice([0.0, 1.0, 1.0]),
            max_new=self.random.randint(1, 14),
            seed=self.random.randint(0, 10**6),
            stop_ids=self.random.sample(range(VOCAB), self.random.choice([0, 0, 30])),
        )
        if self.random.random() < 0.2:
            sampling |= dict(top_k=7, top_p=0.9)
        if self.edits and self.random.random() < 0.3:
            sampling |= dict(repetition_penalty=1.2, stop_ids=self.random.sample(range(VOCAB), 40))
        ids = prompt(self.random.randint(1, 24), start)
        request = ask(f"g{self.count}", ids, n=self.random.choice([1, 1, 3, 6]), **sampling)
        sink = Sink()
        try:
            self.engine.add_group(request, sink)
            self.live[request.group_id] = (request, sink)
        except SparkrollError as error:
            assert error.code in ("TOO_LARGE", "OVERLOADED")

    def step(self) -> None:
        self.engine.step()

    def abort(self) -> None:
        if self.live:
            self.engine.abort([self.random.choice(list(self.live))])

    def update(self) -> None:
        version = self.engine.policy.version + 1
        update(self.engine, self.folders[version % 2], version, kv_policy=self.random.choice(KV_POLICIES))

    def pause(self) -> None:
        self.engine.pause(self.random.choice(["retract", "in_place", "drain"]))

    def resume(self) -> None:
        self.engine.resume()

    def flush(self) -> None:
        self.engine.flush(self.random.choice(["all", "stale"]))

    def collect(self) -> None:
        for group_id, (request, sink) in list(self.live.items()):
            if sink.group is not None:
                del self.live[group_id]
                self.done.append((request, sink.group))


@dataclass(slots=True)
class Piece:
    """Tokens [start, end) of a sample, all under one policy version and with keys of that alone."""

    request: GroupRequest
    sample: SampleOutput
    policy_version: int
    start: int
    end: int
    ends_sample: bool


class Judge:
    """Computes pieces again, all of a schedule in one batch per weights. `near_ties` counts draws that
    rounding decided: there the judge goes on from the token that was emitted."""

    def __init__(self, folders: list[Path], atol: float = 1e-4) -> None:
        self._folders = folders
        self._atol = atol
        self._sampler = Sampler(VOCAB, "cpu")
        fields: dict = dict(kv_tokens=16384, max_running=256, prefill_tokens=4096, prefix_cache=False, loop="serial")
        self._engines = [make_engine(folder, **fields, device="cpu") for folder in folders]
        self.near_ties = 0

    def check(self, done: Done) -> int:
        """How many samples were compared."""
        samples = [(request, sample) for request, group in done for sample in group.samples]
        pieces = [piece for request, sample in samples for piece in pieces_of(request, sample)]
        while pieces:
            pieces = [
                rest
                for parity in (0, 1)
                for rest in self._check_alike(parity, [piece for piece in pieces if piece.policy_version % 2 == parity])
            ]
        return len(samples)

    def _check_alike(self, parity: int, pieces: list[Piece]) -> list[Piece]:
        """Compare pieces of the same weights; what remains of those in which a tie was met."""
        requests = [
            msgspec.structs.replace(
                piece.request,
                group_id=f"{number}",
                resume=[SampleResume(index=piece.sample.index, ids=piece.sample.ids[: piece.start])],
            )
            for number, piece in enumerate(pieces)
        ]
        outputs = [group.samples[0] for group in self._engines[parity].generate(requests)]
        rests = (self._check(piece, whole) for piece, whole in zip(pieces, outputs, strict=True))
        return [rest for rest in rests if rest is not None]

    def _check(self, piece: Piece, whole: SampleOutput) -> Piece | None:
        sample, start = piece.sample, piece.start
        ids, expected = sample.ids[start : piece.end], whole.ids[: piece.end - start]
        same = min(len(ids), len(expected))
        different = np.flatnonzero(ids[:same] != expected[:same])
        agreed = int(different[0]) if len(different) else same
        np.testing.assert_allclose(
            sample.logprobs[start : start + agreed], whole.logprobs[:agreed], atol=self._atol, rtol=0
        )
        if len(different):
            tie = start + agreed
            name = f"{piece.request.group_id}[{sample.index}], token {tie}"
            assert self._is_tie(piece, tie), f"{name}: {ids.tolist()}, expected {expected.tolist()}"
            self.near_ties += 1
            if tie + 1 < len(sample.ids):
                return replace(piece, start=tie + 1)
            return None
        assert len(ids) == len(expected), f"{len(ids)} tokens, expected {len(expected)}"
        if piece.ends_sample:
            assert (sample.finish, piece.end) == (whole.finish, start + len(whole.ids))
        return None

    def _is_tie(self, piece: Piece, position: int) -> bool:
        """Whether raising the emitted id's logit by a rounding error makes it the one that is drawn."""
        request, sample = piece.request, piece.sample
        before = sample.ids[:position]
        assert request.sampling.seed is not None
        seed = derive_seed(request.sampling.seed, sample.index)
        row = RowSampling(request.sampling, request.want, seed, request.prompt_ids, (), before)
        sequence = [*request.prompt_ids, *before]
        logits_1V = reference_logits(self._folders[piece.policy_version % 2], sequence)[-1:].clone()
        logits_1V[0, int(sample.ids[position])] += NUDGE
        drawn = self._sampler.sample(logits_1V, [row], [len(sequence)])
        return int(drawn.ids[0]) == int(sample.ids[position])


def pieces_of(request: GroupRequest, sample: SampleOutput) -> list[Piece]:
    """A sample's spans up to the first whose keys come from several policies."""
    assert_whole(sample)
    assert sample.finish in ("stop", "length", "abort")
    pieces = []
    for span in sample.spans:
        if span.mixed_kv:
            break
        ends = span is sample.spans[-1] and sample.finish != "abort"
        pieces.append(Piece(request, sample, span.policy_version, span.start, span.end, ends))
    return pieces


@dataclass(slots=True)
class Tally:
    schedules: int = 0
    samples: int = 0
    near_ties: int = 0
    seconds: float = 0.0


def fuzz(
    folders: list[Path],
    seeds: Iterable[int],
    loop: str,
    operations: int = 60,
    seconds: float = float("inf"),
    atol: float = 1e-4,
    **engine,
) -> Tally:
    """Run and judge schedules until the seeds or the time is up; a failure names its seed."""
    judge, tally, began = Judge(folders, atol), Tally(), time.perf_counter()
    for seed in seeds:
        if time.perf_counter() - began > seconds:
            break
        schedule = Schedule(folders, seed, loop, **engine)
        try:
            schedule.run(operations)
            tally.samples += judge.check(schedule.done)
        except BaseException as error:
            error.add_note(f"schedule {seed}, {loop} loop, {operations} operations")
            raise
        tally.schedules += 1
    tally.near_ties, tally.seconds = judge.near_ties, time.perf_counter() - began
    return tally
